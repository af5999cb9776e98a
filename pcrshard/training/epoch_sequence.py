"""The samples of an epoch, before they are divided into batches: pure functions of numbers.

Randomness is the raw output of Philox 4x64, a counter-based generator whose values NumPy guarantees
(the values of NumPy's distributions may change).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..arguments import Natural, check_fields

Ints = NDArray[np.int64]
Counts = Sequence[int] | Ints
# Sample ids of each batch.
Batches = Sequence[Ints]
# Purposes are words of the generator's counter, so that no two uses share a random number. Changing
# them changes every order.
SHARDS, ROWS, WINDOWS, MERGE, BUCKETS, SPLIT = range(6)
MAX_EPOCH = 2**32 - 1


def shards_of(ids: Ints, sizes: Ints) -> Ints:
    """Return the shard of each id."""
    return np.searchsorted(sizes.cumsum(), ids, side="right")


def run_begins(values: Ints) -> NDArray[np.bool_]:
    """Return a (len(values),) bool mask of the first entry of each run of equal values."""
    begins = np.ones(len(values), bool)
    begins[1:] = values[1:] != values[:-1]
    return begins


@dataclass(frozen=True)
class Rules:
    """Rules of the order that must not change during an epoch.

    Attributes:
        seed: Integer in [0, 2**64).
        shuffle_shards: Number of shards mixed at a time in a lane; 0 keeps the order of the
            dataset. Twice a lane's number of shards or more shuffles it completely.
        last: What happens to the samples that do not fill a global batch. "drop": they are left
            out, different ones in each epoch. "pad": the sequence wraps around to its beginning.
            "short": the last step is smaller and spread evenly over the ranks, some of which may
            get none.
    """

    seed: Natural = 0
    shuffle_shards: Natural = 4
    last: Literal["drop", "pad", "short"] = "drop"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.seed >= 1 << 64:
            raise ValueError(f"expected seed to be below 2**64, got {self.seed}")


def mixture(
    sizes: Sequence[Counts],
    weights: Sequence[float],
    samples: int,
    rules: Rules = Rules(),
    *,
    epoch: int = 0,
) -> Ints:
    """Draw one epoch from several datasets.

    Pass it to ``epoch_order`` as ``sequence``, with the concatenated sizes. Dataset d contributes
    exactly n_d samples (``samples`` apportioned by weight, largest remainders first) from an
    endless sequence of seeded passes, each of which has every sample of d once. Epoch k continues
    where epoch k - 1 stopped, as long as weights and ``samples`` stay the same, so a sample appears
    twice in an epoch only if a new pass begins in it.

    Args:
        sizes: Per dataset, (shards,) samples per shard.
        weights: Per dataset, its fraction of the epoch, on any scale.
        samples: Samples per epoch.
        rules: Seed, and whether to shuffle.
        epoch: Number of the epoch, from 0.

    Returns: (samples,) int64 ids over the concatenation of the datasets, spread so that every
        stretch has about the right proportions.

    >>> mixture([[4], [2, 2]], [1, 1], 4, Rules(shuffle_shards=0)).tolist()
    [0, 1, 4, 5]
    """
    shares = share_out(weights, samples)
    if len(sizes) != len(shares):
        raise ValueError(
            f"expected as many weights as datasets, got {len(shares)} and {len(sizes)}; "
            "a torch WeightedRandomSampler weighs samples"
        )

    parts = []
    places = []
    base = 0
    for dataset, (given, share) in enumerate(zip(sizes, shares, strict=True)):
        counts = np.asarray(given)
        total = int(counts.sum())
        if share:
            if not total:
                raise ValueError(f"expected samples in dataset {dataset}, got none")
            first, skipped = divmod(epoch * share, total)
            stop = -(-(epoch + 1) * share // total)
            ids = shuffled_passes(counts, rules, dataset, first, stop)[skipped:][:share]
            parts.append(ids + base)
            places.append(_places(shards_of(ids, counts), rules, (dataset, epoch)))
        base += total

    order = np.concatenate(places).argsort(kind="stable")
    return np.concatenate(parts)[order]


def _places(
    shards: Ints,
    rules: Rules,
    key: tuple[int, int],
) -> NDArray[np.float64]:
    """Return each sample's position in the epoch, in [0, 1); a shard's run shares one."""
    starts = np.flatnonzero(run_begins(shards))
    lengths = np.diff(starts, append=len(shards))
    jitter: Any = 0.5
    if rules.shuffle_shards:
        jitter = (random_words(len(starts), rules, MERGE, key) >> 11) * 2.0**-53
    return np.repeat((starts + jitter * lengths) / len(shards), lengths)


def shuffled_passes(
    sizes: Ints,
    rules: Rules,
    dataset: int,
    first: int,
    stop: int,
) -> Ints:
    """Return ((stop - first) * samples,) ids: shuffled passes [first, stop) over a dataset."""
    passes = stop - first
    shards = len(sizes)
    samples = int(sizes.sum())
    if not rules.shuffle_shards:
        return np.tile(np.arange(samples), passes)

    key = (dataset, 0)
    draws = random_words(passes * shards, rules, SHARDS, key, first * shards).reshape(passes, -1)
    rank = draws.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    rank += np.arange(passes)[:, None] * shards
    # One sort by shard, then by row: the shard's rank in the bits above 32 random bits.
    keys = np.repeat(rank.ravel(), np.tile(sizes, passes)).astype(np.uint64) << np.uint64(32)
    keys |= random_words(passes * samples, rules, ROWS, key, first * samples) >> np.uint64(32)
    order = keys.argsort(kind="stable")
    order %= samples
    return order


def random_words(
    count: int,
    rules: Rules,
    purpose: int,
    key: tuple[int, int],
    start: int = 0,
) -> NDArray[np.uint64]:
    """Return (count,) uint64: values [start, start + count) of a seed, purpose and key."""
    major, minor = key
    counter, skipped = divmod(start, 4)  # four values per counter
    stream = np.random.Philox(
        key=int(rules.seed) | purpose << 64, counter=counter | minor << 64 | major << 128
    )
    words: NDArray[np.uint64] = stream.random_raw(skipped + count)
    return words[skipped:]


def share_out(weights: Sequence[float], total: int) -> list[int]:
    """Apportion ``total`` by weight in whole numbers, by the largest remainders."""
    given = np.asarray(weights, np.float64)
    if given.ndim != 1 or not (given >= 0).all() or not 0 < given.sum() < math.inf:
        raise ValueError(f"expected weights of at least 0 with a positive sum, got {weights!r}")

    exact = given / given.sum() * total
    shares = np.floor(exact).astype(np.int64)
    most_rounded = (shares - exact).argsort(kind="stable")
    shares[most_rounded[: total - shares.sum()]] += 1
    found: list[int] = shares.tolist()
    return found
