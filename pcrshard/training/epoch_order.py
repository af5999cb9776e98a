"""Who reads which samples, and in which order: pure functions of numbers.

A sample's id is its shard's first id plus its row in the shard; ``sizes`` are the samples per shard. An epoch is made in three steps:

1. **Sequence**: every sample once, shard after shard in a seeded order, each shard's samples in a seeded order (``mixture`` makes one
   from several datasets).
2. **Lanes**: the sequence is cut into ``slots * phases`` runs whose lengths follow from the batch geometry alone, so at most one shard
   per cut is split. Inside a lane a sliding window mixes at most ``shuffle_shards`` neighbouring shards at a time.
3. **Rows**: row t is the global batch of step t. Slot c gives columns [c, c + 1) * global_batch / slots, from its lane t % phases.

The number of DataLoader workers and the world size play no part in this, so they cannot change the order. A loader hands out the
batches of W workers round robin: worker w makes the steps t % W == w, hence whole lanes where W divides ``phases``.

Randomness is the raw output of Philox 4x64, a counter-based generator whose values NumPy guarantees (its distributions may change).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["Geometry", "Order", "Rules", "advance", "epoch_order", "mixture", "worker_batches"]

Ints = npt.NDArray[np.int64]
Segment = Sequence[int]
# Purposes: words of the generator's counter, so that no two uses ever share a number. Changing them changes every order.
_SHARDS, _ROWS, _WINDOWS, _MERGE = range(4)


def check_counts(name: str, values: Sequence[int] | Ints) -> Ints:
    """One number of at least 0 per shard, as (shards,) int64."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and (array.dtype.kind not in "iu" or array.min() < 0)):
        raise ValueError(f"expected {name} to be whole numbers of at least 0, got {values!r}")
    return array.astype(np.int64)


def check_whole(name: str, value: int, least: int, most: int | None = None) -> int:
    """The value, if it is a whole number in [least, most]."""
    if (
        not isinstance(value, int | np.integer)
        or value < least
        or (most is not None and value > most)
    ):
        limit = f"of at least {least}" if most is None else f"in [{least}, {most}]"
        raise ValueError(f"expected {name} to be a whole number {limit}, got {value!r}")
    return int(value)


def shards_of(ids: Ints, sizes: Ints) -> Ints:
    """The shard of each id."""
    return np.searchsorted(sizes.cumsum(), ids, side="right")


