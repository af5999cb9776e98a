"""Draw epochs from several datasets, in exact proportions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from .sequence import MERGE, Counts, Dataset, Rules, Samples, random_words

Weights = Annotated[
    Sequence[float] | Sequence[tuple[int, Sequence[float]]] | Callable[[int], Sequence[float]],
    "a number for each dataset, pairs (first sample, numbers), or a function of the epoch",
]


def mixture(
    sizes: Sequence[Counts],
    weights: Sequence[float],
    samples: int,
    rules: Rules = Rules(),
    *,
    epoch: int,
    drawn: Sequence[int] | None = None,
) -> Samples:
    """Draw one epoch from several datasets.

    Pass it to :class:`EpochOrder` as ``samples``, with the concatenated sizes. Dataset d
    contributes exactly n_d samples (``samples`` apportioned by weight, largest remainders first)
    from an endless sequence of seeded passes, each of which has every sample of d once. Epoch k
    continues where epoch k - 1 stopped, as long as weights and ``samples`` stay the same, so a
    sample appears twice in an epoch only if a new pass begins in it.

    Args:
        sizes: Per dataset, (shards,) samples per shard.
        weights: Per dataset, its fraction of the epoch, on any scale.
        samples: Samples per epoch.
        rules: Seed, and whether to shuffle.
        epoch: Number of the epoch, from 0.
        drawn: Per dataset, the samples of it in all epochs before; by default those of epochs with
            the same weights.

    Returns: The samples, spread so that every stretch has about the right proportions. Their ids
        are those of the concatenation of the datasets.

    Raises:
        ValueError: There are not as many weights as datasets, a weight is invalid, or a dataset
            with a weight is empty.

    >>> drawn = mixture([[4], [2, 2]], [1, 1], 4, Rules(shuffle_shards=0), epoch=0)
    >>> drawn.ids(np.arange(4)).tolist()
    [0, 1, 4, 5]
    """
    shares = share_out(weights, samples)
    if len(sizes) != len(shares):
        raise ValueError(
            f"expected as many weights as datasets, got {len(shares)} and {len(sizes)}; "
            "a torch WeightedRandomSampler weighs samples"
        )
    before = [epoch * share for share in shares] if drawn is None else drawn
    datasets: list[Dataset] = []
    chosen = []
    first_id = 0
    for number, (counts, share) in enumerate(zip(sizes, shares, strict=True)):
        dataset = Dataset(counts, rules, number, first_id)
        if share and not dataset.samples:
            raise ValueError(f"expected samples in dataset {number}, got none")
        datasets.append(dataset)
        if share:
            chosen.append(_share(datasets, before[number], share))
        first_id += dataset.samples
    places = np.concatenate([_places(own, rules, epoch) for own in chosen])
    order = places.argsort(kind="stable")
    columns = [
        np.concatenate([getattr(own, name) for own in chosen])[order]
        for name in ("of", "shards", "passes", "first", "counts")
    ]
    return Samples.join(datasets, columns)


def weights_at(weights: Weights, epoch: int, samples: int) -> list[float]:
    """Return the weights of an epoch.

    Args:
        weights: Of all epochs, or how they change.
        epoch: Number of the epoch.
        samples: Samples per epoch.

    Raises:
        ValueError: They are no numbers of at least 0 with a positive sum.
    """
    found: Any = weights
    if callable(weights):
        found = weights(epoch)
    elif _changes(weights):
        pairs: Any = weights
        begun = [own for start, own in pairs if start <= epoch * samples]
        if not begun or sorted(pairs, key=operator.itemgetter(0)) != list(pairs):
            raise ValueError(f"expected pairs of a sample, rising from 0, and weights, got {pairs}")
        found = begun[-1]
    try:
        share_out(found, 1)
        return [float(each) for each in found]
    except (TypeError, ValueError) as error:
        raise ValueError(f"weights of epoch {epoch}: {error}") from error


def drawn_before(weights: Weights, epoch: int, samples: int) -> list[int]:
    """Return how many samples of each dataset the epochs before have."""
    first = share_out(weights_at(weights, 0, samples), samples)
    if not _changes(weights):
        return [epoch * share for share in first]
    shares = [share_out(weights_at(weights, each, samples), samples) for each in range(epoch)]
    return [sum(own) for own in zip(*shares, strict=True)] or [0] * len(first)


def _changes(weights: Weights) -> bool:
    return callable(weights) or (len(weights) > 0 and isinstance(weights[0], Sequence))


def _share(datasets: Sequence[Dataset], start: int, count: int) -> Samples:
    """Return the samples [start, start + count) of the endless passes over the last dataset."""
    dataset = datasets[-1]
    first, skipped = divmod(start, dataset.samples)
    numbers = np.arange(first, -(-(start + count) // dataset.samples))
    shards = np.concatenate([dataset.shards(number) for number in numbers.tolist()])
    passes = np.repeat(numbers, len(dataset.sizes))
    zeros = np.zeros_like(shards)
    columns = [zeros + len(datasets) - 1, shards, passes, zeros, dataset.sizes[shards]]
    whole = Samples.join(datasets, columns)
    return whole.select([(skipped, skipped + count)])


def _places(samples: Samples, rules: Rules, epoch: int) -> NDArray[np.float64]:
    """Return each part's position in the epoch, in [0, 1); the parts of a run share one."""
    dataset = int(samples.of[0])
    starts, total = samples.runs, len(samples)
    lengths = np.diff(starts, append=total)
    jitter = (random_words(len(starts), rules, MERGE, (dataset, epoch)) >> np.uint64(11)) * 2.0**-53
    middles = starts + (jitter if rules.shuffle_shards else 0.5) * lengths
    run = np.searchsorted(starts, samples.starts[:-1], side="right") - 1
    places: NDArray[np.float64] = (middles / total)[run]
    return places


def share_out(weights: Sequence[float], total: int) -> list[int]:
    """Apportion ``total`` by weight in whole numbers, by the largest remainders.

    Raises:
        ValueError: A weight is negative, or their sum is zero or infinite.
    """
    given = np.asarray(weights, np.float64)
    if given.ndim != 1 or not (given >= 0).all() or not 0 < given.sum() < math.inf:
        raise ValueError(f"expected weights of at least 0 with a positive sum, got {weights!r}")

    exact = given / given.sum() * total
    shares = np.floor(exact).astype(np.int64)
    most_rounded = (shares - exact).argsort(kind="stable")
    shares[most_rounded[: total - shares.sum()]] += 1
    return list(map(int, shares))
