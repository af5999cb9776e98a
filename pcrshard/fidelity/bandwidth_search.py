"""The search for the highest scan that a link can carry, as pure transitions without time or I/O.

A step of the training loop turns one frozen :class:`Search` into the next one, which has the scan
to read from now on. Positions count from 0 what may be read: scans 1..N, and then ``"full"``, or
of a staged copy the scans that it holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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

    def after(self, step: Step) -> Supply:
        """The supply with one more step."""
        seconds = self.seconds + step.waited + step.used
        return Supply(seconds, self.samples + step.samples)

    def until(self, step: Step) -> Supply:
        """The supply up to the batch of a step that waits."""
        return Supply(self.seconds + step.waited, self.samples)


class Peak(NamedTuple):
    """The position where a descent began, and the seconds that a sample took there."""

    position: int
    seconds: float


@dataclass(frozen=True)
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

    def add(self, step: Step, supply: Supply | None) -> Window:
        """The window with one more step, and the supply after it."""
        return Window(
            self.waited + step.waited,
            self.used + step.used,
            self.samples + step.samples,
            self.steps + 1,
            supply,
        )

    def supply_after(self, step: Step, *, is_wait: bool) -> Supply | None:
        """The supply with one more step; one that waits begins a supply where there is none."""
        if self.supply is not None:
            return self.supply.after(step)
        return Supply(step.used, step.samples) if is_wait else None


@dataclass(frozen=True)
class SearchRules:
    """The numbers that a search follows; :class:`BandwidthTuner` explains them.

    Attributes:
        sizes: Mean bytes of a sample at each position.
        top: The scan at the last position: ``"full"``, or the highest one of a staged copy.

    Raises:
        ValueError: The numbers make no sense.
    """

    sizes: tuple[float, ...]
    max_wait: float
    window: int
    patience: int
    ahead: int | None
    top: Scan = FULL

    def __post_init__(self) -> None:
        least = 2 if self.top == FULL else 1
        is_legal = (
            len(self.sizes) >= least
            and min(*self.sizes, self.window, self.patience) > 0
            and (self.ahead or 0) >= 0
            and 0 < self.max_wait < 1
        )
        if not is_legal:
            raise ValueError(
                "expected bytes of at least one scan and full, a wait between 0 and 1, "
                "and a window and patience of at least 1"
            )

    @property
    def last(self) -> int:
        """The position of the highest scan."""
        return len(self.sizes) - 1

    def position(self, scan: Scan) -> int:
        """The position of a scan; the last one for all that are not below the highest."""
        return self.last if scan == FULL else min(scan - 1, self.last)

    def below(self, top: Scan) -> SearchRules:
        """The rules for a staged copy that holds scans 1 to ``top``."""
        return replace(self, sizes=self.sizes[: None if top == FULL else top], top=top)

    def scan(self, position: int) -> Scan:
        """The scan at a position."""
        return self.top if position == self.last else position + 1

    def next_worth(self, position: int) -> int:
        """The next position up that is worth the risk of a try."""
        enough = _WORTH_TRYING * self.sizes[position]
        return next((i for i, size in enumerate(self.sizes) if size >= enough), self.last)

    def highest_within(self, limit: float, stop: int) -> int:
        """The highest position below ``stop`` whose samples have at most so many bytes."""
        sizes = enumerate(self.sizes[:stop])
        return max((position for position, size in sizes if size <= limit), default=0)


@dataclass(frozen=True)
class Search:
    """What the search knows between two steps.

    Attributes:
        rules: The numbers that it follows.
        hold: Windows without waiting until a higher scan is tried.
        scan: The decision: the scan to read from now on.
        floor: Lowest scan that may be taken.
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

    rules: SearchRules
    hold: int
    scan: Scan = FULL
    floor: Scan = 1
    calm: int = 0
    settling: int = 0
    fallback: int | None = None
    lost: float = 0.0
    passed: float = 0.0
    peak: Peak | None = None
    bandwidth: float | None = None
    excused: float = 0.0
    window: Window = Window()

    def advance(self, step: Step) -> Search:
        """The search after a step of the training loop."""
        search = self._spend(step)
        if self.settling > 0:
            return replace(search, settling=self.settling - step.samples)
        is_wait = step.waited > self._limit * step.used
        supply = self.window.supply_after(step, is_wait=is_wait)
        search = replace(search, window=self.window.add(step, supply))
        if is_wait and (whole := self._supply_until(step)):
            search = search._judge_wait(whole)
        return search if search.window.steps < self.rules.window else search._end_window()

    def _supply_until(self, step: Step) -> Supply | None:
        """The supply that ends with a wait; one hiccup is none."""
        supply = self.window.supply
        if supply is None or supply.samples < self.rules.window // 2 * step.samples:
            return None
        return supply.until(step)

    @property
    def _limit(self) -> float:
        return self.rules.max_wait + self.excused

    @property
    def _lowest(self) -> int:
        return self.rules.position(self.floor)

    @property
    def _position(self) -> int:
        return max(self.rules.position(self.scan), self._lowest)

    def _spend(self, step: Step) -> Search:
        """Count the seconds of a step; those for which a try waits are its cost."""
        is_try = self.fallback is not None or self.settling > 0
        return replace(
            self,
            scan=step.scan,
            floor=step.floor,
            passed=self.passed + (step.waited + step.used),
            lost=self.lost + (step.waited if is_try else 0.0),
        )

    def _judge_wait(self, supply: Supply) -> Search:
        """If waits took too much of the window, lower the scan, or excuse them."""
        window = self.window
        # A wait early in a window counts as if the rest of it went well.
        rest = window.used / window.steps * max(self.rules.window, window.steps)
        if window.waited <= self._limit * (window.waited + rest):
            return self
        here = Peak(self._position, supply.seconds / supply.samples)
        peak = self.peak or here
        if self._is_excused(peak, here):
            return self._excuse(peak)
        search = replace(self, peak=max(peak, here, key=lambda place: place.position))
        return search._fall(self.rules.sizes[here.position] / here.seconds)

    def _is_excused(self, peak: Peak, here: Peak) -> bool:
        """Whether the lowest scan is as slow as a much larger one was."""
        sizes = self.rules.sizes
        is_small = sizes[peak.position] >= _WORTH_TRYING * sizes[here.position]
        is_slow = here.seconds >= _SAME * peak.seconds
        return here.position == self._lowest and is_small and is_slow

    def _excuse(self, peak: Peak) -> Search:
        """Go back up: these waits are as long as at many more bytes, so not for bytes."""
        search = replace(
            self,
            hold=self.rules.patience,
            fallback=None,
            peak=None,
            bandwidth=None,
            excused=self.window.waited / self.window.seconds,
        )
        return search._move(peak.position)

    def _fall(self, bandwidth: float) -> Search:
        """Go to the highest scan that the loop can use at its own speed at a bandwidth."""
        lower = max(self._affordable(bandwidth), self._lowest)
        search = replace(
            self,
            fallback=None,
            bandwidth=bandwidth,
            calm=0,
        )
        if self.bandwidth is None or bandwidth < _CHANGED * self.bandwidth:
            return replace(search, hold=self.rules.patience, lost=-math.inf)._move(lower)
        # A try has failed, and what held before it still does.
        hold = min(2 * self.hold, max(_MAX_HOLD, self.rules.patience))
        return replace(search, hold=hold)._move(max(lower, self.fallback or 0))

    def _affordable(self, bandwidth: float) -> int:
        """The highest lower position whose bytes the loop can use at its own speed."""
        window = self.window
        affordable = _MARGIN * bandwidth * window.used / window.samples
        return self.rules.highest_within(affordable, self._position)

    def _end_window(self) -> Search:
        """Count calm windows, and begin the next window."""
        window = self.window
        if window.waited > self._limit * window.seconds:
            search = replace(self, calm=max(0, self.calm - 1))._move(self._position)
            # Data still come as fast as they can.
            return replace(search, window=Window(supply=search.window.supply))
        search = self._note_calm()._climb()
        return replace(search, window=Window())

    def _note_calm(self) -> Search:
        """Count a window without waiting; enough of them show what the link can do."""
        search = replace(self, calm=self.calm + 1)
        if search.calm < self.rules.patience:
            return search
        # If this was a try, it has come off.
        search = replace(search, lost=self.lost if self.fallback is None else 0.0)
        rate = self.window.samples * self.rules.sizes[self._position] / self.window.seconds
        if self.bandwidth is None or rate <= self.bandwidth / _CHANGED:
            return search
        # What was expensive is not so any more.
        return replace(
            search,
            bandwidth=rate,
            hold=self.rules.patience,
            peak=None,
        )

    def _climb(self) -> Search:
        """Try a higher scan if it is time."""
        position = self._position
        is_cheap = self.lost <= self.rules.max_wait / 2 * self.passed
        if self.calm < self.hold or not is_cheap or position == self.rules.last:
            return self._move(position)
        search = replace(
            self,
            fallback=position,
            lost=0.0,
            passed=0.0,
        )
        return search._move(self.rules.next_worth(position))

    def _move(self, position: int) -> Search:
        """Take a position; at another one begin again when the readers have followed."""
        scan = self.rules.scan(position)
        if scan == self.scan:
            return self
        return replace(
            self,
            scan=scan,
            calm=0,
            settling=self._ahead,
            window=Window(),
        )

    @property
    def _ahead(self) -> int:
        """Samples that still come at the old scan after a change."""
        if self.rules.ahead is not None:
            return self.rules.ahead
        return self.rules.window * (self.window.samples // self.window.steps)
