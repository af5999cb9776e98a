"""The order of an epoch as arrays of all samples: what the order without arrays must equal.


A sample's id is its shard's first id plus its row in the shard; ``sizes`` holds the number of
samples of each shard. An epoch is laid out in three steps:

1. **Sequence**: every sample once, shard after shard in a seeded order, and the samples of each
   shard in a seeded order (``mixture`` makes a sequence from several datasets).
2. **Lanes**: the sequence is cut into ``max_world_size * lanes_per_rank`` runs whose lengths depend
   only on the batch geometry, so each cut splits at most one shard. Inside a lane a sliding window
   mixes at most ``shuffle_shards`` neighboring shards at a time.
3. **Rows**: row t is the global batch of step t. Slot c, which is rank c at the largest world size,
   contributes the columns [c, c + 1) * global_batch / max_world_size, from its lane t %
   lanes_per_rank.

The order depends on neither the number of DataLoader workers nor the world size. A loader takes
batches from W workers in turn: worker w makes the steps t % W == w, which are whole lanes if W
divides ``lanes_per_rank``.

Randomness is the raw output of Philox 4x64, a counter-based generator whose values NumPy guarantees
(the values of NumPy's distributions may change).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pcrshard.arguments import Natural, Positive, check_fields

Ints = NDArray[np.int64]
Counts = Sequence[int] | Ints
# Sample ids of each batch.
Batches = Sequence[Ints]
Segment = Sequence[int]
# Numbers, such as epoch and stage, that select a stream of random numbers.
Key = tuple[int, int]
# A place for each sample, step after step, and the start of each batch, then the number of places.
Layout = tuple[Ints, Ints]
# Purposes are words of the generator's counter, so that no two uses share a random number. Changing
# them changes every order.
SHARDS, ROWS, WINDOWS, MERGE, BUCKETS, SPLIT = range(6)


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


@dataclass(frozen=True)
class Geometry:
    """The division of an epoch: fixed while a job runs, and in an elastic job for all of its runs.

    Attributes:
        global_batch: Samples per step over all ranks; a multiple of ``max_world_size``.
        max_world_size: The world size, or in an elastic job a multiple of all its world sizes.
        lanes_per_rank: Lanes per slot. If the number of workers divides it, each lane is read by
            one worker.
    """

    global_batch: Positive
    max_world_size: Positive = 1
    lanes_per_rank: Positive = 4

    def __post_init__(self) -> None:
        check_fields(self)
        if self.global_batch % self.max_world_size:
            raise ValueError(
                "expected global_batch to be a multiple of max_world_size, "
                f"got {self.global_batch} and {self.max_world_size}"
            )


@dataclass(frozen=True, eq=False)
class Order:
    """The remaining steps of an epoch.

    Attributes:
        ids: (samples,) int64, step after step; the last step may be short with ``last="short"``.
        geometry: How the steps were laid out.
        cuts: (steps * max_world_size + 1,) int64 start of each slot's batch of each step, then the
            number of ids.
    """

    ids: Ints
    geometry: Geometry
    cuts: Ints

    @property
    def steps(self) -> int:
        """Number of steps."""
        return (len(self.cuts) - 1) // self.geometry.max_world_size


def epoch_order(
    sizes: Counts,
    geometry: Geometry,
    rules: Rules = Rules(),
    *,
    epoch: int = 0,
    history: Iterable[Segment] = (),
    sequence: Ints | None = None,
    regroup: Callable[..., Layout] | None = None,
) -> Order:
    """Lay out an epoch, or the rest of it.

    Args:
        sizes: (shards,) samples per shard.
        geometry: Geometry of the remaining steps.
        rules: Seed, window and last batch; the same in every segment of an epoch.
        epoch: Number of the epoch, from 0.
        history: Segments ``(global_batch, max_world_size, lanes_per_rank, steps)`` done in this
            epoch, oldest first. If the last one has this geometry, its order continues unchanged.
            Otherwise the samples not yet delivered are laid out again, and ``rules.last`` applies
            to them again.
        sequence: (samples,) int64 ids that make up the epoch, from ``mixture``; by default every
            sample once.
        regroup: Function that moves samples between steps; see :meth:`Buckets.regroup`.

    Returns: The remaining steps.

    Raises:
        ValueError: An argument is out of range, or the history has more steps than the epoch.

    >>> order = epoch_order([3, 3, 2], Geometry(2, lanes_per_rank=1), Rules(shuffle_shards=0))
    >>> order.ids.reshape(-1, 2).tolist()
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    >>> epoch_order([3, 3, 2], Geometry(2, lanes_per_rank=1), history=[(2, 1, 1, 3)]).steps
    1
    """
    sizes = np.asarray(sizes, np.int64)
    left = shuffled_pass(sizes, rules, 0, epoch) if sequence is None else sequence
    for stage, (*numbers, steps) in enumerate(advance(history, geometry, 0)):
        cut = Geometry(*numbers)
        entries, cuts = _lay_out(shards_of(left, sizes), cut, rules, (epoch, stage))
        if regroup is not None and len(entries):
            places, cuts = regroup(left[entries], cuts, cut, (epoch, stage))
            entries = entries[places]
        order = Order(left[entries], cut, cuts)
        if not stage and not order.steps:
            raise ValueError(
                f"expected at least one global batch of {cut.global_batch} samples, got {len(left)}"
            )
        if steps > order.steps:
            raise ValueError(f"expected at most {order.steps} steps of {cut}, got {steps}")
        done = cuts[steps * cut.max_world_size]
        left = np.delete(left, entries[:done])
    return Order(order.ids[done:], geometry, cuts[steps * geometry.max_world_size :] - done)


def advance(
    history: Iterable[Segment],
    geometry: Geometry,
    steps: int,
) -> list[list[int]]:
    """Append completed steps to the history, to its last segment if that has this geometry.

    >>> advance([[8, 2, 4, 10]], Geometry(8, 2), 5)
    [[8, 2, 4, 15]]
    """
    segments = list(map(list, history))
    cut = list(map(int, astuple(geometry)))
    if not segments or segments[-1][:3] != cut:
        segments.append([*cut, 0])
    segments[-1][3] += steps
    return segments


def rank_batches(order: Order, rank: int = 0, world: int = 1) -> list[Ints]:
    """Return the batches of one rank, in order; DataLoader worker w of W makes ``[w::W]`` of them.

    Args:
        order: The remaining steps.
        rank: In [0, world); takes the columns [rank, rank + 1) * global_batch / world of a row.
        world: Number of ranks; divides the global batch.

    Returns: Views of (global_batch / world,) int64 ids. A short last row is spread evenly; a rank
        without any of it has one fewer batch.
    """
    cuts = _even_cuts(order.cuts[:: order.geometry.max_world_size], world)
    if order.geometry.global_batch % world:
        raise ValueError(f"expected a multiple, got {order.geometry.global_batch} and {world}")
    bounds = itertools.islice(itertools.pairwise(cuts.tolist()), rank, None, world)
    return [order.ids[start:stop] for start, stop in bounds if start < stop]


def _rows(samples: int, geometry: Geometry, last: str) -> Ints:
    """Where each step begins, then the number of samples."""
    size, parts, _ = astuple(geometry)
    rows = np.append(np.arange(0, samples, size), samples)
    rest = samples % size
    if last == "short" and 0 < rest < parts and samples > size:
        if size >= 2 * parts:
            rows[-2] = samples - parts
        else:
            rows = np.delete(rows, -2)
    return rows


def _even_cuts(rows: Ints, parts: int) -> Ints:
    """Where each rank's part of each step begins, then the number of samples."""
    lengths = np.diff(rows)
    return np.append(rows[:-1, None] + lengths[:, None] * np.arange(parts) // parts, rows[-1])


def _lay_out(
    shards: Ints,
    geometry: Geometry,
    rules: Rules,
    key: Key,
) -> Layout:
    """Return the entry of the sequence at each position, row by row, and the cuts of the rows.

    Args:
        shards: (samples,) shard of each entry of the sequence.
        geometry: How rows are divided.
        rules: Seed, window and last batch.
        key: Epoch and stage, which seed the random numbers.
    """
    samples = len(shards)
    size, slots, turns = astuple(geometry)
    fill = {"drop": -(samples % size), "pad": -samples % size, "short": 0}
    if key[1] and rules.last == "short" and 0 < samples < min(slots, size):
        fill["short"] = slots - samples
    entries = np.resize(np.arange(samples), samples + fill[rules.last])
    cuts = _even_cuts(_rows(len(entries), geometry, rules.last), slots)
    # The lane of each position; lanes are numbered by slot, then by turn. NumPy sorts 16 bits by
    # counting, several times faster than 64.
    step, slot = np.divmod(np.arange(len(cuts) - 1), slots)
    lane = (slot * turns + step % turns).astype(np.min_scalar_type(slots * turns))
    lanes = np.repeat(lane, np.diff(cuts))
    if rules.shuffle_shards:
        entries = _mix(entries, shards, np.sort(lanes, kind="stable"), rules, key)
    rows = np.empty_like(entries)
    rows[lanes.argsort(kind="stable")] = entries
    return rows, cuts


def _mix(
    entries: Ints,
    shards: Ints,
    lanes: NDArray[Any],
    rules: Rules,
    key: Key,
) -> Ints:
    """Shuffle each lane with a window that slides over its pieces (runs of one shard).

    Piece i of a lane of n pieces spreads its samples evenly over the times [i + 1/2 - w/2, i + 1/2
    + w/2), reflected at 0 and n. So at most w pieces are open at any time, and the first and last
    batches mix at least w/2 pieces, where a plain window would begin and end with one. Every other
    lane runs backwards: the two parts of a split shard are then needed at the same end of the
    epoch, and a worker or rank with both lanes reads it once.

    Args:
        entries: Entries of the sequence, in its order.
        shards: (samples,) shard of each entry of the sequence.
        lanes: The lane of each of these entries, ascending.
        rules: Seed and window.
        key: Epoch and stage.
    """
    begins = run_begins(lanes) | run_begins(shards[entries])
    # Below, one value per piece, and times in units of 2**-32 piece.
    lane = (run_begins(lanes).cumsum() - 1)[begins]
    first, stop = (np.searchsorted(lane, lane, side) for side in ("left", "right"))
    piece = np.arange(len(lane))
    length = stop - first
    place = np.where(lane % 2, stop - 1 - piece, piece - first)
    # At width 2n or more, the reflected window is uniform over the whole lane.
    width = np.minimum(2 * length, rules.shuffle_shards)
    start = (2 * place + 1 - width) << 31
    period = length << 33

    of = begins.cumsum() - 1  # the piece of each entry
    draws = random_words(len(entries), rules, WINDOWS, key) >> np.uint64(32)
    time = (draws.astype(np.int64) * width[of] + start[of]) % period[of]
    time = np.minimum(time, period[of] - 1 - time) + (first << 32)[of]
    return entries[np.argsort(time, kind="stable")]


def shuffled_pass(sizes: Ints, rules: Rules, dataset: int, number: int) -> Ints:
    """Return (samples,) ids: a pass over a dataset, shard by shard, each shard's samples shuffled.

    Args:
        sizes: (shards,) samples per shard.
        rules: Seed, and whether to shuffle.
        dataset: Position of the dataset in a mixture; 0 without one.
        number: Number of the pass, from 0.
    """
    shards, samples = len(sizes), int(sizes.sum())
    if not rules.shuffle_shards:
        return np.arange(samples)
    draws = random_words(shards, rules, SHARDS, (dataset, 0), number * shards)
    rank = draws.argsort(kind="stable").argsort()
    # One sort by shard, then by row: the shard's rank in the bits above 32 random bits.
    keys = np.repeat(rank, sizes).astype(np.uint64) << np.uint64(32)
    keys |= random_words(samples, rules, ROWS, (dataset, 0), number * samples) >> np.uint64(32)
    return keys.argsort(kind="stable")


def mixture(
    sizes: Sequence[Counts],
    weights: Sequence[float],
    samples: int,
    rules: Rules = Rules(),
    *,
    epoch: int,
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

    Raises:
        ValueError: There are not as many weights as datasets, a weight is invalid, or a dataset
            with a weight is empty.

    >>> mixture([[4], [2, 2]], [1, 1], 4, Rules(shuffle_shards=0), epoch=0).tolist()
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
            passes = [shuffled_pass(counts, rules, dataset, n) for n in range(first, stop)]
            ids = np.concatenate(passes)[skipped:][:share]
            parts.append(ids + base)
            places.append(_places(shards_of(ids, counts), rules, (dataset, epoch)))
        base += total

    order = np.concatenate(places).argsort(kind="stable")
    return np.concatenate(parts)[order]


def _places(
    shards: Ints,
    rules: Rules,
    key: Key,
) -> NDArray[np.float64]:
    """Return each sample's position in the epoch, in [0, 1); a shard's run shares one."""
    starts = np.flatnonzero(run_begins(shards))
    lengths = np.diff(starts, append=len(shards))
    jitter = (random_words(len(starts), rules, MERGE, key) >> 11) * 2.0**-53
    middles = starts + (jitter if rules.shuffle_shards else 0.5) * lengths
    return np.repeat(middles / len(shards), lengths)


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


def random_words(
    count: int,
    rules: Rules,
    purpose: int,
    key: Key,
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


def shards_of(ids: Ints, sizes: Ints) -> Ints:
    """Return the shard of each id."""
    return np.searchsorted(sizes.cumsum(), ids, side="right")


def run_begins(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a (len(values),) bool mask of the first entry of each run of equal values."""
    begins = np.ones(len(values), bool)
    begins[1:] = values[1:] != values[:-1]
    return begins


def by_shape(
    buckets: Any, sizes: Ints, rules: Rules, ids: Ints, cuts: Ints, geometry: Geometry, key: Key
) -> Layout:
    """The samples of each rank sorted by bucket, window by window."""
    sizes = sizes[ids]
    world = geometry.max_world_size
    size = geometry.global_batch
    steps, rest = divmod(len(sizes), size)
    window = np.arange(steps) // max(8192 * world // size, 32)
    step, column = np.divmod(np.arange(steps * size), size)
    keys = buckets._bucket(sizes[: steps * size]), window[step], column * world // size
    order = np.lexsort(keys).reshape(world, steps, size // world)
    if rules.shuffle_shards:
        draws = random_words(steps, rules, BUCKETS, key)
        order = order[:, np.lexsort((draws, window))]
    return np.append(order.transpose(1, 0, 2), np.arange(rest) + steps * size), cuts
