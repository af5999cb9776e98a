"""A scan for each epoch, as learning rates are set by epoch."""

from __future__ import annotations

from collections.abc import Mapping

from ..format.scan import FULL, Scan
from ..reading.scan_level import ScanLevel


def scan_at(milestones: Mapping[int, Scan], epoch: int) -> Scan:
    """The scan of an epoch: that of the last milestone up to it, ``"full"`` before the first one.

    >>> [scan_at({0: 2, 30: 5, 60: "full"}, epoch) for epoch in (0, 29, 30, 99)]
    [2, 2, 5, 'full']
    """
    passed = [start for start in milestones if start <= epoch]
    return milestones[max(passed)] if passed else FULL


class ScanSchedule:
    """Sets a level at the start of each epoch.

    Args:
        level: The level that the readers follow.
        milestones: Scan from each of these epochs on: ``{0: 2, 30: 5, 60: "full"}``; ``{0: 5}`` is
            constant.

    Raises:
        ValueError: A scan is none.
    """

    def __init__(self, level: ScanLevel, milestones: Mapping[int, Scan]) -> None:
        for scan in milestones.values():
            # A level checks its scan, so a wrong one is found before the first epoch.
            ScanLevel(scan)
        self.level = level
        self.milestones = dict(milestones)

    def step(self, epoch: int) -> Scan:
        """Set the level for an epoch; call it on every rank before the epoch is iterated.

        Returns:
            The scan that the level has now.
        """
        self.level.value = scan_at(self.milestones, epoch)
        return self.level.value
