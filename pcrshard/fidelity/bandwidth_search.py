"""The search for the highest scan that a link can carry, as pure transitions without time or I/O.

A step of the training loop turns one frozen :class:`Search` into the next one, and gives the scan to read from now on.
Positions count what may be read from 0: scans 1..N, and then ``"full"``.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import NamedTuple

from ..format.scan import FULL, Scan

# The share of a measured bandwidth that a scan may need.
_MARGIN = 0.95
# A scan is worth the risk of a try if it has so many times the bytes.
_WORTH_TRYING = 1.2
# A bandwidth below this share of the old one is another bandwidth.
_CHANGED = 0.7
# A sample takes as long as another one from this share of its seconds on.
_SAME = 0.8
_MAX_HOLD = 32


class Step(NamedTuple):
    """One step of the training loop.

    Attributes:
        waited: Seconds for which the loop waited for the batch.
        used: Seconds that it spent on the batch.
        samples: Samples in the batch.
        scan: The scan that the readers follow.
        floor: Lowest scan that may be taken.
    """

    waited: float
    used: float
    samples: int
    scan: Scan
    floor: Scan = 1


class Supply(NamedTuple):
    """Seconds and samples since a step that waited: data came as fast as they can."""

    seconds: float
    samples: int


class Peak(NamedTuple):
    """The position where a descent began, and the seconds that a sample took there."""

    position: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Window:
    """Sums over the steps since the last decision; ``supply`` may begin before them."""

    waited: float = 0.0
    used: float = 0.0
    samples: int = 0
    steps: int = 0
    supply: Supply | None = None

    @property
    def seconds(self) -> float:
        """Seconds that the steps took."""
        return self.waited + self.used

    def add(self, step: Step, *, is_wait: bool) -> Window:
        """The window with one more step; a step that waits begins a supply where there is none."""
        supply = self.supply
        if supply is not None:
            seconds = supply.seconds + step.waited + step.used
            supply = Supply(seconds, supply.samples + step.samples)
        elif is_wait:
            supply = Supply(step.used, step.samples)
        return Window(
            self.waited + step.waited,
            self.used + step.used,
            self.samples + step.samples,
            self.steps + 1,
            supply,
        )


@dataclasses.dataclass(frozen=True)
class Search:
    """What the search knows between two steps.

    Attributes:
        hold: Windows without waiting until a higher scan is tried.
        calm: Windows without waiting so far.
        settling: Samples still to come that were asked for at an earlier scan.
        fallback: Position that held before the try that is under way; ``None`` without one.
        lost: Seconds that the last try cost.
        passed: Seconds since the last try.
        peak: Where the descent began; ``None`` before one.
        bandwidth: Bytes a second, as last measured; ``None`` while the loop has never waited.
        excused: Share of the time that is waited whatever the scan.
        window: Sums since the last decision.
    """

    hold: int
    calm: int = 0
    settling: int = 0
    fallback: int | None = None
    lost: float = 0.0
    passed: float = 0.0
    peak: Peak | None = None
    bandwidth: float | None = None
    excused: float = 0.0
    window: Window = Window()

    def spend(self, step: Step) -> Search:
        """The search after the seconds of a step; those that a try waits are its cost."""
        passed = self.passed + (step.waited + step.used)
        if self.fallback is None and self.settling <= 0:
            return replace(self, passed=passed)
        return replace(self, passed=passed, lost=self.lost + step.waited)


Decision = tuple[Search, Scan]


@dataclasses.dataclass(frozen=True)
class SearchRules:
    """The transitions of a search; :class:`BandwidthTuner` explains the rules and their numbers.

    Attributes:
        sizes: Mean bytes of a sample at each position.

    Raises:
        ValueError: The numbers make no sense.
    """

    sizes: tuple[float, ...]
    max_wait: float
    window: int
    patience: int
    ahead: int | None

    def __post_init__(self) -> None:
        legal_sizes = len(self.sizes) >= 2 and min(self.sizes) > 0
        legal_counts = min(self.window, self.patience) >= 1 and (self.ahead or 0) >= 0
        if not (legal_sizes and legal_counts and 0 < self.max_wait < 1):
            raise ValueError(
                "expected bytes of at least one scan and full, a wait between 0 and 1, "
                "and a window and patience of at least 1"
            )

    def advance(self, search: Search, step: Step) -> Decision:
        """Note a step, and decide when it is time.

        Returns:
            The next state, and the scan to read.
        """
        search = search.spend(step)
        if search.settling > 0:
            return replace(search, settling=search.settling - step.samples), step.scan
        is_wait = step.waited > self._limit(search) * step.used
        supply = search.window.supply
        search = replace(search, window=search.window.add(step, is_wait=is_wait))

        # One hiccup is no bandwidth.
        if is_wait and supply and supply.samples >= self.window // 2 * step.samples:
            supply = Supply(supply.seconds + step.waited, supply.samples)
            search, scan = self._judge_wait(search, step, supply)
            if scan != step.scan:
                return search, scan
        if search.window.steps < self.window:
            return search, step.scan
        return self._end_window(search, step)

    def position(self, scan: Scan) -> int:
        """The position of a scan; the last one for ``"full"`` and for all above scan N."""
        last = len(self.sizes) - 1
        return last if scan == FULL else min(scan - 1, last)

    def _current(self, step: Step) -> int:
        return max(self.position(step.scan), self.position(step.floor))

    def _limit(self, search: Search) -> float:
        return self.max_wait + search.excused

    def _judge_wait(self, search: Search, step: Step, supply: Supply) -> Decision:
        """If waits took too much of the window, lower the scan, or excuse them."""
        window = search.window
        # A wait early in a window counts as if the rest of it went well.
        rest = window.used / window.steps * max(self.window, window.steps)
        if window.waited <= self._limit(search) * (window.waited + rest):
            return search, step.scan
        position = self._current(step)
        here = Peak(position, supply.seconds / supply.samples)
        peak = search.peak
        if peak and position == self.position(step.floor) and self._is_same(peak, here):
            return self._excuse(search, step, peak)
        if peak is None or position > peak.position:
            search = replace(search, peak=here)
        return self._fall(search, step, supply.samples * self.sizes[position] / supply.seconds)

    def _is_same(self, peak: Peak, here: Peak) -> bool:
        """Whether a sample takes as long here as at the peak, at many more bytes."""
        many = self.sizes[peak.position] >= _WORTH_TRYING * self.sizes[here.position]
        return many and here.seconds >= _SAME * peak.seconds

    def _excuse(self, search: Search, step: Step, peak: Peak) -> Decision:
        """Go back up: these waits are for the processor, not for bytes."""
        search = replace(
            search,
            hold=self.patience,
            fallback=None,
            peak=None,
            bandwidth=None,
            excused=search.window.waited / search.window.seconds,
        )
        return self._move(search, step, peak.position)

    def _fall(self, search: Search, step: Step, bandwidth: float) -> Decision:
        """Go to the highest scan that the loop can use at its own speed at a bandwidth."""
        window = search.window
        mean_used = window.used / window.steps
        affordable = _MARGIN * bandwidth * mean_used * window.steps / window.samples
        below = range(self._current(step))
        lower = max((i for i in below if self.sizes[i] <= affordable), default=0)
        if search.bandwidth is None or bandwidth < _CHANGED * search.bandwidth:
            search = replace(search, hold=self.patience, lost=-math.inf)
        else:
            # A try has failed, and what held before it still does.
            hold = min(2 * search.hold, max(_MAX_HOLD, self.patience))
            search = replace(search, hold=hold)
            lower = max(lower, search.fallback or 0)
        search = replace(search, fallback=None, bandwidth=bandwidth, calm=0)
        return self._move(search, step, max(lower, self.position(step.floor)))

    def _end_window(self, search: Search, step: Step) -> Decision:
        """Count calm windows, and begin the next window."""
        window = search.window
        position = self._current(step)
        supply = window.supply
        if window.waited > self._limit(search) * window.seconds:
            search = replace(search, calm=max(0, search.calm - 1))
        else:
            supply = None
            search, position = self._climb(search, position)
        search, scan = self._move(search, step, position)
        if scan == step.scan:
            search = replace(search, window=Window(supply=supply))
        return search, scan

    def _climb(self, search: Search, position: int) -> tuple[Search, int]:
        """After a window without waiting, try a higher position if it is time."""
        search = self._note_calm(search, position)
        is_cheap = search.lost <= self.max_wait / 2 * search.passed
        last = len(self.sizes) - 1
        if search.calm < search.hold or not is_cheap or position == last:
            return search, position
        enough = _WORTH_TRYING * self.sizes[position]
        higher = (i for i, size in enumerate(self.sizes) if size >= enough)
        return replace(search, fallback=position, lost=0.0, passed=0.0), next(higher, last)

    def _note_calm(self, search: Search, position: int) -> Search:
        window = search.window
        rate = window.samples * self.sizes[position] / window.seconds
        search = replace(search, calm=search.calm + 1)
        if search.calm < self.patience:
            return search
        if search.fallback is not None:
            # The try has come off.
            search = replace(search, lost=0.0)
        if search.bandwidth is not None and rate > search.bandwidth / _CHANGED:
            # What was expensive is not so any more.
            search = replace(search, bandwidth=rate, hold=self.patience, peak=None)
        return search

    def _move(self, search: Search, step: Step, position: int) -> Decision:
        """Take a position; at another one begin again when the readers have followed."""
        scan: Scan = FULL if position == len(self.sizes) - 1 else position + 1
        if scan == step.scan:
            return search, scan
        ahead = self.ahead
        if ahead is None:
            ahead = self.window * (search.window.samples // search.window.steps)
        return replace(search, calm=0, settling=ahead, window=Window()), scan
