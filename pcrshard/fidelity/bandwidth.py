"""Choose the scan by how long the training loop waits for data: the papers' future work (section 7 of the VLDB paper)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from ..index import FULL, Scan
from .level import ScanLevel

Batch = TypeVar("Batch")
_MARGIN = 0.95
_SMOOTHING = 0.5


class BandwidthTuner:
    """Takes the highest scan that keeps the accelerator fed.

    After every ``window`` steps it compares the time waited for batches with the time spent on them. While the loop waits, data came as fast as
    they can, which is the bandwidth; the scan whose bytes the loop can then use at its own speed is taken at once (X = W / E[s],
    Theorem 4.1). While it does not wait, the bandwidth is at least what was used; the next scan up is tried, and when that brings a wait, it is
    not tried again for twice as long as the last time.

    Args:
        level: What the readers follow.
        bytes_per_sample: Of scans 1..N and then of ``"full"``, as :func:`bytes_per_sample` gives them.
        floor: Lowest scan that may be taken: what the task needs, by the user or by :class:`ScanTuner`. May be a level itself.
        max_wait: Share of a step that may be spent waiting.
        window: Steps between decisions.
        patience: Windows without a wait until a higher scan is tried.

    Raises:
        ValueError: The numbers make no sense.
    """

    def __init__(
        self,
        level: ScanLevel,
        bytes_per_sample: Sequence[float],
        *,
        floor: Scan | ScanLevel = 1,
        max_wait: float = 0.05,
        window: int = 10,
        patience: int = 3,
    ) -> None:
        if len(bytes_per_sample) < 2 or min(bytes_per_sample) <= 0 or not 0 < max_wait < 1 or window < 1 or patience < 1:
            raise ValueError(
                "expected bytes of at least one scan and full, a wait between 0 and 1, and a window and patience of at least 1"
            )
        self.level, self.sizes, self.floor = level, list(bytes_per_sample), floor
        self.max_wait, self.window, self.patience = max_wait, window, patience
        self.bandwidth: float | None = None
        self._waited = self._used = 0.0
        self._samples = self._steps = self._calm = 0
        self._hold = patience
        self._tried: int | None = None
        self._settling = 0

    def watch(self, batches: Iterable[Batch], *, samples: int) -> Iterator[Batch]:
        """Iterate batches and tune meanwhile.

        Args:
            batches: The loader.
            samples: In a batch.
        """
        source = iter(batches)
        while True:
            begun = time.monotonic()
            try:
                batch = next(source)
            except StopIteration:
                return
            came = time.monotonic()
            yield batch
            self.step(came - begun, time.monotonic() - came, samples)

    def step(self, waited: float, used: float, samples: int) -> Scan:
        """Note a step of the training loop, and decide when a window is full.

        Args:
            waited: Seconds for which the loop waited for the batch.
            used: Seconds it spent on it.
            samples: In the batch.

        Returns:
            The level's scan.
        """
        self._waited, self._used = self._waited + waited, self._used + used
        self._samples, self._steps = self._samples + samples, self._steps + 1
        if self._steps >= self.window:
            self._decide()
            self._waited = self._used = 0.0
            self._samples = self._steps = 0
        return self.level.value

    @property
    def _position(self) -> int:
        scan = self.level.value
        return len(self.sizes) - 1 if scan == FULL else min(scan, len(self.sizes)) - 1

    @property
    def _lowest(self) -> int:
        floor = self.floor.value if isinstance(self.floor, ScanLevel) else self.floor
        return len(self.sizes) - 1 if floor == FULL else min(floor, len(self.sizes)) - 1

    def _decide(self) -> None:
        position = max(self._position, self._lowest)
        total = self._waited + self._used
        if self._settling > 0:
            self._settling -= 1  # what was fetched before the last change is still coming
        elif self._waited > self.max_wait * total:
            position = self._lower(position, total)
        else:
            position = self._raise(position)
        scan: Scan = FULL if position == len(self.sizes) - 1 else position + 1
        if scan != self.level.value:
            self.level.value = scan

    def _lower(self, position: int, total: float) -> int:
        """The highest scan that the bandwidth just seen can feed."""
        seen = self._samples * self.sizes[position] / total
        self.bandwidth = seen if self.bandwidth is None else _SMOOTHING * seen + (1 - _SMOOTHING) * min(self.bandwidth, 2 * seen)
        affordable = _MARGIN * seen * self._used / self._samples
        lower = max((i for i, size in enumerate(self.sizes[:position]) if size <= affordable), default=0)
        if self._tried == position:
            self._hold *= 2
        self._tried, self._calm = None, 0
        self._settling = 1 if max(lower, self._lowest) != position else 0
        return max(lower, self._lowest)

    def _raise(self, position: int) -> int:
        """One scan up, after some calm."""
        self._calm += 1
        if self._tried == position and self._calm >= self.patience:
            self._tried, self._hold = None, self.patience  # the higher scan holds
        if position == len(self.sizes) - 1 or self._calm < self._hold:
            return position
        self._calm, self._tried, self._settling = 0, position + 1, 1
        return position + 1


def bytes_per_sample(entries: Sequence[Any]) -> list[float]:
    """Mean bytes of a sample at scans 1..N and at ``"full"``, from a dataset index's ``shards``."""
    num_samples = sum(entry.num_samples for entry in entries)
    return [sum(entry.prefix_stops[i] for entry in entries) / num_samples for i in range(len(entries[0].prefix_stops))]
