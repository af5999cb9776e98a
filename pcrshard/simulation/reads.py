"""The reads of each worker in an epoch, in the order of a real job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..training.epoch_order import Geometry, epoch_order, rank_batches
from ..training.epoch_sequence import Counts, Rules
from ..training.shard_schedule import schedule

# (rank, worker).
Place = tuple[int, int]


class WorkerReads(NamedTuple):
    """The batches of one worker, and its requests in order.

    Attributes:
        images: Number of images in each batch.
        needed: Number of requests that the worker has made when it begins each batch.
        shards: The shard of each request.
    """

    images: list[int]
    needed: list[int]
    shards: list[int]


def epoch_reads(
    sizes: Counts,
    geometry: Geometry,
    rules: Rules,
    workers: int,
    epoch: int = 0,
    steps: int | None = None,
) -> Iterator[tuple[Place, WorkerReads]]:
    """Compute the reads of every worker of every rank.

    Args:
        sizes: (shards,) samples of each shard.
        geometry: Geometry of the job, at its maximum world size.
        rules: Ordering rules of the job.
        workers: DataLoader workers per rank; 0 for the rank itself.
        epoch: The number of the epoch.
        steps: Number of steps; the whole epoch by default.
    """
    order = epoch_order(sizes, geometry, rules, epoch=epoch)
    world = geometry.max_world_size
    each = max(workers, 1)
    for rank in range(world):
        of_rank = rank_batches(order, world, rank)[:steps]
        for worker in range(each):
            batches = of_rank[worker::each]
            plan = schedule(batches, sizes)
            needed = np.searchsorted(plan.first, np.arange(len(batches)), side="right")
            images = [len(ids) for ids in batches]
            yield (rank, worker), WorkerReads(images, needed.tolist(), plan.shards.tolist())
