"""A scan number shared with DataLoader workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..format.scan import FULL, Scan, is_integer
from ..format.shard_index import MAX_GROUPS
from .shared_integers import SharedIntegers

_FULL_NUMBER = 0


class ScanLevel:
    """The scan that readers use from their next shard on; one value for the process and its DataLoader workers.

    It travels to workers with the dataset, under fork, spawn and forkserver, and lives in shared memory, so that
    ``level.value = 5`` in the training loop is seen by workers that already run.

    >>> level = ScanLevel(2)
    >>> level.value = "full"
    >>> level
    ScanLevel('full')

    Args:
        scan: 1..N, or ``"full"``.
    """

    def __init__(self, scan: Scan = FULL) -> None:
        self._number = SharedIntegers([_FULL_NUMBER])
        self.value = scan

    @property
    def value(self) -> Scan:
        """The scan, 1..N or ``"full"``."""
        return self._number[0] or FULL

    @value.setter
    def value(self, scan: Scan) -> None:
        if scan != FULL and not (is_integer(scan) and 1 <= scan <= MAX_GROUPS):
            raise ValueError(f"expected a scan of 1 to {MAX_GROUPS} or 'full', got {scan!r}")
        self._number[0] = _FULL_NUMBER if scan == FULL else scan

    def __repr__(self) -> str:
        return f"ScanLevel({self.value!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ScanLevel:
        """A copied pipeline follows the same level."""
        return self


ScanChoice = Scan | ScanLevel


def current_scan(scan: ScanChoice | Callable[[], Scan]) -> Scan:
    """The scan that a choice means now: a level's value, what a callable returns, or itself."""
    if isinstance(scan, ScanLevel):
        return scan.value
    return scan() if callable(scan) else scan
