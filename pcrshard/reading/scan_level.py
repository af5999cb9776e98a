"""The scan of the moment: a number, ``"full"``, or a level that a training job may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from ..errors import ScanUnavailable
from ..format.scan import FULL, Scan, is_integer
from ..format.shard_index import MAX_GROUPS
from .shared_integers import SharedIntegers

_FULL_NUMBER = 0
FirstScan = Scan | Literal["highest"]


class ScanRange(NamedTuple):
    """The scans that can be read of a dataset.

    Attributes:
        num_groups: Scan groups N.
        highest: ``"full"``, or the highest scan that a staged copy holds.
        name: What it is, in messages.
    """

    num_groups: int
    highest: Scan
    name: str

    def check(self, scan: Scan) -> None:
        """Raise ``ScanUnavailable`` for a scan that cannot be read."""
        if self.highest == FULL:
            legal = scan == FULL or scan <= self.num_groups
            expected = f"scan of 1 to {self.num_groups} or 'full'"
        else:
            legal = scan != FULL and scan <= self.highest
            expected = f"scan of 1 to {self.highest}, which the staged copy holds,"
        if not legal:
            raise ScanUnavailable(f"expected a {expected} for {self.name}, got {scan!r}")

    @property
    def number(self) -> int:
        """The highest scan as a number: N + 1 for ``"full"``."""
        return self.num_groups + 1 if self.highest == FULL else self.highest


class ScanLevel:
    """The scan that readers use from their next shard on, shared with DataLoader workers.

    It travels to workers with the dataset, under fork, spawn and forkserver, and lives in shared
    memory, so that ``level.value = 5`` in the training loop is seen by workers that already run.

    >>> level = ScanLevel(2)
    >>> level.value = "full"
    >>> level
    ScanLevel('full')

    Args:
        scan: Highest scan to read, 1-based, or ``"full"``. By default ``"full"``, and for a
            :class:`PCRDataset` that is a staged copy the highest scan that it holds.
    """

    # A mistyped name is an error, not an attribute without effect.
    __slots__ = ("_is_default", "_number", "_range")

    def __init__(self, scan: FirstScan = "highest") -> None:
        self._number = SharedIntegers([_FULL_NUMBER])
        self._range: ScanRange | None = None
        self.value = FULL if scan == "highest" else scan
        self._is_default = scan == "highest"

    @property
    def value(self) -> Scan:
        """The highest scan to read, 1-based, or ``"full"``.

        Setting it raises ``ValueError`` for what is no scan, and ``ScanUnavailable`` for a scan
        that the dataset which follows the level does not have.
        """
        return self._number[0] or FULL

    @value.setter
    def value(self, scan: Scan) -> None:
        self.check(scan)
        self._number[0] = _FULL_NUMBER if scan == FULL else scan
        self._is_default = False

    @property
    def highest(self) -> Scan:
        """The highest scan that it may be set to: that of the datasets which follow it."""
        return FULL if self._range is None else self._range.highest

    def check(self, scan: Scan) -> None:
        """Raise what setting the level to this scan would raise."""
        if scan != FULL and not (is_integer(scan) and 1 <= scan <= MAX_GROUPS):
            raise ValueError(f"expected a scan of 1 to {MAX_GROUPS} or 'full', got {scan!r}")
        if self._range is not None:
            self._range.check(scan)

    def follow(self, scans: ScanRange) -> None:
        """A dataset follows this level; of several datasets the one with the fewest scans counts.

        Raises:
            ScanUnavailable: The level is at a scan that the dataset does not have.
        """
        if self._is_default:
            self._number[0] = _FULL_NUMBER if scans.highest == FULL else scans.highest
        scans.check(self.value)
        known = self._range
        # A copy that was staged to a higher scan since then is followed again.
        if known is None or scans.name == known.name or scans.number <= known.number:
            self._range = scans

    def __repr__(self) -> str:
        return f"ScanLevel({self.value!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ScanLevel:
        """A copied pipeline follows the same level."""
        return self


ScanChoice = Scan | ScanLevel | Callable[[], Scan]


def current_scan(scan: ScanChoice) -> Scan:
    """The scan that counts now: a level's value, a callable's result, or the scan itself."""
    if isinstance(scan, ScanLevel):
        return scan.value
    return scan() if callable(scan) else scan
