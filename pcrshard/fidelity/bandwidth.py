"""Choose the scan by how long the training loop waits for data: the papers' future work (section 7 of the VLDB paper)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from ..index import FULL, Scan
from .level import ScanLevel

Batch = TypeVar("Batch")
_MARGIN = 0.95
# A raise is worth its risk from so much more bytes on; a bandwidth is another one below so much of the old.
_RAISE, _CHANGED = 1.2, 0.7


class BandwidthTuner:
    """Takes the highest scan that keeps the accelerator fed.

    A step that waits found nothing read ahead. Between two such steps data came as fast as they can, whatever is buffered where: their bytes over
    that time are the bandwidth. When waits take more than ``max_wait``, the scan whose bytes the loop can use at its own speed at that
    bandwidth is taken at once (X = W / E[s], Theorem 4.1). While the loop does not wait, the bandwidth is at least what is used: after ``patience``
    windows the next scan up is tried. Each try that ends in waiting at the same bandwidth doubles the time until the next one; a bandwidth that
    has fallen for good, and a higher scan that holds, make the tuner patient no longer.

    Args:
        level: What the readers follow.
        bytes_per_sample: Of scans 1..N and then of ``"full"``, as :func:`bytes_per_sample` gives them.
        floor: Lowest scan that may be taken: what the task needs, by the user or by :class:`ScanTuner`. May be a level itself.
        max_wait: Share of the time that may be spent waiting.
        window: Steps between decisions.
        patience: Windows without waiting until a higher scan is tried.
        ahead: Samples that are read ahead, which come at the old scan after a change: (prefetch + 1) shards. By default those of a window.

    Attributes:
        bandwidth: Bytes a second, as last measured; ``None`` while the loop has never waited.

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
        ahead: int | None = None,
    ) -> None:
        if len(bytes_per_sample) < 2 or min(bytes_per_sample) <= 0 or not 0 < max_wait < 1 or window < 1 or patience < 1:
            raise ValueError(
                "expected bytes of at least one scan and full, a wait between 0 and 1, and a window and patience of at least 1"
            )
        self.level, self.sizes, self.floor = level, list(bytes_per_sample), floor
        self.max_wait, self.window, self.patience, self.ahead = max_wait, window, patience, ahead
        self.bandwidth: float | None = None
        self._hold = patience
        self._calm = self._settling = 0
        self._restart()

    def _restart(self) -> None:
        """Forget the window; and the last wait, which was at another scan."""
        self._waited = self._used = 0.0
        self._samples = self._steps = 0
        self._measured: tuple[float, int] | None = None  # seconds and samples since a step that waited

    def watch(self, batches: Iterable[Batch], *, samples: int) -> Iterator[Batch]:
        """Iterate batches and tune meanwhile. The wait for the first one is not counted: nothing is read ahead across epochs.

        Args:
            batches: The loader.
            samples: In a batch.
        """
        source, first = iter(batches), True
        while True:
            begun = time.monotonic()
            try:
                batch = next(source)
            except StopIteration:
                return
            came = time.monotonic()
            yield batch
            self.step(0.0 if first else came - begun, time.monotonic() - came, samples)
            first = False

    def step(self, waited: float, used: float, samples: int) -> Scan:
        """Note a step of the training loop, and decide when it is time.

        Args:
            waited: Seconds for which the loop waited for the batch.
            used: Seconds it spent on it.
            samples: In the batch.

        Returns:
            The level's scan.
        """
        if self._settling > 0:
            self._settling -= samples
            return self.level.value
        self._waited, self._used = self._waited + waited, self._used + used
        self._samples, self._steps = self._samples + samples, self._steps + 1
        if waited > self.max_wait * used:
            if self._measured is not None:
                self._fall(self._measured[0] + waited, self._measured[1])
                if self._settling > 0:
                    return self.level.value
            else:
                self._measured = 0.0, 0
        if self._measured is not None:
            passed = 0.0 if self._measured == (0.0, 0) else waited
            self._measured = self._measured[0] + passed + used, self._measured[1] + samples
        if self._steps >= self.window:
            self._end_window()
        return self.level.value

    @property
    def _position(self) -> int:
        scan = self.level.value
        return len(self.sizes) - 1 if scan == FULL else min(scan, len(self.sizes)) - 1

    @property
    def _lowest(self) -> int:
        floor = self.floor.value if isinstance(self.floor, ScanLevel) else self.floor
        return len(self.sizes) - 1 if floor == FULL else min(floor, len(self.sizes)) - 1

    def _move(self, position: int, samples: int) -> None:
        scan: Scan = FULL if position == len(self.sizes) - 1 else position + 1
        if scan != self.level.value:
            self.level.value = scan
            self._settling = self.window * samples if self.ahead is None else self.ahead
            self._calm = 0
            self._restart()

    def _fall(self, seconds: float, samples: int) -> None:
        """Lower the scan, if waits took too much; ``samples`` came in ``seconds`` between two steps that waited."""
        position = max(self._position, self._lowest)
        mean_used = self._used / self._steps
        # A wait early in a window counts as if the rest of it went well.
        if self._waited <= self.max_wait * (self._waited + mean_used * max(self.window, self._steps)):
            return
        seen = samples * self.sizes[position] / seconds
        changed = self.bandwidth is not None and seen < _CHANGED * self.bandwidth
        affordable = _MARGIN * seen * mean_used * self._steps / self._samples
        lower = max((i for i, size in enumerate(self.sizes[:position]) if size <= affordable), default=0)
        self._hold = self.patience if changed or self.bandwidth is None else 2 * self._hold
        self.bandwidth, self._calm = seen, 0
        self._move(max(lower, self._lowest), self._samples // self._steps)

    def _end_window(self) -> None:
        """After enough windows without waiting, try a higher scan."""
        waits, position = self._waited > self.max_wait * (self._waited + self._used), max(self._position, self._lowest)
        self._calm = 0 if waits else self._calm + 1
        per_step, rate = self._samples // self._steps, self._samples * self.sizes[position] / (self._waited + self._used)
        self._waited = self._used = 0.0
        self._samples = self._steps = 0
        if not waits:
            self._measured = None
            if self._calm >= self.patience and self.bandwidth is not None and rate > self.bandwidth / _CHANGED:
                self.bandwidth, self._hold = rate, self.patience  # what was dear is not so any more
            if self._calm < self._hold:
                position = max(position, self._lowest)
            elif position < len(self.sizes) - 1:
                enough = _RAISE * self.sizes[position]
                position = next((i for i, size in enumerate(self.sizes) if size >= enough), len(self.sizes) - 1)
        self._move(position, per_step)


def bytes_per_sample(entries: Sequence[Any]) -> list[float]:
    """Mean bytes of a sample at scans 1..N and at ``"full"``, from a dataset index's ``shards``."""
    num_samples = sum(entry.num_samples for entry in entries)
    return [sum(entry.prefix_stops[i] for entry in entries) / num_samples for i in range(len(entries[0].prefix_stops))]
