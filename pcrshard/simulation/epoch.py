"""Discrete-event simulation of an epoch: requests, transfers, decoding, synchronized steps."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import MissingDependency
from ..training.epoch_order import Geometry
from ..training.epoch_sequence import Counts, Rules
from .cluster import Cluster, Job, draw_latency
from .queues import Barrier, Cores, Environment, Event, Pipe
from .reads import Place, WorkerReads, epoch_reads

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


def _environment() -> Environment:
    try:
        import simpy
    except ImportError as error:
        raise MissingDependency(
            "simpy is not installed: pip install 'pcrshard[simulate]'"
        ) from error
    return simpy.Environment()


class _Machine(NamedTuple):
    """State of a simulated node."""

    cores: Cores
    link: Pipe


class Simulation:
    """A job on a cluster, simulated epoch by epoch.

    Args:
        cluster: The cluster.
        job: The job.
        sizes: (shards,) samples of each shard.
        prefixes: (shards,) bytes of each shard's prefix.
        rules: Ordering rules of the job.
        lanes_per_rank: Lanes per rank.
        seed: Random seed for the latencies.
    """

    def __init__(
        self,
        cluster: Cluster,
        job: Job,
        sizes: Counts,
        prefixes: Sequence[int],
        *,
        rules: Rules = Rules(),
        lanes_per_rank: int = 4,
        seed: int = 0,
    ) -> None:
        self.cluster = cluster
        self.job = job
        self.sizes = sizes
        self.prefixes = prefixes
        self.rules = rules
        self.geometry = Geometry(job.batch * job.accelerators, job.accelerators, lanes_per_rank)
        self.rng = random.Random(seed)
        self.start_seconds = job.start_seconds

    def run(self, epoch: int = 0, steps: int | None = None) -> Trace:
        """Simulate an epoch, or its first ``steps`` steps.

        Raises:
            MissingDependency: simpy is not installed.
            ValueError: The dataset is smaller than one global batch.
        """
        reads = epoch_reads(self.sizes, self.geometry, self.rules, self.job.workers, epoch, steps)
        trace = _Epoch(self, dict(reads)).run()
        # Workers persist between epochs, and so do their connections.
        self.start_seconds = 0.0
        return trace


class _Epoch:
    """State of a simulated epoch."""

    def __init__(self, of: Simulation, reads: dict[Place, WorkerReads]) -> None:
        self.environment = _environment()
        self.of = of
        cluster = of.cluster
        self.storage = Pipe(cluster.bandwidth)
        self.machines = [
            _Machine(Cores(self.environment, cluster.cores), Pipe(cluster.link))
            for _ in range(-(-of.job.accelerators // cluster.per_node))
        ]
        self.barrier = Barrier(self.environment, of.job.accelerators)
        self.workers = {
            place: _Worker(self, self.machines[place[0] // cluster.per_node], each)
            for place, each in reads.items()
        }
        self.trace = Trace(sum(sum(each.images) for each in reads.values()))

    def run(self) -> Trace:
        for rank in range(self.of.job.accelerators):
            self.environment.process(self._rank(rank))
        if self.of.job.decodes_ahead:
            for worker in self.workers.values():
                self.environment.process(worker.run())
        self.environment.run()
        return self.trace

    def _rank(self, rank: int) -> Process:
        """Run the steps of a rank: get a batch, compute, wait for the other ranks."""
        environment = self.environment
        job = self.of.job
        each = max(job.workers, 1)
        workers = [self.workers[rank, number] for number in range(each)]
        yield environment.timeout(self.of.start_seconds)
        for step in range(sum(len(worker.reads.images) for worker in workers)):
            worker = workers[step % each]
            begun = environment.now
            yield from worker.hand_over(step // each)
            self.trace.waited += environment.now - begun
            if step == 0:
                self.trace.first_batch = max(self.trace.first_batch, environment.now)
            yield environment.timeout(worker.reads.images[step // each] / job.rate)
            yield self.barrier.wait()
            if rank == 0:
                self.trace.step_ends.append(environment.now + job.sync_seconds)
            yield environment.timeout(job.sync_seconds)

    def fetch(self, machine: _Machine, shard: int) -> Process:
        """Fetch a prefix from the storage."""
        num_bytes = self.of.prefixes[shard]
        self.trace.requests += 1
        self.trace.sent_bytes += num_bytes
        cluster = self.of.cluster
        yield self.environment.timeout(draw_latency(cluster.latency, self.of.rng))
        yield from self._send(num_bytes, [self.storage, machine.link, Pipe(cluster.stream)])

    def _send(self, num_bytes: int, pipes: Sequence[Pipe]) -> Process:
        """Send bytes through pipes part by part; a part enters when the previous one is through."""
        part = max(_LEAST_PART, -(-num_bytes // _PARTS))
        left = num_bytes
        arrived = self.environment.now
        while left > 0:
            size = min(part, left)
            left -= size
            yield self._until(pipes[0].pass_through(self.environment.now, size))
            # Each sender has at most one part queued per pipe.
            yield self._until(arrived)
            arrived = self.environment.now
            for pipe in pipes[1:]:
                arrived = pipe.pass_through(arrived, size)
        yield self._until(arrived)

    def _until(self, moment: float) -> Event:
        return self.environment.timeout(max(0.0, moment - self.environment.now))


class _Worker:
    """A DataLoader worker, the threads of a rank, or the rank itself if it has neither."""

    def __init__(self, epoch: _Epoch, machine: _Machine, reads: WorkerReads) -> None:
        self.epoch = epoch
        self.machine = machine
        self.reads = reads
        self.loads: list[Event] = []
        self.begun = 0
        self.asked = epoch.of.job.ahead
        self.made = [epoch.environment.event() for _ in reads.images]
        self.more = epoch.environment.event()

    def hand_over(self, number: int) -> Process:
        """Wait for the next batch, hand it to the rank, and request another."""
        if not self.epoch.of.job.decodes_ahead:
            yield from self.make(number)
            return
        yield self.made[number]
        self.asked += 1
        self.more.succeed()
        self.more = self.epoch.environment.event()

    def run(self) -> Process:
        """Make batches as they are requested."""
        yield self.epoch.environment.timeout(self.epoch.of.start_seconds)
        for number in range(len(self.reads.images)):
            while self.asked <= number:
                yield self.more
            yield from self.make(number)
            self.made[number].succeed()

    def make(self, number: int) -> Process:
        """Make one batch: wait for its prefixes, then decode its images."""
        job = self.epoch.of.job
        while self.begun < self.reads.needed[number]:
            wanted = min(self.begun + job.prefetch + 1, len(self.reads.shards))
            for request in range(len(self.loads), wanted):
                self.loads.append(self.epoch.environment.process(self._load(request)))
            yield self.loads[self.begun]
            self.begun += 1
        # Threads beyond the core count add nothing, and all ranks of a node have equally many.
        decoders = min(max(job.threads, 1), self.machine.cores.cores)
        seconds = self.reads.images[number] * job.image_seconds / decoders
        yield self.epoch.environment.all_of(
            [self.machine.cores.work(seconds) for _ in range(decoders)]
        )

    def _load(self, request: int) -> Process:
        """Load a prefix once a thread is free: request i starts after i - threads has ended."""
        threads = max(self.epoch.of.job.prefetch, 1)
        if request >= threads:
            yield self.loads[request - threads]
        shard = self.reads.shards[request]
        yield from self.epoch.fetch(self.machine, shard)
        # Runs on another core if one is free, because decoding releases the GIL.
        num_bytes = self.epoch.of.prefixes[shard]
        yield self.machine.cores.work(num_bytes * self.epoch.of.job.byte_seconds)
