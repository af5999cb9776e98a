"""How shards are written: their scan script, their layout, and which field is where."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import CorruptIndex, EncodeError, ScanUnavailable
from .names import is_jpeg_field, is_other_image
from .scan import Scan, check_scan
from .scan_script import Q95, STANDARD, ScanScript
from .schema import IMAGE_LIST, Schema, Stream, decode_schema

SCRIPTS = {script.name: script for script in (STANDARD, Q95)}
# The script that `encode` chooses by the quality of the sources.
AUTO = "auto"


class FieldNames(NamedTuple):
    """What the samples of a shard may have: JPEG fields with their codecs, and other fields."""

    streams: tuple[Stream, ...]
    others: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ShardFormat:
    """How shards are written.

    Attributes:
        script: Scan script, or the name of a built-in one: ``standard``, or ``q95`` for sources of
            JPEG quality 90 and above. For ``encode``, ``auto`` chooses by the quality of the
            sources.
        layout: ``compact``, or ``preview`` to show base scans as ordinary image members.
        base: Scan groups in a preview member.
        deferred: First scan at which a field is present: ``{"npy": 5, "json": "full"}``; a key is
            the name of a field, or its last extension. Other fields are present at every scan,
            ``cls`` always, images other than JPEG from scan 1.
        preview_fields: Fields stored as members too, in the preview layout.

    Raises:
        TypeError: A value has another type.
        ValueError: A value is out of range, or two options conflict.
    """

    script: ScanScript | str = STANDARD.name
    layout: str = "compact"
    base: int = 2
    preview_fields: tuple[str, ...] = ()
    deferred: Mapping[str, Scan] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.script, str) and self.script not in (known := [*SCRIPTS, AUTO]):
            raise EncodeError(f"expected a scan script of {known}, got {self.script!r}")
        if self.layout not in ("compact", "preview"):
            raise EncodeError(f"expected layout 'compact' or 'preview', got {self.layout!r}")
        # Both scripts that `auto` stands for have the same number of groups.
        most = STANDARD.num_groups if self.script == AUTO else self.scan_script.num_groups
        if not 1 <= self.base <= most:
            raise EncodeError(f"expected base of 1 to {most}, got {self.base}")
        if "cls" in self.deferred:
            raise EncodeError("cls cannot be deferred: labels are present at every scan")
        for field, scan in self.deferred.items():
            try:
                check_scan(scan, most)
            except (ScanUnavailable, TypeError) as error:
                raise EncodeError(f"deferred field {field!r}: {error}") from error

    @property
    def scan_script(self) -> ScanScript:
        """The script itself.

        Raises:
            EncodeError: It is ``auto``, which only ``encode`` resolves.
        """
        if self.script == AUTO:
            raise EncodeError("script 'auto' needs `encode`, which reads the sources first")
        return SCRIPTS[self.script] if isinstance(self.script, str) else self.script

    def schema(self, names: FieldNames) -> Schema:
        """Return the schema of a shard with these fields.

        Raises:
            EncodeError: There are too many fields, or their names are too long.
        """
        firsts = {field: self._first_scan(field) for field in names.others}
        late = {field: first for field, first in firsts.items() if first}
        fields = tuple(field for field in names.others if field not in late)
        preview = self.layout == "preview"
        shown = tuple(field for field in self.preview_fields if field in fields)
        schema = Schema(
            self.scan_script.name,
            self.scan_script.groups,
            "preview" if preview else "compact",
            self.base if preview else 0,
            # Lists last.
            tuple(sorted(names.streams, key=lambda stream: stream[1] == IMAGE_LIST)),
            fields,
            tuple(late.items()),
            shown if preview else (),
        )
        try:
            return decode_schema(schema.encode())
        except CorruptIndex as error:
            raise EncodeError(f"cannot write samples with these fields: {error}") from error

    def _first_scan(self, field: str) -> int:
        """Return the position of the first scan that has a field; 0 if every scan has it."""
        extension = field.rpartition(".")[2]
        # A JPEG field that is not a stream holds passthrough files.
        is_image = is_other_image(field) or is_jpeg_field(field)
        scan = self.deferred.get(field, self.deferred.get(extension, 1 if is_image else 0))
        return scan and check_scan(scan, self.scan_script.num_groups)
