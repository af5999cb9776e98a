"""When a worker needs each shard, and how much it reads and keeps: pure functions of numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .epoch_order import Order, worker_batches
from .epoch_sequence import (
    Batches,
    Counts,
    Ints,
    check_counts,
    check_whole,
    run_begins,
    shards_of,
)


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

    def figures(self, prefix_bytes: Ints) -> list[int]:
        """Return shards, requests, bytes read, peak shards and peak bytes; see :class:`Account`."""
        return [
            len(np.unique(self.shards)),
            len(self.shards),
            prefix_bytes[self.shards].sum(),
            self.peak(),
            self.peak(prefix_bytes),
        ]


@dataclass(frozen=True, eq=False)
class Account:
    """I/O totals of an epoch; arrays are (world, workers) int64 unless noted.

    Attributes:
        shards: Distinct shards that each worker reads.
        requests: Requests for shards by each worker.
        read_bytes: Bytes that each worker reads.
        open_shards: Maximum number of shards that each worker holds in one batch.
        open_bytes: Maximum number of bytes that each worker holds in one batch.
        rank_bytes: (world,) bytes that each rank reads if its workers share them.
        once_bytes: Bytes of the shards that the epoch needs, each counted once.
    """

    shards: Ints
    requests: Ints
    read_bytes: Ints
    open_shards: Ints
    open_bytes: Ints
    rank_bytes: Ints
    once_bytes: int

    @property
    def repeated_bytes(self) -> int:
        """Bytes read more than once, by the same or another worker."""
        return int(self.read_bytes.sum()) - self.once_bytes


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
    sizes = check_counts("sizes", sizes)
    if not batches:
        return Schedule(*np.zeros((3, 0), np.int64))

    shards = shards_of(np.concatenate(batches), sizes)
    order = _order_of(shards, len(sizes))
    shards = shards[order]
    batch = np.repeat(np.arange(len(batches)), list(map(len, batches)))[order]
    begins = run_begins(shards)
    if keep is not None:
        begins |= np.diff(batch, prepend=0) > check_whole("keep", keep, 0) + 1

    start = np.flatnonzero(begins)
    by_use = order[start].argsort(kind="stable")
    last = np.append(start[1:], len(shards)) - 1
    return Schedule(shards[start][by_use], batch[start][by_use], batch[last][by_use])


def _order_of(shards: Ints, num_shards: int) -> Ints:
    """Return the positions of each shard's samples, in order."""
    # NumPy sorts 16 bits by counting, several times faster than 64.
    return shards.astype(np.min_scalar_type(num_shards)).argsort(kind="stable")


def account(
    order: Order,
    sizes: Counts,
    prefix_bytes: Counts,
    world: int = 1,
    workers: int = 1,
    keep: int | None = None,
) -> Account:
    """Compute what each worker of each rank reads and holds.

    Args:
        order: The remaining steps.
        sizes: (shards,) samples per shard.
        prefix_bytes: (shards,) bytes that one request for a shard moves.
        world: Number of ranks; divides the global batch.
        workers: DataLoader workers per rank.
        keep: As in ``schedule``.
    """
    sizes = check_counts("sizes", sizes)
    prefix = check_counts("prefix_bytes", prefix_bytes)
    if len(sizes) != len(prefix):
        raise ValueError(
            f"expected as many prefix_bytes as sizes, got {len(prefix)} and {len(sizes)}"
        )

    shape = (check_whole("world", world, 1), check_whole("workers", workers, 1))
    figures = np.zeros((5, *shape), np.int64)
    needed = np.zeros((world, len(sizes)), bool)
    for rank, worker in np.ndindex(shape):
        plan = schedule(worker_batches(order, world, rank, workers, worker), sizes, keep)
        needed[rank, plan.shards] = True
        figures[:, rank, worker] = plan.figures(prefix)
    totals = [needed @ prefix, int(prefix[needed.any(0)].sum())]
    return Account(*figures, *totals)
