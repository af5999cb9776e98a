"""Summary figures of a simulated epoch."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from .epoch import Simulation, Trace


class Outcome(NamedTuple):
    """Summary of an epoch on a cluster.

    Attributes:
        images_per_second: Mean rate of all accelerators over the whole epoch.
        stall: Fraction of the time that an accelerator waits for batches or for other ranks.
        step_p99: 99th percentile of the step time in seconds, excluding the first step.
        first_batch: Seconds until the first step can begin.
        epoch_seconds: Duration of the epoch in seconds.
        requests: Number of requests to the storage.
        sent_bytes: Bytes sent by the storage.
        dollars: Cost of requests and egress.
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
    """Summarize an epoch."""
    per_request, per_byte = simulation.cluster.prices
    job = simulation.job
    seconds = trace.step_ends[-1]
    busy = trace.images / job.accelerators / job.rate
    steps = sorted(b - a for a, b in itertools.pairwise(trace.step_ends)) or [seconds]
    dollars = trace.requests * per_request + trace.sent_bytes * per_byte
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
