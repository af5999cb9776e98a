"""What is shared and makes others wait: a link, and the cores of a machine.

Both take the environment of the simulation, whose time they read and whose events they make.
"""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Any

# Events of the simulation; the library that makes them has one door, the module epoch.
Environment = Any
Event = Any


class Pipe:
    """Bytes one after the other, at a rate; who comes first is served first.

    Readers that send chunk after chunk share it evenly.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.free_at = 0.0

    def pass_through(self, now: float, num_bytes: float) -> float:
        """When bytes that come now are through."""
        if self.rate == math.inf:
            return now
        self.free_at = max(now, self.free_at) + num_bytes / self.rate
        return self.free_at


class Cores:
    """Processes that share some cores evenly, each at most one core.

    Time is counted in what a process has had since the beginning, which is the same for all that
    run; so a change of their number changes no process, only the clock.
    """

    def __init__(self, environment: Environment, cores: int) -> None:
        self.environment = environment
        self.cores = cores
        self.had = 0.0
        self.changed_at = 0.0
        self.running: list[tuple[float, int, Event]] = []
        self._numbers = itertools.count()
        self._alarm = 0

    def work(self, seconds: float) -> Event:
        """An event that comes when a core has worked so long."""
        done = self.environment.event()
        self._advance()
        heapq.heappush(self.running, (self.had + seconds, next(self._numbers), done))
        self._set_alarm()
        return done

    def _share(self) -> float:
        return min(1.0, self.cores / max(len(self.running), 1))

    def _advance(self) -> None:
        now = self.environment.now
        self.had += (now - self.changed_at) * self._share()
        self.changed_at = now

    def _set_alarm(self) -> None:
        """Wake when the first is done, unless another change comes before."""
        self._alarm += 1
        number = self._alarm
        seconds = max(0.0, self.running[0][0] - self.had) / self._share()
        alarm = self.environment.timeout(seconds)
        alarm.callbacks.append(lambda _: self._ring(number))

    def _ring(self, number: int) -> None:
        if number != self._alarm:
            return
        self._advance()
        # The clock has advanced to the first one's end, but for rounding.
        self.had = max(self.had, self.running[0][0])
        while self.running and self.running[0][0] <= self.had:
            heapq.heappop(self.running)[2].succeed()
        if self.running:
            self._set_alarm()


class Barrier:
    """Ranks that wait for each other, step after step."""

    def __init__(self, environment: Environment, parties: int) -> None:
        self.environment = environment
        self.parties = parties
        self.waiting = 0
        self.opened = environment.event()

    def wait(self) -> Event:
        """An event that comes when all have come."""
        opened = self.opened
        self.waiting += 1
        if self.waiting == self.parties:
            self.waiting = 0
            self.opened = self.environment.event()
            opened.succeed()
        return opened
