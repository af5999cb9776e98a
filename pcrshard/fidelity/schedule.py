"""Policies that set the scan of a training job: by epoch, or by measurement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..format.scan import FULL, Scan
from ..reading.scan_level import ScanLevel


class ScanPolicy:
    """Base class of :class:`ScanSchedule`, :class:`ScanTuner` and :class:`BandwidthTuner`.

    A policy sets a level. The training loop is the same with every policy::

        for epoch in range(epochs):
            policy.step(epoch=epoch, model=model)
            for batch in policy.watch(loader):
                ...

    Attributes:
        level: The level that the readers follow.
    """

    def __init__(self, level: ScanLevel) -> None:
        self.level = level

    def step(self, *, epoch: int, model: Any) -> Any:
        """Begin an epoch; call it on every rank before iterating."""

    def watch(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Iterate over the batches of an epoch."""
        return iter(batches)

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable state for a checkpoint: the scan of the level."""
        return {"scan": self.level.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; on a staged copy at most at its highest scan."""
        highest = self.level.highest
        scan = state["scan"]
        is_above = highest != FULL and (scan == FULL or scan > highest)
        self.level.value = highest if is_above else scan


class ScanSchedule(ScanPolicy):
    """A policy that sets a level at the start of each epoch.

    Args:
        level: The level that the readers follow.
        milestones: Scan from each of these epochs on: ``{0: 2, 30: 5, 60: "full"}``; ``{0: 5}`` is
            constant. Before the first one, training reads everything. ``"full"`` is the highest
            scan that a staged copy holds.

    Raises:
        TypeError, ScanUnavailable: A scan is invalid, or above those of a staged copy.
    """

    def __init__(self, level: ScanLevel, milestones: Mapping[int, Scan]) -> None:
        for scan in milestones.values():
            # Catches errors before the first epoch.
            level.check(level.highest if scan == FULL else scan)
        super().__init__(level)
        self.milestones = dict(milestones)

    def step(self, epoch: int, model: Any = None) -> Scan:
        """Set the level for an epoch; call it on every rank before iterating.

        Args:
            epoch: Number of the epoch, from 0.
            model: Ignored; other policies need it.

        Returns:
            The current scan of the level.
        """
        passed = [start for start in self.milestones if start <= epoch]
        scan = self.milestones[max(passed)] if passed else FULL
        self.level.value = self.level.highest if scan == FULL else scan
        return self.level.value
