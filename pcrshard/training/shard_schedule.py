"""What a plan costs: when a worker needs each shard, and what is read and held. Pure functions of numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from .epoch_order import (
    Ints,
    Order,
    check_counts,
    check_whole,
    run_begins,
    shards_of,
    worker_batches,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """When one worker needs which shards; one entry per request, by first use.

    Attributes:
        shards: (requests,) int64 index of the shard.
        first: (requests,) int64 index of the worker's batch that needs the shard first.
        last: (requests,) int64 index of the batch after which it can be released.
    """

    shards: Ints
    first: Ints
    last: Ints

    def peak(self, weights: Sequence[int] | Ints | None = None) -> int:
        """Most shards held in one batch; with ``weights`` (shards,), such as prefix sizes, most bytes."""
        if not len(self.shards):
            return 0
        each = (
            np.ones_like(self.shards)
            if weights is None
            else check_counts("weights", weights)[self.shards]
        )
        change = np.zeros(int(self.last.max()) + 2, np.int64)
        np.add.at(change, self.first, each)
        np.add.at(change, self.last + 1, -each)
        return int(change.cumsum().max())


@dataclasses.dataclass(frozen=True, eq=False)
class Account:
    """What an epoch reads; arrays are (world, workers) int64 unless noted.

    Attributes:
        shards: Different shards that each worker reads.
        requests: Times that each worker asks for a shard.
        read_bytes: Bytes that each worker reads.
        open_shards: Most shards that each worker holds in one batch.
        open_bytes: Most bytes that each worker holds in one batch.
        rank_bytes: (world,) bytes that each rank reads if its workers share what they read.
        once_bytes: Bytes of the shards that the epoch needs, each once.
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
        """Bytes that are read although some worker reads them too, or this one did."""
        return int(self.read_bytes.sum()) - self.once_bytes


def schedule(
    batches: Sequence[Ints], sizes: Sequence[int] | Ints, keep: int | None = None
) -> Schedule:
    """When one worker first needs each shard, and when it can let go of it.

    Args:
        batches: From ``worker_batches``.
        sizes: (shards,) samples per shard.
        keep: Batches that a shard may lie unused before it is released, to be read again; by default it is read once. Set it for a
            ``mixture`` in which a dataset comes several times.

    Returns:
        The requests, by first use.
    """
    sizes = check_counts("sizes", sizes)
    if keep is not None:
        check_whole("keep", keep, 0)
    if not batches:
        return Schedule(*np.zeros((3, 0), np.int64))
    shards = shards_of(np.concatenate(batches), sizes)
    batch = np.repeat(np.arange(len(batches)), [len(ids) for ids in batches])
    order = np.argsort(shards, kind="stable")
    shards, batch = shards[order], batch[order]
    begins = run_begins(shards)
    if keep is not None:
        begins |= np.diff(batch, prepend=0) > keep + 1
    start = np.flatnonzero(begins)
    stop = np.append(start[1:], len(shards))
    by_use = np.argsort(order[start], kind="stable")
    return Schedule(shards[start][by_use], batch[start][by_use], batch[stop - 1][by_use])


def account(
    order: Order,
    sizes: Sequence[int] | Ints,
    prefix_bytes: Sequence[int] | Ints,
    world: int = 1,
    workers: int = 1,
    keep: int | None = None,
) -> Account:
    """Count what each worker of each rank reads and holds.

    Args:
        order: The steps to do.
        sizes: (shards,) samples per shard.
        prefix_bytes: (shards,) bytes that one request for a shard moves.
        world: Number of ranks; divides the global batch.
        workers: DataLoader workers per rank.
        keep: As in ``schedule``.
    """
    sizes, prefix = check_counts("sizes", sizes), check_counts("prefix_bytes", prefix_bytes)
    if len(sizes) != len(prefix):
        raise ValueError(
            f"expected as many prefix_bytes as sizes, got {len(prefix)} and {len(sizes)}"
        )
    figures = np.zeros(
        (5, check_whole("world", world, 1), check_whole("workers", workers, 1)), np.int64
    )
    needed = np.zeros((world, len(sizes)), bool)
    for rank, worker in np.ndindex(world, workers):
        plan = schedule(worker_batches(order, world, rank, workers, worker), sizes, keep)
        mine = np.bincount(plan.shards, minlength=len(sizes)) > 0
        needed[rank] |= mine
        figures[:, rank, worker] = (
            mine.sum(),
            len(plan.shards),
            prefix[plan.shards].sum(),
            plan.peak(),
            plan.peak(prefix),
        )
    shards, requests, read, open_shards, open_bytes = figures
    return Account(
        shards,
        requests,
        read,
        open_shards,
        open_bytes,
        needed @ prefix,
        int(prefix[needed.any(0)].sum()),
    )
