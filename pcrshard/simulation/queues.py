"""Shared resources with queues: a link, the cores of a node, and a barrier.

Each takes the simulation environment, which provides the clock and creates events.
"""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Any

# simpy events; only the module epoch imports simpy.
Environment = Any
Event = Any


class Pipe:
    """A first-come, first-served link with a fixed rate.

    Readers that send one chunk after another share it evenly.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.free_at = 0.0

    def pass_through(self, now: float, num_bytes: float) -> float:
        """Return an event for when bytes that enter now have passed through."""
        if self.rate == math.inf:
            return now
        self.free_at = max(now, self.free_at) + num_bytes / self.rate
        return self.free_at


class Cores:
    """Cores shared evenly by processes, each limited to one core.

    Progress is measured in CPU time received per running process, which is equal for all of them,
    so a change in their number affects only the clock rate and no single process.
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
        """Return an event for when a core has worked this many seconds."""
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
        """Wake when the first process is done, unless another change comes earlier."""
        self._alarm += 1
        number = self._alarm
        seconds = max(0.0, self.running[0][0] - self.had) / self._share()
        alarm = self.environment.timeout(seconds)
        alarm.callbacks.append(lambda _: self._ring(number))

    def _ring(self, number: int) -> None:
        if number != self._alarm:
            return
        self._advance()
        # The clock has reached the first end, up to rounding.
        self.had = max(self.had, self.running[0][0])
        while self.running and self.running[0][0] <= self.had:
            heapq.heappop(self.running)[2].succeed()
        if self.running:
            self._set_alarm()


class Barrier:
    """A barrier at which ranks wait for each other after each step."""

    def __init__(self, environment: Environment, parties: int) -> None:
        self.environment = environment
        self.parties = parties
        self.waiting = 0
        self.opened = environment.event()

    def wait(self) -> Event:
        """Return an event for when all ranks have arrived."""
        opened = self.opened
        self.waiting += 1
        if self.waiting == self.parties:
            self.waiting = 0
            self.opened = self.environment.event()
            opened.succeed()
        return opened
