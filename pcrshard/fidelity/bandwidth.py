"""Choose the scan by how long the training loop waits for data: the papers' future work (section 7 of the VLDB paper)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from ..format.scan import FULL, Scan
from ..reading.scan_level import ScanLevel

Batch = TypeVar("Batch")
_MARGIN = 0.95
# A raise is worth its risk from so much more bytes on; a bandwidth is another one below so much of the old.
_RAISE, _CHANGED = 1.2, 0.7
_MAX_HOLD = 32
# Seconds a sample that are so near to others are the same.
_SAME = 0.8


class BandwidthTuner:
    """Takes the highest scan that keeps the accelerator fed.

    A step that waits found nothing read ahead. Between two such steps data came as fast as they can, whatever is buffered where: their bytes over
    that time are the bandwidth. When waits take more than ``max_wait``, the scan whose bytes the loop can use at its own speed at that
    bandwidth is taken at once (X = W / E[s], Theorem 4.1). While the loop does not wait, the bandwidth is at least what is used: after ``patience``
    windows the next scan up is tried. Each try that ends in waiting at the same bandwidth doubles the time until the next one, up to 32 windows, or
    more where tries are so dear that they would take half of ``max_wait``; after a fall of the bandwidth, and when a higher scan holds, it is
    ``patience`` again. Waits that are as long at the lowest scan as they were above are not for bytes but for the processor: the tuner goes
    back up, and such waits are excused.

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
        excused: Share of the time that is waited whatever the scan.

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
        if (
            len(bytes_per_sample) < 2
            or min(bytes_per_sample) <= 0
            or not 0 < max_wait < 1
            or min(window, patience) < 1
            or (ahead or 0) < 0
        ):
            raise ValueError(
                "expected bytes of at least one scan and full, a wait between 0 and 1, and a window and patience of at least 1"
            )
        self.level, self.sizes, self.floor = level, list(bytes_per_sample), floor
        self.max_wait, self.window, self.patience, self.ahead = max_wait, window, patience, ahead
        self.bandwidth: float | None = None
        self.excused = 0.0
        self._top: tuple[int, float] | None = (
            None  # where a descent began, and seconds a sample there
        )
        self._hold = patience
        self._calm = self._settling = 0
        self._base: int | None = None  # what held before the last try
        self._lost = self._passed = 0.0  # seconds that the last try cost, and seconds since
        self._restart()

    def _restart(self) -> None:
        """Forget the window; and the last wait, which was at another scan."""
        self._waited = self._used = 0.0
        self._samples = self._steps = 0
        self._measured: tuple[float, int] | None = (
            None  # seconds and samples since a step that waited
        )

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
        self._passed += waited + used
        if self._base is not None or self._settling > 0:
            self._lost += waited
        if self._settling > 0:
            self._settling -= samples
            return self.level.value
        self._waited, self._used = self._waited + waited, self._used + used
        self._samples, self._steps = self._samples + samples, self._steps + 1
        if waited > self._limit * used:
            if self._measured is None:
                self._measured = 0.0, 0
            elif self._measured[1] >= self.window // 2 * samples:  # one hiccup is no bandwidth
                self._fall(self._measured[0] + waited, self._measured[1])
                if self._settling > 0:
                    return self.level.value
        if self._measured is not None:
            passed = 0.0 if self._measured == (0.0, 0) else waited
            self._measured = self._measured[0] + passed + used, self._measured[1] + samples
        if self._steps >= self.window:
            self._end_window()
        return self.level.value

    @property
    def _limit(self) -> float:
        return self.max_wait + self.excused

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
        if self._waited <= self._limit * (self._waited + mean_used * max(self.window, self._steps)):
            return
        if position == self._lowest and self._excuse(position, seconds / samples):
            return
        seen = samples * self.sizes[position] / seconds
        changed = self.bandwidth is not None and seen < _CHANGED * self.bandwidth
        affordable = _MARGIN * seen * mean_used * self._steps / self._samples
        lower = max(
            (i for i, size in enumerate(self.sizes[:position]) if size <= affordable), default=0
        )
        if changed or self.bandwidth is None:
            self._hold, self._lost = self.patience, -math.inf
        else:
            self._hold = min(2 * self._hold, max(_MAX_HOLD, self.patience))
            lower = lower if self._base is None else max(lower, self._base)
        self._base = None
        self.bandwidth, self._calm = seen, 0
        if self._top is None or position > self._top[0]:
            self._top = position, seconds / samples
        self._move(max(lower, self._lowest), self._samples // self._steps)

    def _excuse(self, position: int, seconds: float) -> bool:
        """Whether a sample took as long where the descent began, at many more bytes."""
        if (
            self._top is None
            or self.sizes[self._top[0]] < _RAISE * self.sizes[position]
            or seconds < _SAME * self._top[1]
        ):
            return False
        self.excused = self._waited / (self._waited + self._used)
        self._hold, self._base, self.bandwidth = self.patience, None, None
        self._move(self._top[0], self._samples // self._steps)
        self._top = None
        return True

    def _end_window(self) -> None:
        """After enough windows without waiting, try a higher scan."""
        waits, position = (
            self._waited > self._limit * (self._waited + self._used),
            max(self._position, self._lowest),
        )
        self._calm = max(0, self._calm - 1) if waits else self._calm + 1
        per_step, rate = (
            self._samples // self._steps,
            self._samples * self.sizes[position] / (self._waited + self._used),
        )
        self._waited = self._used = 0.0
        self._samples = self._steps = 0
        if not waits:
            self._measured = None
            if self._base is not None and self._calm >= self.patience:
                self._lost = 0.0  # the try has come off
            if (
                self._calm >= self.patience
                and self.bandwidth is not None
                and rate > self.bandwidth / _CHANGED
            ):
                self.bandwidth, self._hold, self._top = (
                    rate,
                    self.patience,
                    None,
                )  # what was dear is not so any more
            cheap = self._lost <= self.max_wait / 2 * self._passed
            if self._calm >= self._hold and cheap and position < len(self.sizes) - 1:
                enough, self._base = _RAISE * self.sizes[position], position
                self._lost = self._passed = 0.0
                position = next(
                    (i for i, size in enumerate(self.sizes) if size >= enough), len(self.sizes) - 1
                )
        self._move(position, per_step)


def bytes_per_sample(entries: Sequence[Any]) -> list[float]:
    """Mean bytes of a sample at scans 1..N and at ``"full"``, from a dataset index's ``shards``."""
    num_samples = sum(entry.num_samples for entry in entries)
    return [
        sum(entry.prefix_stops[i] for entry in entries) / num_samples
        for i in range(len(entries[0].prefix_stops))
    ]
