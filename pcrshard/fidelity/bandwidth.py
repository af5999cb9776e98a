"""Choose the scan by the time the training loop waits for data.

The papers describe this as future work (section 7 of the VLDB paper).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..format.dataset_index import ShardEntry, prefix_totals
from ..format.scan import FULL, Scan
from ..reading.scan_level import ScanLevel, current_scan
from .agreement import Agreement
from .schedule import ScanPolicy

# Maximum fraction of the measured bandwidth that a scan may need.
_MARGIN = 0.95
# Maximum fraction of ``max_wait`` to spend on trying higher scans.
_MAX_TRIES = 0.6
# Minimum ratio of bytes for a higher scan to be worth trying.
_WORTH_TRYING = 1.2
# Seconds per sample count as equal from this ratio on.
_SAME = 0.8


@dataclass
class _Sums:
    """Sums of seconds and samples over some steps of the training loop."""

    waited: float = 0.0
    used: float = 0.0
    samples: int = 0
    steps: int = 0

    def add(self, waited: float, used: float, samples: int) -> None:
        self.waited += waited
        self.used += used
        self.samples += samples
        self.steps += 1

    def has_waited(self, limit: float) -> bool:
        """Return whether more than a fraction of the time was spent waiting."""
        return self.waited > limit * (self.waited + self.used)


@dataclass
class _Settling:
    """Batches still arrive at an earlier scan: nothing is measured or decided.

    Attributes:
        samples: Samples in flight that were requested at that scan.
    """

    samples: int


@dataclass
class _Measuring:
    """Batches arrive at the scan of the level.

    Attributes:
        window: Steps since the last decision, or since the scan settled.
        supply: Steps since one that waited, in which data arrive at full speed; ``None`` before.
    """

    window: _Sums = field(default_factory=_Sums)
    supply: _Sums | None = None


@dataclass
class _Try:
    """The last try of a higher scan.

    Attributes:
        since: Steps since it began, with the waits that it caused.
        before: Index of the size before it, to return to at the first wait; ``None`` once that
            happened, or a calm window has passed.
        has_effect: Whether waits are still caused by it: until a calm window has passed.
    """

    since: _Sums = field(default_factory=_Sums)
    before: int | None = None
    has_effect: bool = False


class BandwidthTuner(ScanPolicy):
    """A controller with hysteresis that picks the highest scan that keeps the accelerator fed.

    **Down at once.** If a step waits, nothing was read ahead. Between two such steps, data
    therefore arrived at full speed, and the bytes divided by the time are the bandwidth. If the
    loop waited for more than ``max_wait`` of that time, the tuner switches to the highest scan that
    the bandwidth can deliver at the loop's own speed (X = W / E[s], Theorem 4.1).

    **Up with care.** After ``window`` steps within ``max_wait``, the tuner tries the next higher
    scan. Before it tries again, the waiting that the last try caused must have fallen below 60 % of
    ``max_wait``, as a fraction of the time since that try.

    **Waits not caused by bandwidth.** If the lowest scan waits as long per sample as a scan with
    many more bytes did, the bottleneck is the CPU, not the link: the tuner goes back up and
    excuses such waits.

    With ``torch.distributed``, all ranks use the lowest scan that any rank requests: construct the
    tuner on every rank, after ``init_process_group`` and after the dataset. Ranks never block each
    other, so their numbers of steps may differ; they follow a change within a few steps.

    Args:
        level: The level that the readers follow. For a staged copy, it never exceeds the highest
            scan that the copy holds.
        bytes_per_sample: Mean bytes of a sample at scans 1..N and then at ``"full"``, as
            :func:`bytes_per_sample` returns them.
        floor: Lowest scan allowed: the minimum that the task needs, set by the user or by
            :class:`ScanTuner`. May be a level itself.
        max_wait: Maximum fraction of the time spent waiting.
        window: Steps without waiting before a higher scan is tried.
        ahead: Samples read ahead, which still arrive at the old scan after a change: (prefetch + 1)
            shards. By default :meth:`watch` takes them from the loader.

    Attributes:
        bandwidth: Latest measured bytes per second; ``None`` if the loop has never waited.
        excused: Fraction of the time spent waiting regardless of the scan.

    Raises:
        ValueError: A number is out of range.
        ScanUnavailable: The floor is above the scans that a staged copy holds.
    """

    def __init__(
        self,
        level: ScanLevel,
        bytes_per_sample: Sequence[float],
        *,
        floor: Scan | ScanLevel = 1,
        max_wait: float = 0.05,
        window: int = 15,
        ahead: int = 0,
    ) -> None:
        if (
            len(bytes_per_sample) < 2
            or min(*bytes_per_sample, window) <= 0
            or ahead < 0
            or not 0 < max_wait < 1
        ):
            raise ValueError(
                "expected bytes of at least one scan and full, a wait between 0 and 1, "
                "and a window of at least 1"
            )
        level.check(current_scan(floor))
        super().__init__(level)
        self.sizes = tuple(bytes_per_sample)
        self.floor = floor
        self.max_wait = max_wait
        self.window = window
        self.ahead = ahead
        self.bandwidth: float | None = None
        self.excused = 0.0
        self._agreement = Agreement()
        # Index of the size that this rank requests, and the scan last set.
        self._wish = len(self.sizes) - 1
        self._taken: Scan | None = None
        self._state: _Settling | _Measuring = _Measuring()
        self._try = _Try()
        # Index of the size at the start of the descent, and seconds per sample there.
        self._peak: tuple[int, float] | None = None

    def watch(self, batches: Any, samples: int | None = None) -> Iterator[Any]:
        """Yield the batches, tuning after each step.

        The wait for the first batch is ignored, because nothing is read ahead across epochs.

        Args:
            batches: The loader.
            samples: Number of samples in a batch; by default the loader's ``batch_size``.
        """
        size: int = batches.batch_size if samples is None else samples
        if not self.ahead and hasattr(batches, "shards_ahead"):
            shard_sizes = batches.dataset.shard_sizes
            self.ahead = (batches.shards_ahead + 1) * int(shard_sizes.mean())
        done: float | None = None
        for batch in batches:
            came = time.monotonic()
            waited = 0.0 if done is None else came - done
            yield batch
            done = time.monotonic()
            self.record(waited, done - came, size)

    def record(self, waited: float, used: float, samples: int) -> Scan:
        """Record a step of the training loop, and set the level.

        Args:
            waited: Seconds the loop waited for the batch.
            used: Seconds the loop spent on the batch.
            samples: Number of samples in the batch.

        Returns:
            The current scan of the level: the lowest that any rank requests.
        """
        given = self.level.value
        here = self._index(given)
        lowest = self._index(current_scan(self.floor))
        target = max(self._decide(here, lowest, waited, used, samples), lowest)
        if target != here:
            # Wait for the readers to follow before deciding again.
            self._state = _Settling(self.ahead) if self.ahead else _Measuring()
        # A request holds until this rank changes it or the level is set.
        if target != here or given != self._taken:
            self._wish = target
        agreed = max(self._agreement.lowest(min(self._wish, self._last)), lowest)
        is_full = agreed == len(self.sizes) - 1
        self._taken = FULL if is_full else agreed + 1
        self.level.value = self._taken
        return self._taken

    @property
    def _last(self) -> int:
        """Index of the size of the highest scan allowed."""
        highest = self.level.highest
        return len(self.sizes) - 1 if highest == FULL else min(highest, len(self.sizes)) - 1

    def _index(self, scan: Scan) -> int:
        """Return the index of a scan's size."""
        return self._last if scan == FULL else min(scan - 1, self._last)

    def _decide(self, here: int, lowest: int, waited: float, used: float, samples: int) -> int:
        """Return the index of the size that this rank requests after a step."""
        state = self._state
        self._try.since.add(waited * self._try.has_effect, used, samples)
        if isinstance(state, _Settling):
            state.samples -= samples
            if state.samples <= 0:
                self._state = _Measuring()
            return here
        limit = self.max_wait + self.excused
        has_waited = waited > limit * used
        state.window.add(waited, used, samples)
        supply = state.supply
        if supply is not None:
            supply.add(waited, used, samples)
        if has_waited and self._try.before is not None:
            # Shards of the higher scan are in flight: do not wait for a measurement.
            before, self._try.before = self._try.before, None
            return min(before, here)
        if has_waited and (supply is None or 2 * supply.samples > self.ahead):
            # A single wait may be a hiccup and measures nothing.
            if supply is not None and supply.has_waited(limit):
                return self._fall(here, lowest, supply, used)
            # The next measurement starts when this step's batch arrived.
            state.supply = _Sums(used=used)
        window = state.window
        if window.steps < self.window or window.samples < self.ahead:
            return here
        state.window = _Sums()
        if window.has_waited(limit):
            return here
        self._state = _Measuring()
        return self._climb(here)

    def _climb(self, here: int) -> int:
        """Try a higher scan after a calm window, unless tries have caused too many waits."""
        self._peak = None
        costly = self._try.since.has_waited(_MAX_TRIES * self.max_wait)
        if costly or here == self._last:
            self._try = _Try(self._try.since)
            return here
        self._try = _Try(before=here, has_effect=True)
        enough = _WORTH_TRYING * self.sizes[here]
        return next((i for i in range(self._last) if self.sizes[i] >= enough), self._last)

    def _fall(self, here: int, lowest: int, supply: _Sums, used: float) -> int:
        """Drop to the highest scan that keeps up with the loop, or excuse the waits."""
        # The bytes of the last batch arrived before it was used.
        seconds = (supply.waited + supply.used - used) / supply.samples
        peak = self._peak or (here, seconds)
        is_much_smaller = self.sizes[peak[0]] >= _WORTH_TRYING * self.sizes[here]
        if here == lowest and is_much_smaller and seconds >= _SAME * peak[1]:
            self.excused = supply.waited / (supply.waited + supply.used)
            self.bandwidth = self._peak = None
            return peak[0]
        self._peak = max(peak, (here, seconds))
        self.bandwidth = self.sizes[here] / seconds
        affordable = _MARGIN * self.bandwidth * supply.used / supply.samples
        return max((i for i in range(here) if self.sizes[i] <= affordable), default=0)


def bytes_per_sample(entries: Sequence[ShardEntry]) -> list[float]:
    """Return the mean bytes per sample at scans 1..N and at ``"full"``.

    Args:
        entries: The ``shards`` of a dataset index.
    """
    num_samples = sum(entry.num_samples for entry in entries)
    return [total / num_samples for total in prefix_totals(entries)]
