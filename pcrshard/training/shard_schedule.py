"""When a worker needs each shard: pure functions of numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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


def schedule(
    batches: Batches,
    sizes: Counts,
    keep: int | None = None,
) -> Schedule:
    """Compute when a worker first needs each shard and when it can release it.

    Args:
        batches: Sample ids of each batch, from ``rank_batches``.
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
