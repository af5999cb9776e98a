"""Assign samples to ranks and workers, in order: pure functions of numbers.

A sample's id is its shard's first id plus its row in the shard; ``sizes`` holds the number of
samples of each shard. An epoch is laid out in three steps, the first in ``epoch_sequence``:

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
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import Positive, check_fields
from .epoch_sequence import (
    WINDOWS,
    Counts,
    Ints,
    Rules,
    random_words,
    run_begins,
    shards_of,
    shuffled_passes,
)

Segment = Sequence[int]
# Called with the (samples,) ids of a layout, its cuts, its geometry and its (epoch, stage); returns
# a permutation of the ids and new cuts.
Regroup = Callable[[Ints, Ints, "Geometry", tuple[int, int]], tuple[Ints, Ints]]


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


def even_cuts(samples: int, size: int, parts: int) -> Ints:
    """Return where each part of each step of ``size`` samples begins, then ``samples``.

    A short last step is divided evenly, too.
    """
    starts = np.arange(0, samples, size)
    lengths = np.minimum(size, samples - starts)
    return np.append(starts[:, None] + lengths[:, None] * np.arange(parts) // parts, samples)


def epoch_order(
    sizes: Counts,
    geometry: Geometry,
    rules: Rules = Rules(),
    *,
    epoch: int = 0,
    history: Iterable[Segment] = (),
    sequence: Ints | None = None,
    regroup: Regroup | None = None,
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
        regroup: Function that moves samples between steps; see :class:`Buckets`.

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
    left = shuffled_passes(sizes, rules, 0, epoch, epoch + 1) if sequence is None else sequence
    for stage, (*numbers, steps) in enumerate(advance(history, geometry, 0)):
        cut = Geometry(*numbers)
        entries = _lay_out(shards_of(left, sizes), cut, rules, (epoch, stage))
        cuts = even_cuts(len(entries), cut.global_batch, cut.max_world_size)
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
        if done:
            left = np.delete(left, entries[:done])
    return Order(order.ids[done:], geometry, cuts[steps * geometry.max_world_size :] - done)


def advance(
    history: Iterable[Segment],
    geometry: Geometry,
    steps: int,
) -> list[list[int]]:
    """Append completed steps to the history, as plain integers; merge equal neighbors.

    >>> advance([[8, 2, 4, 10]], Geometry(8, 2), 5)
    [[8, 2, 4, 15]]
    """
    segments: list[list[int]] = []
    for segment in [*history, (*astuple(geometry), steps)]:
        *cut, done = map(int, segment)
        if not segments or segments[-1][:3] != cut:
            segments.append([*cut, 0])
        segments[-1][3] += done
    return segments


def rank_batches(order: Order, world: int = 1, rank: int = 0) -> list[Ints]:
    """Return the batches of one rank, in order; DataLoader worker w of W makes ``[w::W]`` of them.

    Args:
        order: The remaining steps.
        world: Number of ranks; divides the global batch.
        rank: In [0, world); takes the columns [rank, rank + 1) * global_batch / world of a row.

    Returns: Views of (global_batch / world,) int64 ids. A short last row is spread evenly; a rank
        without any of it has one fewer batch.
    """
    size = order.geometry.global_batch
    if size % world:
        raise ValueError(f"expected world to divide global_batch={size}, got {world}")
    cuts = order.cuts
    if world != order.geometry.max_world_size:
        cuts = even_cuts(len(order.ids), size, world)
    starts = cuts[:-1][rank::world].tolist()
    stops = cuts[1:][rank::world].tolist()
    pairs = zip(starts, stops, strict=True)
    return [order.ids[start:stop] for start, stop in pairs if start < stop]


def _lay_out(
    shards: Ints,
    geometry: Geometry,
    rules: Rules,
    key: tuple[int, int],
) -> Ints:
    """Return the entry of the sequence at each position, row by row.

    Args:
        shards: (samples,) shard of each entry of the sequence.
        geometry: How rows are divided.
        rules: Seed, window and last batch.
        key: Epoch and stage, which seed the random numbers.
    """
    samples = len(shards)
    size = geometry.global_batch
    fill = {
        "drop": -(samples % size),
        "pad": -samples % size,
        "short": 0,
    }
    entries = np.arange(samples + fill[rules.last]) % max(samples, 1)
    lanes = _lanes(len(entries), geometry)
    if rules.shuffle_shards and len(entries):
        # Not bincount, which allocates for every lane; there may be more lanes than samples.
        counts = np.unique(lanes, return_counts=True)[1]
        entries = _mix(entries, shards, counts, rules, key)

    rows = np.empty_like(entries)
    rows[lanes.argsort(kind="stable")] = entries
    return rows


def _lanes(total: int, geometry: Geometry) -> NDArray[Any]:
    """Return the (total,) lane of each position; lanes are numbered by slot, then by turn.

    A short last row is spread evenly over the slots.
    """
    slots = geometry.max_world_size
    turns = geometry.lanes_per_rank
    steps, rest = divmod(total, geometry.global_batch)

    def lanes_of_row(length: int) -> Ints:
        return ((np.arange(length) + 1) * slots - 1) // max(length, 1) * turns

    full = np.add.outer(np.arange(steps) % turns, lanes_of_row(geometry.global_batch))
    lanes = np.append(full, lanes_of_row(rest) + steps % turns)
    # NumPy sorts 16 bits by counting, several times faster than 64.
    return lanes.astype(np.min_scalar_type(slots * turns))


def _mix(
    entries: Ints,
    shards: Ints,
    counts: Ints,
    rules: Rules,
    key: tuple[int, int],
) -> Ints:
    """Shuffle each lane with a window that slides over its pieces (runs of one shard).

    ``counts`` (lanes,) is the number of entries of each nonempty lane.
    """
    stops = counts.cumsum()
    begins = run_begins(shards[entries])
    begins[stops[:-1]] = True
    piece = begins.cumsum() - 1
    pieces = np.add.reduceat(begins, stops - counts, dtype=np.int64)

    width, start, period, lane = _windows(pieces, rules.shuffle_shards)
    draws = random_words(len(entries), rules, WINDOWS, key) >> np.uint64(32)
    time = (draws.astype(np.int64) * width[piece] + start[piece]) % period[piece]
    time = np.minimum(time, period[piece] - 1 - time) + lane[piece]
    return entries[np.argsort(time, kind="stable")]


def _windows(pieces: Ints, shuffle_shards: int) -> tuple[Ints, ...]:
    """Return when each piece spreads its samples; ``pieces`` (lanes,) is the number per lane.

    Four (pieces,) int64 arrays, with times in units of 2**-32 piece: the width of a piece's window
    in whole pieces, its start, the period after which a reflected lane repeats, and the start of
    the lane, which separates lanes.

    Piece i of a lane of n pieces spreads its samples evenly over the times [i + 1/2 - w/2, i + 1/2
    + w/2), reflected at 0 and n. So at most w pieces are open at any time, and the first and last
    batches mix at least w/2 pieces, where a plain window would begin and end with one. Every other
    lane runs backwards: the two parts of a split shard are then needed at the same end of the
    epoch, and a worker or rank with both lanes reads it once.
    """
    lane = np.repeat(np.arange(len(pieces)), pieces)
    first = (pieces.cumsum() - pieces)[lane]
    length = pieces[lane]
    place = np.arange(len(lane)) - first
    place = np.where(lane % 2, length - 1 - place, place)
    # At width 2n or more, the reflected window is uniform over the whole lane.
    width = np.minimum(length * 2, shuffle_shards)
    return width, (2 * place + 1 - width) << 31, length << 33, first << 32