def run_begins(values: Ints) -> npt.NDArray[np.bool_]:
    """Where a run of one value begins."""
    begins = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=begins[1:])
    return begins


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How an epoch is cut up; fixed while a job runs, and in an elastic job for good.

    Attributes:
        global_batch: Samples per step over all ranks; a multiple of ``slots``.
        slots: Places that ranks fill: the world size, or in an elastic job a number that all its world sizes divide.
        phases: Lanes per slot; numbers of workers that divide it read each lane in one worker.
    """

    global_batch: int
    slots: int = 1
    phases: int = 4

    def __post_init__(self) -> None:
        for name in ("global_batch", "slots", "phases"):
            check_whole(name, getattr(self, name), 1)
        if self.global_batch % self.slots:
            raise ValueError(
                f"expected global_batch to be a multiple of slots, got {self.global_batch} and {self.slots}"
            )


@dataclasses.dataclass(frozen=True)
class Rules:
    """What must not change while an epoch is under way.

    Attributes:
        seed: Any number in [0, 2**64).
        shuffle_shards: Shards that are mixed at any time in a lane; 0 keeps the order of the dataset. From twice a lane's shards on,
            the lane is shuffled completely.
        last: What happens to the samples that fill no global batch. "drop": they are left out, others each epoch. "pad": the sequence
            wraps to its own beginning. "short": the last step is smaller, spread evenly over ranks, some of which may get none.
    """

    seed: int = 0
    shuffle_shards: int = 4
    last: Literal["drop", "pad", "short"] = "drop"

    def __post_init__(self) -> None:
        check_whole("seed", self.seed, 0, 2**64 - 1)
        check_whole("shuffle_shards", self.shuffle_shards, 0)
        if self.last not in ("drop", "pad", "short"):
            raise ValueError(f"expected last to be 'drop', 'pad' or 'short', got {self.last!r}")


@dataclasses.dataclass(frozen=True, eq=False)
class Order:
    """The steps of an epoch that are still to do.

    Attributes:
        ids: (samples,) int64, row after row; only with ``last="short"`` the last row may be short.
        geometry: How it was laid out.
    """

    ids: Ints
    geometry: Geometry

    @property
    def steps(self) -> int:
        """Number of rows."""
        return -(-len(self.ids) // self.geometry.global_batch)

    def step(self, index: int) -> Ints:
        """(global_batch,) int64 ids of one row; ``index`` in [0, steps)."""
        size = self.geometry.global_batch
        return self.ids[index * size : (index + 1) * size]


def epoch_order(
    sizes: Sequence[int] | Ints,
    geometry: Geometry,
    rules: Rules = Rules(),
    *,
    epoch: int = 0,
    history: Iterable[Segment] = (),
    sequence: Ints | None = None,
) -> Order:
    """Lay out an epoch, or what is left of it.

    Args:
        sizes: (shards,) samples per shard.
        geometry: How the steps to come are cut up.
        rules: Seed, window, last batch; the same in every segment of an epoch.
        epoch: Counts from 0.
        history: Segments ``(global_batch, slots, phases, steps)`` done in this epoch, oldest first. If the last one has this geometry,
            its order goes on unchanged. Otherwise what no step has delivered is laid out anew, and ``rules.last`` judges the rest anew.
        sequence: (samples,) int64 ids that the epoch consists of, from ``mixture``; by default every sample once.

    Returns:
        The steps still to do.

    Raises:
        ValueError: An argument is out of range, or the history has more steps than the epoch.

    >>> epoch_order([3, 3, 2], Geometry(2, phases=1), Rules(shuffle_shards=0)).ids.reshape(-1, 2).tolist()
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    >>> epoch_order([3, 3, 2], Geometry(2, phases=1), history=[(2, 1, 1, 3)]).steps
    1
    """
    sizes, epoch = check_counts("sizes", sizes), check_whole("epoch", epoch, 0, 2**32 - 1)
    sequence = (
        _passes(sizes, rules, 0, epoch, epoch + 1)
        if sequence is None
        else check_counts("sequence", sequence)
    )
    if not len(sequence) or sequence.max() >= sizes.sum():
        raise ValueError(
            f"expected a sequence of ids below {sizes.sum()}, got {len(sequence)} samples"
        )
    segments: list[list[int]] = []
    for segment in history:
        if len(segment) != 4:
            raise ValueError(
                f"expected segments (global_batch, slots, phases, steps), got {segment!r}"
            )
        segments = advance(segments, Geometry(*segment[:3]), segment[3])
    segments = advance(segments, geometry, 0)
    if rules.last == "drop" and len(sequence) < segments[0][0]:
        raise ValueError(
            f"expected at least one global batch of {segments[0][0]} samples, got {len(sequence)}"
        )
    for stage, (*numbers, steps) in enumerate(segments):
        cut = Geometry(*numbers)
        entries = _lay_out(shards_of(sequence, sizes), cut, rules, (epoch, stage))
        done = steps * cut.global_batch
        if done >= len(entries) + cut.global_batch:
            raise ValueError(
                f"expected at most {Order(entries, cut).steps} steps of {cut}, got {steps}"
            )
        if stage < len(segments) - 1:
            todo = np.ones(len(sequence), bool)
            todo[entries[:done]] = False
            sequence = sequence[todo]
    return Order(sequence[entries[done:]], geometry)


def advance(history: Iterable[Segment], geometry: Geometry, steps: int) -> list[list[int]]:
    """The history with some more steps done; plain integers for JSON, neighbouring segments of one geometry joined.

    >>> advance([[8, 2, 4, 10]], Geometry(8, 2), 5)
    [[8, 2, 4, 15]]
    """
    segments = [[int(value) for value in segment] for segment in history]
    now = [*map(int, dataclasses.astuple(geometry)), check_whole("steps", steps, 0)]
    if segments and segments[-1][:3] == now[:3]:
        now[3] += segments.pop()[3]
    return [*segments, now]


def mixture(
    sizes: Sequence[Sequence[int] | Ints],
    weights: Sequence[float],
    samples: int,
    rules: Rules = Rules(),
    *,
    epoch: int = 0,
) -> Ints:
    """Draw one epoch from several datasets; pass it to ``epoch_order`` as ``sequence``, with the concatenated sizes.

    Dataset d gives exactly n_d samples (``samples`` shared out by weight, largest remainders first) from an endless row of seeded
    passes, each of which has every sample of d once. Epoch k continues where epoch k - 1 stopped, as long as weights and ``samples``
    stay the same, so a sample comes twice in an epoch only if a new pass begins in it.

    Args:
        sizes: Per dataset, (shards,) samples per shard.
        weights: Per dataset, its share of the epoch; any scale.
        samples: Samples per epoch.
        rules: Seed, and whether to shuffle.
        epoch: Counts from 0.

    Returns:
        (samples,) int64 ids over the concatenation of the datasets, spread so that every stretch has about the right shares.

    >>> mixture([[4], [2, 2]], [1, 1], 4, Rules(shuffle_shards=0)).tolist()
    [0, 1, 4, 5]
    """
    each = [check_counts("sizes", one) for one in sizes]
    shares = _share_out(weights, check_whole("samples", samples, 1))
    if len(each) != len(shares):
        raise ValueError(f"expected as many weights as datasets, got {len(shares)} and {len(each)}")
    epoch = check_whole("epoch", epoch, 0, 2**32 - 1)
    runs: list[Ints] = []
    keys = []
    base = 0
    for dataset, (one, share) in enumerate(zip(each, shares, strict=True)):
        total = int(one.sum())
        if share and not total:
            raise ValueError(f"expected samples in dataset {dataset}, got none")
        if share:
            begin = epoch * share
            ids = _passes(one, rules, dataset, begin // total, -(-(begin + share) // total))[
                begin % total :
            ][:share]
            start = np.flatnonzero(run_begins(shards_of(ids, one)))
            jitter = (
                (_draws(len(start), rules.seed, _MERGE, dataset, epoch) >> 11) * 2.0**-53
                if rules.shuffle_shards
                else 0.5
            )
            # Where in [0, 1) of the epoch each shard's run belongs; one dataset's runs keep their order.
            keys.append((start + jitter * np.diff(start, append=share)) / share)
            runs.extend(np.split(ids + base, start[1:]))
        base += total
    order = np.argsort(np.concatenate(keys), kind="stable")
    return np.concatenate([runs[run] for run in order])


def worker_batches(
    order: Order, world: int = 1, rank: int = 0, workers: int = 1, worker: int = 0
) -> list[Ints]:
    """The batches that one worker of one rank makes, in order.

    Args:
        order: The steps to do; worker w makes its rows w, w + workers, and so on.
        world: Number of ranks; divides the global batch.
        rank: In [0, world); it takes columns [rank, rank + 1) * global_batch / world of a row.
        workers: Number of DataLoader workers.
        worker: In [0, workers).

    Returns:
        Views of (global_batch / world,) int64 ids. A short last row is spread evenly; a rank that gets none of it has a batch fewer.
    """
    check_whole("rank", rank, 0, check_whole("world", world, 1) - 1)
    check_whole("worker", worker, 0, check_whole("workers", workers, 1) - 1)
    if order.geometry.global_batch % world:
        raise ValueError(
            f"expected world to divide global_batch={order.geometry.global_batch}, got {world}"
        )
    rows = (order.step(index) for index in range(worker, order.steps, workers))
    batches = (row[rank * len(row) // world : (rank + 1) * len(row) // world] for row in rows)
    return [batch for batch in batches if len(batch)]


def _lay_out(shards: Ints, geometry: Geometry, rules: Rules, key: tuple[int, int]) -> Ints:
    """Row after row, which entry of the sequence stands there; ``shards`` (samples,) is the shard of each entry."""
    size, slots, phases = geometry.global_batch, geometry.slots, geometry.phases
    rest = len(shards) % size
    total = len(shards) + {"drop": -rest, "pad": -len(shards) % size, "short": 0}[rules.last]
    entries = np.arange(total) % max(len(shards), 1)
    steps, rest = divmod(total, size)
    # (slots, phases): samples in each lane; the short step, if any, belongs to one phase and is spread over the slots.
    counts = np.tile(
        (steps - np.arange(phases) + phases - 1) // phases * (size // slots), (slots, 1)
    )
    edges = np.arange(slots + 1) * rest // slots
    counts[:, steps % phases] += np.diff(edges)
    if rules.shuffle_shards and total:
        entries = _mix(entries, shards, counts.ravel(), rules, key)
    rows = np.empty_like(entries)
    grid = rows[: steps * size].reshape(steps, slots, size // slots)
    for lane, part in enumerate(np.split(entries, counts.cumsum()[:-1])):
        slot, phase = divmod(lane, phases)
        target = grid[phase::phases, slot]
        target[...] = part[: target.size].reshape(target.shape)
        if phase == steps % phases:
            rows[steps * size :][edges[slot] : edges[slot + 1]] = part[target.size :]
    return rows


def _mix(entries: Ints, shards: Ints, counts: Ints, rules: Rules, key: tuple[int, int]) -> Ints:
    """Shuffle each lane's entries by a window that slides over its pieces (runs of one shard).

    Piece i of a lane of n pieces spreads its samples evenly over the times [i + 1/2 - w/2, i + 1/2 + w/2), reflected at 0 and n. So
    at any time at most w pieces are open, and the first and last batches are mixed from w/2 and more, where a plain window would
    begin and end with one. Every other lane runs backwards: the two parts of a split shard are then needed at the same end of the
    epoch, and a worker or rank that has both lanes reads it once.
    """
    counts = counts[counts > 0]
    begins = run_begins(shards[entries])
    begins[counts.cumsum()[:-1]] = True
    piece = begins.cumsum() - 1
    first = piece[counts.cumsum() - counts]
    length = np.diff(first, append=piece[-1] + 1)
    lane = np.repeat(np.arange(len(counts)), length)
    place = np.arange(len(lane)) - first[lane]
    place = np.where(lane % 2, length[lane] - 1 - place, place)
    # From width 2n on, the reflected window is uniform over the whole lane. Times are integers in units of 2**-32 piece.
    width = np.minimum(length[lane] * 2, rules.shuffle_shards)
    time = (_draws(len(entries), rules.seed, _WINDOWS, *key) >> np.uint64(32)).astype(np.int64)
    time *= width[piece]
    time += ((2 * place + 1 - width) << 31)[piece]
    period = (length[lane] << 33)[piece]
    time %= period
    period -= time + 1
    np.minimum(time, period, out=time)
    del period
    time += (first[lane] << 32)[piece]  # lanes stay apart
    return entries[np.argsort(time, kind="stable")]


def _passes(sizes: Ints, rules: Rules, dataset: int, first: int, stop: int) -> Ints:
    """((stop - first) * samples,) ids: passes [first, stop) of the endless row of shuffled passes over a dataset."""
    passes, samples = stop - first, int(sizes.sum())
    if not rules.shuffle_shards:
        return np.tile(np.arange(samples), passes)
    draws = _draws(
        passes * len(sizes), rules.seed, _SHARDS, dataset, 0, first * len(sizes)
    ).reshape(passes, -1)
    rank = np.argsort(np.argsort(draws, axis=1, kind="stable"), axis=1, kind="stable")
    rank += np.arange(passes)[:, None] * len(sizes)
    key = np.repeat(rank.ravel(), np.tile(sizes, passes)).astype(np.uint64) << np.uint64(32)
    key |= _draws(passes * samples, rules.seed, _ROWS, dataset, 0, first * samples) >> np.uint64(32)
    order = np.argsort(key, kind="stable")
    order %= samples
    return order


def _draws(
    count: int, seed: int, purpose: int, major: int, minor: int, start: int = 0
) -> npt.NDArray[np.uint64]:
    """(count,) uint64: values [start, start + count) of the stream that the key names; a counter gives four values."""
    stream = np.random.Philox(
        key=int(seed) | purpose << 64, counter=start // 4 | minor << 64 | major << 128
    )
    return stream.random_raw(start % 4 + count)[start % 4 :]


def _share_out(weights: Sequence[float], total: int) -> list[int]:
    """Whole shares of ``total`` by weight: rounded down, then one more for the largest remainders."""
    exact = np.asarray(weights, np.float64)
    if exact.ndim != 1 or not (np.isfinite(exact).all() and (exact >= 0).all() and exact.sum() > 0):
        raise ValueError(f"expected weights of at least 0 with a positive sum, got {weights!r}")
    exact = exact / exact.sum() * total
    shares = np.floor(exact).astype(np.int64)
    shares[np.argsort(shares - exact, kind="stable")[: total - shares.sum()]] += 1
    return [int(share) for share in shares]
