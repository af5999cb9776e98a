"""How shards are written: their scan script, their layout, and which field is where."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..errors import CorruptIndex, EncodeError, ScanUnavailable
from .names import is_jpeg_field, is_other_image
from .scan import Scan, check_scan
from .scan_script import Q95, STANDARD, ScanScript
from .schema import IMAGE, IMAGE_LIST, Field, Kind, Part, Schema, decode_schema

SCRIPTS = {script.name: script for script in (STANDARD, Q95)}
# The script that `encode` chooses by the quality of the sources.
AUTO = "auto"


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
            ``cls`` always; images are from scan 1.
        preview_fields: Fields stored as members too, in the preview layout.

    Raises:
        EncodeError: A value is out of range, or two options conflict.
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

    def schema(self, kinds: Mapping[str, str], parts: tuple[Part, ...] = ()) -> Schema:
        """Return the schema of a dataset.

        Args:
            kinds: The kind of each field, from :func:`pcrshard.format.kinds.decide_kinds`.
            parts: Spatial values inside JSON fields.

        Raises:
            EncodeError: There are too many fields, their names are too long, or an option names a
                field that does not exist.
        """
        script, preview = self.scan_script, self.layout == "preview"
        named: dict[str, Kind] = {**kinds}  # type: ignore[dict-item]
        if unknown := set(self.preview_fields).difference(named):
            raise EncodeError(f"expected preview fields among {list(named)}, got {sorted(unknown)}")
        fields = [Field(name, kind, self._first_scan(name, kind)) for name, kind in named.items()]
        # Images first, and of these, lists last.
        fields.sort(key=lambda field: (not field.is_image, field.kind == IMAGE_LIST))
        schema = Schema(
            script.name,
            script.groups,
            "preview" if preview else "compact",
            self.base if preview else 0,
            tuple(fields),
            parts,
            self.preview_fields if preview else (),
        )
        try:
            return decode_schema(schema.encode())
        except CorruptIndex as error:
            raise EncodeError(f"cannot write samples with these fields: {error}") from error

    def _first_scan(self, name: str, kind: str) -> int:
        """Return the position of the first scan that has a field; 0 if every scan has it."""
        if kind in (IMAGE, IMAGE_LIST):
            return 1
        # Bytes of pictures would make every index large.
        default = int(is_jpeg_field(name) or is_other_image(name))
        scan = self.deferred.get(name, self.deferred.get(name.rpartition(".")[2], default))
        return scan and check_scan(scan, self.scan_script.num_groups)
