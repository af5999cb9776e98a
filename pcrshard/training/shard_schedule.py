"""When a worker needs each shard, and how much it reads and keeps: pure functions of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .epoch_order import Order, worker_batches
from .epoch_sequence import Batches, Counts, Ints, run_begins, shards_of


@dataclass(frozen=True, eq=False)
class Schedule:
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
        each = 1 if weights is None else np.asarray(weights)[self.shards]
        change = np.zeros(int(self.last.max(initial=-1)) + 2, np.int64)
        np.add.at(change, self.first, each)
        np.subtract.at(change, self.last + 1, each)
        return int(change.cumsum().max())


@dataclass(frozen=True, eq=False)
class Account:
    """I/O totals of an epoch; arrays are (world, workers) int64 unless noted.

    Attributes:
        requests: Requests for shards by each worker.
        read_bytes: Bytes that each worker reads.
        open_shards: Maximum number of shards that each worker holds in one batch.
        open_bytes: Maximum number of bytes that each worker holds in one batch.
        rank_bytes: (world,) bytes that each rank reads if its workers share them.
        repeated_bytes: Bytes read more than once, by the same or another worker.
    """

    requests: Ints
    read_bytes: Ints
    open_shards: Ints
    open_bytes: Ints
    rank_bytes: Ints
    repeated_bytes: int


def schedule(
    batches: Batches,
    sizes: Counts,
    keep: int | None = None,
) -> Schedule:
    """Compute when a worker first needs each shard and when it can release it.

    Args:
        batches: Sample ids of each batch, from ``worker_batches``.
        sizes: (shards,) samples per shard.
        keep: Batches for which a shard may go unused before it is released, to be read again later;
            by default each shard is read once. Set it for a ``mixture`` that repeats a dataset.

    Returns:
        The requests, in the order of first use.
    """
    if not batches:
        return Schedule(*np.zeros((3, 0), np.int64))

    shards = shards_of(np.concatenate(batches), np.asarray(sizes))
    # NumPy sorts 16 bits by counting, several times faster than 64.
    order = shards.astype(np.min_scalar_type(len(sizes))).argsort(kind="stable")
    shards = shards[order]
    batch = np.repeat(np.arange(len(batches)), list(map(len, batches)))[order]
    begins = run_begins(shards)
    if keep is not None:
        begins |= np.diff(batch, prepend=0) > keep + 1

    start = np.flatnonzero(begins)
    by_use = order[start].argsort(kind="stable")
    last = np.append(start[1:], len(shards)) - 1
    return Schedule(shards[start][by_use], batch[start][by_use], batch[last][by_use])


def account(
    order: Order,
    sizes: Counts,
    prefix_bytes: Counts,
    world: int = 1,
    workers: int = 1,
) -> Account:
    """Compute what each worker of each rank reads and holds.

    Args:
        order: The remaining steps.
        sizes: (shards,) samples per shard.
        prefix_bytes: (shards,) bytes that one request for a shard moves.
        world: Number of ranks; divides the global batch.
        workers: DataLoader workers per rank.
    """
    prefix = np.asarray(prefix_bytes, np.int64)
    figures = np.zeros((4, world, workers), np.int64)
    needed = np.zeros((world, len(prefix)), bool)
    for rank, worker in np.ndindex(world, workers):
        plan = schedule(worker_batches(order, world, rank, workers, worker), sizes)
        needed[rank, plan.shards] = True
        read = prefix[plan.shards].sum()
        figures[:, rank, worker] = len(plan.shards), read, plan.peak(), plan.peak(prefix)
    repeated = int(figures[1].sum() - prefix[needed.any(0)].sum())
    totals: list[Any] = [needed @ prefix, repeated]
    return Account(*figures, *totals)
