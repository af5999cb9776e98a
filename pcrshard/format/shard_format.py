"""How shards are written: their scan script, their layout, and which field is where."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from ..errors import CorruptIndex, EncodeError, ScanUnavailable
from .levels import DEFAULT_LEVELS, LEVELS, Levels
from .names import is_jpeg_field, is_other_image
from .scan import Scan, check_scan
from .scan_script import MAX_GROUPS, Q95, STANDARD, ScanScript
from .schema import IMAGE, IMAGE_LIST, Field, Kind, Part, Schema, decode_schema

SCRIPTS = {script.name: script for script in (STANDARD, Q95)}
# The script that `encode` chooses by the quality of the sources.
AUTO = "auto"
NAMES = (LEVELS, *SCRIPTS, AUTO)


@dataclasses.dataclass(frozen=True)
class ShardFormat:
    """How shards are written.

    Attributes:
        script: ``levels`` cuts each image where a further byte is worth less than at the same level
            in others, chosen by a sample of the images. A scan script cuts all alike: ``standard``,
            ``q95`` for sources of JPEG quality 90 and above, or your own. ``auto`` takes levels,
            but where there are fewer than 64 images, or they are alike, a script by their quality.
        levels: Number of levels, 1 to 32.
        level_shares: Share of the full bytes at each level, rising to 1. Default: a geometric
            ladder from 0.05, or from what the first scans take.
        train_size: Side in pixels at which networks see the images, which decides what levels count
            as loss; 0 if unknown.
        layout: ``compact``, or ``preview`` to show base scans as ordinary image members.
        base: Scan groups in a preview member.
        deferred: First scan at which a field is present: ``{"npy": 5, "json": "full"}``; a key is
            the name of a field, or its last extension. Other fields are present at every scan,
            ``cls`` always; images are from scan 1.
        preview_fields: Fields stored as members too, in the preview layout.

    Raises:
        EncodeError: A value is out of range, or two options conflict.
    """

    script: ScanScript | Levels | str = AUTO
    layout: str = "compact"
    base: int = 2
    preview_fields: tuple[str, ...] = ()
    deferred: Mapping[str, Scan] = dataclasses.field(default_factory=dict)
    levels: int = DEFAULT_LEVELS
    level_shares: tuple[float, ...] = ()
    train_size: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.script, str) and self.script not in NAMES:
            raise EncodeError(f"expected a scan script of {[*NAMES]}, got {self.script!r}")
        self._check_levels()
        if self.layout not in ("compact", "preview"):
            raise EncodeError(f"expected layout 'compact' or 'preview', got {self.layout!r}")
        most = self.num_groups
        if not 1 <= self.base <= most:
            raise EncodeError(f"expected base of 1 to {most}, got {self.base}")
        if "cls" in self.deferred:
            raise EncodeError("cls cannot be deferred: labels are present at every scan")
        for field, scan in self.deferred.items():
            try:
                check_scan(scan, most)
            except (ScanUnavailable, TypeError) as error:
                raise EncodeError(f"deferred field {field!r}: {error}") from error

    def _check_levels(self) -> None:
        if not 1 <= self.levels <= MAX_GROUPS:
            raise EncodeError(f"expected 1 to {MAX_GROUPS} levels, got {self.levels}")
        shares = self.level_shares
        rising = all(a < b for a, b in itertools.pairwise((0.0, *shares)))
        if shares and not (rising and shares[-1] == 1 and len(shares) <= MAX_GROUPS):
            raise EncodeError(
                f"expected level shares that rise to 1, as in 0.1,0.3,1, got {list(shares)}"
            )
        if self.script == AUTO and (shares or self.levels != DEFAULT_LEVELS):
            object.__setattr__(self, "script", LEVELS)  # frozen
        if not 0 <= self.train_size < 1 << 16:
            raise EncodeError(f"expected a train size of 0 to 65535, got {self.train_size}")

    @property
    def num_groups(self) -> int:
        """Number of scan groups."""
        if self.script == LEVELS:
            return len(self.level_shares) or self.levels
        # All that `auto` stands for have the same number.
        return STANDARD.num_groups if self.script == AUTO else self.scan_script.num_groups

    @property
    def is_open(self) -> bool:
        """Whether a sample of the images decides what divides them into scan groups."""
        return self.script in (LEVELS, AUTO)

    @property
    def scan_script(self) -> ScanScript | Levels:
        """What divides images into scan groups.

        Raises:
            EncodeError: A sample of the images has to decide it first.
        """
        if not isinstance(self.script, str):
            return self.script
        if self.is_open:
            raise EncodeError(
                f"expected a script, got {self.script!r}, which a sample has to decide"
            )
        return SCRIPTS[self.script]

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
