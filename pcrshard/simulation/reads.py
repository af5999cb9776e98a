"""What each worker reads in an epoch, in the order of a real job, and what that adds up to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from ..format.scan import Scan
from ..training.order import EpochOrder, Geometry
from ..training.schedule import schedule
from ..training.sequence import Counts, Ints, Rules


@dataclass(frozen=True, eq=False)
class Requests:
    """The shard requests of one worker, in order of first use.

    Attributes:
        shards: (requests,) int64 index of the shard.
        first: (requests,) int64 index of the worker's first batch that needs the shard.
        last: (requests,) int64 index of the batch after which it can be released.
    """

    shards: Ints
    first: Ints
    last: Ints

    def peak(self, weights: Counts | None = None) -> int:
        """Return the largest number of shards held in one batch.

        With ``weights`` (shards,), such as prefix sizes, return the largest sum of weights.
        """
        each = None if weights is None else np.asarray(weights)[self.shards]
        size = self.last.max(initial=-1) + 2
        held = np.bincount(self.first, each, size) - np.bincount(self.last + 1, each, size)
        return int(held.cumsum().max())


class WorkerReads(NamedTuple):
    """The number of images in each batch of one worker, and its requests."""

    images: list[int]
    requests: Requests

    @classmethod
    def of_batches(
        cls, batches: Iterable[Ints], sizes: Counts, keep: float = math.inf
    ) -> WorkerReads:
        """Return the reads of these batches; see :func:`schedule`."""
        images: list[int] = []
        shards: list[int] = []
        first: list[int] = []
        last: list[int] = []
        open_requests: dict[int, int] = {}
        for number, step in enumerate(schedule(batches, np.append(0, np.cumsum(sizes)), keep)):
            images.append(len(step.ids))
            for shard in step.begin:
                open_requests[shard] = len(shards)
                shards.append(shard)
                first.append(number)
                last.append(number)
            for shard in step.end:
                last[open_requests[shard]] = number
        return cls(images, Requests(*(np.array(each, np.int64) for each in (shards, first, last))))


def epoch_reads(
    sizes: Counts,
    geometry: Geometry,
    rules: Rules = Rules(),
    workers: int = 1,
    *,
    epoch: int = 0,
    steps: int | None = None,
) -> list[list[WorkerReads]]:
    """Compute the reads of each worker of each rank.

    Args:
        sizes: (shards,) samples of each shard.
        geometry: Geometry of the job, at its maximum world size.
        rules: Ordering rules of the job.
        workers: DataLoader workers per rank; a rank without any counts as one.
        epoch: The number of the epoch.
        steps: Number of steps; the whole epoch by default.

    Raises:
        ValueError: The dataset is smaller than one global batch.
    """
    order = EpochOrder(sizes, geometry, rules, epoch=epoch)
    world = geometry.max_world_size
    made = order.steps if steps is None else steps
    return [
        [
            WorkerReads.of_batches(
                itertools.islice(
                    order.batches(rank, world, worker=worker, workers=workers),
                    len(range(worker, made, workers)),
                ),
                sizes,
            )
            for worker in range(workers)
        ]
        for rank in range(world)
    ]


class PlanCost(msgspec.Struct, frozen=True):
    """Predicted reads of an epoch at a scan.

    Attributes:
        scan: The scan.
        steps: Steps per rank.
        epoch_bytes: Bytes read by all workers of all ranks.
        repeated_bytes: Bytes of ``epoch_bytes`` that are read more than once.
        requests: Prefixes read by all workers. A remote prefix takes one request up to the part
            size (docs/remote.md), and one per part beyond it.
        worker_memory_bytes: Peak bytes of prefixes held by a worker.
        images_per_second: Upper bound set by the bandwidth, X = W / E[s] (Theorem 4.1 of the VLDB
            paper); ``None`` without a bandwidth.
    """

    scan: Scan
    steps: int
    epoch_bytes: int
    repeated_bytes: int
    requests: int
    worker_memory_bytes: int
    images_per_second: float | None


def plan_costs(
    reads: Sequence[Sequence[WorkerReads]],
    prefixes: Mapping[Scan, Counts],
    bandwidth: float | None = None,
) -> list[PlanCost]:
    """Add up what an epoch reads at each of some scans.

    Args:
        reads: From :func:`epoch_reads`.
        prefixes: (shards,) bytes of each shard's prefix, by scan.
        bandwidth: Storage bandwidth shared by all ranks, in bytes per second.
    """
    workers = [worker for rank in reads for worker in rank]
    shards = np.concatenate([worker.requests.shards for worker in workers])
    images = sum(sum(worker.images) for worker in workers)
    costs = []
    for scan, sizes in prefixes.items():
        num_bytes = np.asarray(sizes)
        epoch_bytes = int(num_bytes[shards].sum())
        costs.append(
            PlanCost(
                scan=scan,
                steps=sum(len(worker.images) for worker in reads[0]),
                epoch_bytes=epoch_bytes,
                repeated_bytes=epoch_bytes - int(num_bytes[np.unique(shards)].sum()),
                requests=len(shards),
                worker_memory_bytes=max(worker.requests.peak(num_bytes) for worker in workers),
                images_per_second=bandwidth and bandwidth * images / epoch_bytes,
            )
        )
    return costs
