"""Discrete-event simulation of an epoch: requests, transfers, decoding, synchronized steps."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Generator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from ..errors import MissingDependency
from ..training.order import Geometry
from ..training.sequence import Counts, Rules
from .cluster import Cluster, Job, draw_latency
from .reads import WorkerReads, epoch_reads

# Events and processes of simpy.
Event = Any
Process = Generator[Event, Any, None]
# Number of parts per prefix; transfers of other prefixes interleave between parts.
_PARTS = 16
_LEAST_PART = 1 << 15


@dataclass
class Trace:
    """Events and totals of a simulated epoch.

    Attributes:
        images: Images over all ranks.
        step_ends: Seconds at which each step ended on all ranks.
        first_batch: Seconds until every rank had its first batch.
        waited: Total seconds that ranks waited for batches.
        requests: Number of requests to the storage.
        sent_bytes: Bytes sent by the storage.
    """

    images: int
    step_ends: list[float] = field(default_factory=list)
    first_batch: float = 0.0
    waited: float = 0.0
    requests: int = 0
    sent_bytes: int = 0

    def outcome(self, job: Job) -> dict[str, float]:
        """Summarize the epoch of a job.

        Returns:
            The mean rate of all accelerators; the fraction of the time that an accelerator waits
            for batches or for other ranks; the 99th percentile of the step time, excluding the
            first step; the seconds until the first step can begin, and those of the epoch; and what
            the storage did.
        """
        seconds = self.step_ends[-1]
        busy = self.images / job.accelerators / job.rate
        steps = sorted(b - a for a, b in itertools.pairwise(self.step_ends)) or [seconds]
        return {
            "images_per_second": self.images / seconds,
            "stall": max(0.0, 1 - busy / seconds),
            "step_p99_seconds": steps[int(0.99 * len(steps))],
            "first_batch_seconds": self.first_batch,
            "epoch_seconds": seconds,
            "requests": self.requests,
            "sent_bytes": self.sent_bytes,
        }


@dataclass
class Simulation:
    """A job on a cluster, simulated epoch by epoch.

    Attributes:
        cluster: The cluster.
        job: The job.
        sizes: (shards,) samples of each shard.
        prefixes: (shards,) bytes of each shard's prefix.
        rules: Ordering rules of the job.
        lanes_per_rank: Lanes per rank.
        seed: Random seed for the latencies.
    """

    cluster: Cluster
    job: Job
    sizes: Counts
    prefixes: Sequence[int]
    _: KW_ONLY
    rules: Rules = field(default_factory=Rules)
    lanes_per_rank: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.start_seconds = self.job.start_seconds

    def run(self, epoch: int = 0, steps: int | None = None) -> Trace:
        """Simulate an epoch, or its first ``steps`` steps.

        Raises:
            MissingDependency: simpy is not installed.
            ValueError: The dataset is smaller than one global batch.
        """
        job = self.job
        geometry = Geometry(job.batch * job.accelerators, job.accelerators, self.lanes_per_rank)
        workers = max(job.workers, 1)
        reads = epoch_reads(self.sizes, geometry, self.rules, workers, epoch=epoch, steps=steps)
        trace = _Epoch(self, reads).run()
        # Workers persist between epochs, and so do their connections.
        self.start_seconds = 0.0
        return trace


class _Pipe:
    """A first-come, first-served link; readers that send parts in turn share it evenly."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.free_at = 0.0

    def pass_through(self, now: float, num_bytes: float) -> float:
        """Return the time when bytes that enter now have passed through."""
        if self.rate == math.inf:
            return now
        self.free_at = max(now, self.free_at) + num_bytes / self.rate
        return self.free_at


