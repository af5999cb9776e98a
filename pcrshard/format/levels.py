"""Levels: scan groups that cut every image at the same slope (SPEC.md section 3)."""

from __future__ import annotations

import math

import msgspec

from ..errors import CorruptIndex
from .scan_script import MAX_GROUPS, ScanScript, parse_script
from .shard_head import require

LEVELS = "levels"
DEFAULT_LEVELS = 10


class Levels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What divides each image of a dataset into scan groups by what its bytes are worth.

    Post-compression rate-distortion optimization (JPEG 2000, Taubman 2000) across images: at level
    k every image has the scans up to where a further byte reduces its loss by less than a slope.

    Attributes:
        base: The script of the scans, any number of which are in a group.
        slopes: For each level, the least loss that a byte must save, falling to 0: the last level
            has all scans.
        train_size: Side in pixels of the pictures that networks see, which decides what counts as
            loss; 0 if unknown.
    """

    base: ScanScript
    slopes: tuple[float, ...]
    train_size: int = 0

    @property
    def name(self) -> str:
        """What a schema calls it."""
        return LEVELS

    @property
    def num_groups(self) -> int:
        """Number of levels."""
        return len(self.slopes)

    @property
    def groups(self) -> tuple[str, ...]:
        """What a schema says of each group."""
        return tuple(f"{self.base.name} to slope {slope:.6g}" for slope in self.slopes)

    def check(self) -> None:
        """Check what types do not express.

        Raises:
            CorruptIndex: The slopes do not fall to 0, or the base is no scan script.
        """
        *others, last = self.slopes or (math.nan,)
        falling = all(a > b for a, b in zip(self.slopes, self.slopes[1:], strict=False))
        fits = last == 0 and falling and all(map(math.isfinite, others))
        require(fits and len(self.slopes) <= MAX_GROUPS, "slopes of levels do not fall to 0")
        require(0 <= self.train_size < 1 << 16, "train_size of levels is not in 0..65535")
        try:
            parse_script(self.base.name, "\n".join(self.base.groups))
        except ValueError as error:
            raise CorruptIndex(f"base of levels: {error}") from error
