"""What came of a simulated epoch, as figures that a reader decides by."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from .epoch import Simulation, Trace


class Outcome(NamedTuple):
    """An epoch on a cluster.

    Attributes:
        images_per_second: Of all accelerators, from the beginning of the epoch to its end.
        stall: Share of the time that an accelerator waits for batches or for other ranks.
        step_p99: Seconds of the slowest hundredth of steps; the first one is not counted.
        first_batch: Seconds until the first step can begin.
        epoch_seconds: Seconds of the epoch.
        requests: Requests to the storage.
        sent_bytes: Bytes that the storage sent.
        dollars: What the storage asks for requests and for bytes that leave it.
    """

    images_per_second: float
    stall: float
    step_p99: float
    first_batch: float
    epoch_seconds: float
    requests: int
    sent_bytes: int
    dollars: float


def outcome(simulation: Simulation, trace: Trace) -> Outcome:
    """The figures of an epoch."""
    storage = simulation.cluster.storage
    job = simulation.job
    seconds = trace.step_ends[-1]
    busy = trace.images / job.accelerators / job.rate
    steps = sorted(b - a for a, b in itertools.pairwise(trace.step_ends)) or [seconds]
    dollars = trace.requests * storage.request_price + trace.sent_bytes * storage.egress_price
    return Outcome(
        images_per_second=trace.images / seconds,
        stall=max(0.0, 1 - busy / seconds),
        step_p99=steps[min(len(steps) - 1, int(0.99 * len(steps)))],
        first_batch=trace.first_batch,
        epoch_seconds=seconds,
        requests=trace.requests,
        sent_bytes=trace.sent_bytes,
        dollars=dollars,
    )