class _Epoch:
    """State of a simulated epoch."""

    def __init__(self, of: Simulation, reads: list[list[WorkerReads]]) -> None:
        try:
            import simpy
        except ImportError as error:
            raise MissingDependency(
                "simpy is not installed: pip install 'pcrshard[simulate]'"
            ) from error
        self.simpy: Any = simpy
        self.environment: Any = simpy.Environment()
        self.of = of
        self.storage = _Pipe(of.cluster.bandwidth)
        per_node = of.cluster.per_node
        nodes = [
            (_Pipe(of.cluster.link), simpy.Resource(self.environment, of.cluster.cores))
            for _ in reads[::per_node]
        ]
        self.ranks = [
            [_Worker(self, *nodes[rank // per_node], worker) for worker in workers]
            for rank, workers in enumerate(reads)
        ]
        self.trace = Trace(sum(sum(each.images) for rank in reads for each in rank))

    def run(self) -> Trace:
        """Run the processes of all ranks and workers."""
        self.environment.process(self._train())
        for worker in itertools.chain(*self.ranks):
            self.environment.process(worker.run())
        self.environment.run()
        return self.trace

    def _train(self) -> Process:
        """Run all steps; each ends when the slowest rank is done."""
        yield self.environment.timeout(self.of.start_seconds)
        for step in range(sum(len(worker.images) for worker in self.ranks[0])):
            yield self.environment.all_of(
                [self.environment.process(self._step(rank, step)) for rank in self.ranks]
            )
            yield self.environment.timeout(self.of.job.sync_seconds)
            self.trace.step_ends.append(self.environment.now)

    def _step(self, workers: list[_Worker], step: int) -> Process:
        """Run a step of one rank: get a batch, then compute."""
        number, place = divmod(step, len(workers))
        worker = workers[place]
        begun = self.environment.now
        worker.asked.put(1)
        yield worker.ready.get(1)
        self.trace.waited += self.environment.now - begun
        if step == 0:
            self.trace.first_batch = self.environment.now
        yield self.environment.timeout(worker.images[number] / self.of.job.rate)


class _Worker:
    """A DataLoader worker, the threads of a rank, or the rank itself if it has neither."""

    def __init__(self, epoch: _Epoch, link: _Pipe, cores: Any, reads: WorkerReads) -> None:
        self.epoch = epoch
        self.of = epoch.of
        self.environment = epoch.environment
        self.link = link
        self.cores = cores
        self.images = reads.images
        self.shards = reads.requests.shards.tolist()
        # Number of requests that the worker has made when it begins each batch.
        batches = np.arange(len(reads.images))
        self.needed = np.searchsorted(reads.requests.first, batches, side="right").tolist()
        self.loads: list[Event] = []
        # Batches that the rank has requested, and batches that are ready. A rank that decodes
        # itself has none made ahead.
        job = self.of.job
        ahead = job.ahead if job.workers + job.threads else 0
        self.asked = epoch.simpy.Container(self.environment, init=ahead)
        self.ready = epoch.simpy.Container(self.environment)

    def run(self) -> Process:
        """Make batches as they are asked for: wait for their prefixes, then decode their images."""
        job = self.of.job
        # Threads beyond the core count add nothing, and all ranks of a node have equally many.
        decoders = min(max(job.threads, 1), self.cores.capacity)
        begun = 0
        yield self.environment.timeout(self.of.start_seconds)
        for images, needed in zip(self.images, self.needed, strict=True):
            yield self.asked.get(1)
            # The prefetched requests go out as soon as the first of this batch is needed.
            while len(self.loads) < min(needed + job.prefetch, len(self.shards)):
                self.loads.append(self.environment.process(self._load(len(self.loads))))
            yield self.environment.all_of(self.loads[begun:needed])
            begun = needed
            work = [self._work(images * job.image_seconds / decoders) for _ in range(decoders)]
            yield self.environment.all_of(list(map(self.environment.process, work)))
            self.ready.put(1)

    def _load(self, request: int) -> Process:
        """Load a prefix once a thread is free: request i starts after i - threads has ended."""
        threads = max(self.of.job.prefetch, 1)
        if request >= threads:
            yield self.loads[request - threads]
        size = self.of.prefixes[self.shards[request]]
        yield from self._fetch(size)
        # Runs on another core if one is free, because decoding releases the GIL.
        yield from self._work(size * self.of.job.byte_seconds)

    def _fetch(self, left: int) -> Process:
        """Fetch a prefix part by part; a part enters a pipe when it is through the one before."""
        self.epoch.trace.requests += 1
        self.epoch.trace.sent_bytes += left
        yield self.environment.timeout(draw_latency(self.of.cluster.latency, self.of.rng))
        stream = _Pipe(self.of.cluster.stream)
        part = max(_LEAST_PART, -(-left // _PARTS))
        arrived = self.environment.now
        while left > 0:
            size = min(part, left)
            left -= size
            yield self._until(self.epoch.storage.pass_through(self.environment.now, size))
            # Each sender has at most one part queued per pipe.
            yield self._until(arrived)
            sent = self.link.pass_through(self.environment.now, size)
            arrived = stream.pass_through(sent, size)
        yield self._until(arrived)

    def _until(self, moment: float) -> Event:
        return self.environment.timeout(max(0.0, moment - self.environment.now))

    def _work(self, seconds: float) -> Process:
        """Keep one core busy, as soon as one is free."""
        with self.cores.request() as turn:
            yield turn
            yield self.environment.timeout(seconds)
