"""Scans by epoch, as learning rates go by epoch."""

from __future__ import annotations

from collections.abc import Mapping

from ..format.scan import FULL, Scan
from ..reading.scan_level import ScanLevel


def scan_at(milestones: Mapping[int, Scan], epoch: int) -> Scan:
    """The scan of an epoch: that of the last milestone that is not behind it, ``"full"`` before the first.

    >>> [scan_at({0: 2, 30: 5, 60: "full"}, epoch) for epoch in (0, 29, 30, 99)]
    [2, 2, 5, 'full']
    """
    passed = [start for start in milestones if start <= epoch]
    return milestones[max(passed)] if passed else FULL


class ScanSchedule:
    """Sets a level at the start of each epoch.

    Args:
        level: What the readers follow.
        milestones: First epoch of each scan: ``{0: 2, 30: 5, 60: "full"}``; ``{0: 5}`` is constant.
    """

    def __init__(self, level: ScanLevel, milestones: Mapping[int, Scan]) -> None:
        for scan in milestones.values():
            ScanLevel(scan)  # checks it
        self.level, self.milestones = level, dict(milestones)

    def step(self, epoch: int) -> Scan:
        """Set the level for an epoch, and return it; call it on every rank before the epoch is iterated."""
        self.level.value = scan_at(self.milestones, epoch)
        return self.level.value
