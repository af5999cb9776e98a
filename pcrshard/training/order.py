"""Assign samples to ranks and workers, in order: pure functions of numbers.

An epoch is laid out in three steps:

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

Nothing is laid out in memory: where a lane begins is arithmetic, and its window is mixed as it
slides. So memory grows with the number of shards, and any step of an epoch is found at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from ..arguments import Positive, check_fields
from .sequence import (
    WINDOWS,
    Counts,
    Dataset,
    Ints,
    Key,
    Rules,
    Samples,
    one_pass,
    random_words,
)

Segment = Sequence[int]
Interval = tuple[int, int]
# Moves samples between the steps of each slot: see :class:`Buckets`.
Regroup = Callable[["StepPlan"], "StepPlan"]
# Entries of a lane to mix at a time; whole pieces.
_CHUNK = 1024


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


class EpochOrder:
    """The remaining steps of an epoch.

    Args:
        sizes: (shards,) samples per shard. A sample's id is its shard's first id plus its row.
        geometry: Geometry of the remaining steps.
        rules: Seed, window and last batch; the same in every segment of an epoch.
        epoch: Number of the epoch, from 0.
        history: Segments ``(global_batch, max_world_size, lanes_per_rank, steps)`` done in this
            epoch, oldest first. If the last one has this geometry, its order continues unchanged.
            Otherwise the samples not yet delivered are laid out again, and ``rules.last`` applies
            to them again.
        samples: The samples of the epoch, from ``mixture``; by default every sample once.
        regroup: Moves samples between steps; see :class:`Buckets`.

    Raises:
        ValueError: An argument is out of range, or the history has more steps than the epoch.

    >>> order = EpochOrder([3, 3, 2], Geometry(2, lanes_per_rank=1), Rules(shuffle_shards=0))
    >>> [ids.tolist() for ids in order.batches()]
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    >>> EpochOrder([3, 3, 2], Geometry(2, lanes_per_rank=1), history=[(2, 1, 1, 3)]).steps
    1
    """

    def __init__(
        self,
        sizes: Counts,
        geometry: Geometry,
        rules: Rules = Rules(),
        *,
        epoch: int = 0,
        history: Iterable[Segment] = (),
        samples: Samples | None = None,
        regroup: Regroup | None = None,
    ) -> None:
        self.geometry = geometry
        left = one_pass(Dataset(sizes, rules), epoch) if samples is None else samples
        stages = advance(history, geometry, 0)
        for stage, (*numbers, done) in enumerate(stages):
            cut = Geometry(*numbers)
            plan = StepPlan(left, cut, rules, (epoch, stage))
            if not stage and not plan.steps:
                raise ValueError(
                    f"expected at least one global batch of {cut.global_batch} samples, "
                    f"got {len(left)}"
                )
            if regroup is not None and plan.steps:
                plan = regroup(plan)
            if done > plan.steps:
                raise ValueError(f"expected at most {plan.steps} steps of {cut}, got {done}")
            if stage < len(stages) - 1:
                left = plan.rest(done)
        self._plan = plan
        self._first = int(done)

    @property
    def steps(self) -> int:
        """Number of remaining steps."""
        return self._plan.steps - self._first

    def num_batches(self, rank: int = 0, world: int = 1) -> int:
        """Return the number of batches of one rank; see :meth:`batches`."""
        plan = self._plan
        # The last few may be so short that this rank has nothing of them.
        last = max(self._first, plan.full_steps)
        bounds = (plan.columns(step, rank, world) for step in range(last, plan.steps))
        return last - self._first + sum(start < stop for start, stop in bounds)

    def batches(
        self, rank: int = 0, world: int = 1, *, worker: int = 0, workers: int = 1
    ) -> Iterator[Ints]:
        """Yield the remaining batches of one rank, or those of one of its workers, in order.

        Args:
            rank: In [0, world); takes the columns [rank, rank + 1) * global_batch / world of a row.
            world: Number of ranks; divides the global batch.
            worker: Yields the batches ``[worker::workers]``.
            workers: Number of workers.

        Yields: (global_batch / world,) int64 ids; fewer in the last one or two of
            ``last="short"``. Only if an epoch has fewer samples than ranks, a rank without any of
            them has one fewer batch; if as few are left when the geometry changes, some are
            repeated.
        """
        Geometry(self.geometry.global_batch, world)  # raises
        first, steps = self._first + worker, self._plan.steps
        for batch in self._plan.batches(range(first, steps, workers), rank, world):
            if batch.size:
                yield batch[1]


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


class StepPlan:
    """The steps of an epoch, or of what was left of it when the geometry changed.

    A position is that of a sample in the sequence; with ``last="pad"`` positions go on behind the
    end, from where the sequence repeats. Batches are (2, n) int64: positions and ids.

    Args:
        samples: The sequence.
        geometry: How rows are divided.
        rules: Seed, window and last batch.
        key: Epoch and stage, which seed the random numbers.

    Attributes:
        steps: Number of steps.
        full_steps: Number of steps of ``global_batch`` samples, before the shorter ones.
    """

    def __init__(self, samples: Samples, geometry: Geometry, rules: Rules, key: Key) -> None:
        self.samples, self.geometry, self.rules, self.key = samples, geometry, rules, key
        size, slots = geometry.global_batch, geometry.max_world_size
        self._slots, self._turns = slots, geometry.lanes_per_rank
        self._columns = size // slots
        self.full_steps, rest = divmod(len(samples), size)
        last: list[int] = []
        if rest and rules.last == "pad":
            self.full_steps += 1
        elif rest and rules.last == "short":
            last = [rest]
            if rest < slots and not self.full_steps and key[1]:
                # A job that was resumed on more ranks than samples are left: some are repeated, so
                # that no rank waits for another.
                last = [slots]
            elif rest < slots and self.full_steps:
                # Each rank gets something of every step, so that none waits for another.
                self.full_steps -= 1
                borrowed = slots - rest
                last = [size - borrowed, slots] if size >= 2 * slots else [size + rest]
        self._last = last
        self.steps = self.full_steps + len(last)

    def _length(self, step: int) -> int:
        """Return the number of samples of a step over all ranks."""
        late = step - self.full_steps
        return self._last[late] if late >= 0 else self.geometry.global_batch

    def columns(self, step: int, rank: int, world: int) -> tuple[int, int]:
        """Return the columns of a rank in the row of a step."""
        return _part(self._length(step), rank, world)

    def batches(self, steps: range, rank: int, world: int) -> Iterator[Ints]:
        """Yield a rank's batch of some steps, ascending; it may be empty."""
        lanes: dict[tuple[int, int], _Feed] = {}
        for step in steps:
            turn = step % self._turns
            start, stop = self.columns(step, rank, world)
            length = self._length(step)
            found = []
            # Some slots may have no column.
            low = start * self._slots // length
            for slot in range(low, self._slots):
                left, right = _part(length, slot, self._slots)
                if left >= stop:
                    break
                if right <= start:
                    continue
                feed = lanes.get((slot, turn))
                if feed is None:
                    feed = lanes[slot, turn] = _Feed(self._lane(slot, turn), self.samples)
                begin = self._before(slot, turn, step) + max(start - left, 0)
                found.append(feed.take(begin, min(right, stop) - max(left, start)))
            yield np.concatenate(found, axis=1) if found else np.zeros((2, 0), np.int64)

    def _before(self, slot: int, turn: int, step: int) -> int:
        """Return the entries of a lane that are due before a step."""
        full = min(step, self.full_steps)
        entries = len(range(turn, full, self._turns)) * self._columns
        for late in range(self.full_steps, min(step, self.steps)):
            if late % self._turns == turn:
                start, stop = _part(self._length(late), slot, self._slots)
                entries += stop - start
        return entries

    def _lane(self, slot: int, turn: int) -> _Lane:
        slots, turns = self._slots, self._turns
        # Everything before: whole slots, then the turns of this one.
        start = slot * self.full_steps * self._columns
        start += sum(length * slot // slots for length in self._last)
        rounds, more = divmod(self.full_steps, turns)
        start += (rounds * turn + min(more, turn)) * self._columns
        number = slot * min(self.steps, turns) + turn
        for late, length in enumerate(self._last, self.full_steps):
            low, high = _part(length, slot, slots)
            if late % turns < turn:
                start += high - low
            if length < slots:  # the only step, of which some slots have nothing
                number = low
        stop = start + self._before(slot, turn, self.steps)
        return _Lane(self, number, start, stop)

    def rest(self, steps: int) -> Samples:
        """Return what is left of the sequence after some steps."""
        return self.samples.select(self._left(steps))

    def _left(self, steps: int) -> Iterator[Interval | Ints]:
        """Yield the positions that some steps leave, ascending: intervals and arrays."""
        end = len(self.samples)
        left: list[Interval | Ints] = []
        repeated = [np.zeros(0, np.int64)]
        for slot, turn in itertools.product(
            range(self._slots), range(min(self._turns, self.steps))
        ):
            lane = self._lane(slot, turn)
            for each in lane.left(self._before(slot, turn, steps)):
                if isinstance(each, tuple):
                    left.append((each[0], min(each[1], end)))
                else:
                    left.append(each[each < end])
            if lane.stop > end:
                repeated.append(lane.taken(self._before(slot, turn, steps)))
        unused = min(end, self.full_steps * self.geometry.global_batch + sum(self._last))
        left.append((unused, end))
        again = np.concatenate(repeated)
        return without(left, again[again >= end] % end)


def _part(length: int, part: int, parts: int) -> tuple[int, int]:
    """Return the columns of one of several equal parts of a row."""
    return length * part // parts, length * (part + 1) // parts


def without(chosen: Iterable[Interval | Ints], removed: Ints) -> Iterator[Interval | Ints]:
    """Yield some positions, intervals and arrays, without those removed and without empty ones."""
    low, high = (int(removed.min()), int(removed.max()) + 1) if len(removed) else (0, 0)
    for each in chosen:
        parts: list[Interval | Ints] = [each]
        if isinstance(each, tuple):
            start, stop = each
            inside = max(start, low), min(stop, high)
            if inside[0] < inside[1]:
                parts = [(start, inside[0]), np.arange(*inside), (inside[1], stop)]
        for part in parts:
            if isinstance(part, tuple):
                if part[0] < part[1]:
                    yield part
            elif len(kept := part[~np.isin(part, removed)]):
                yield kept


class _Lane:
    """The entries of a lane in their mixed order.

    Piece i of a lane of n pieces (runs of one shard) spreads its samples evenly over the times
    [i + 1/2 - w/2, i + 1/2 + w/2), reflected at 0 and n. So at most w pieces are open at any time,
    and the first and last batches mix at least w/2 pieces, where a plain window would begin and end
    with one. Every other lane runs backwards: the two parts of a split shard are then needed at the
    same end of the epoch, and a worker or rank with both lanes reads it once.

    Args:
        plan: The steps.
        number: Number of the lane, of those that are not empty.
        start: First position.
        stop: Last position + 1.
    """

    def __init__(self, plan: StepPlan, number: int, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self._rules, self._key = plan.rules, plan.key
        samples = plan.samples
        end = len(samples)
        edges = [np.array([start])]
        for turn in range(start // end, -(-stop // end)):
            # Where the sequence begins again, it may go on with the same shard.
            low = max(start + 1 - turn * end, int(turn > 0 and samples.is_closed))
            inside = slice(*np.searchsorted(samples.runs, [low, stop - turn * end]))
            edges.append(samples.runs[inside] + turn * end)
        self._edges = np.concatenate([*edges, np.array([stop])])
        self._pieces = len(self._edges) - 1
        self._is_backward = number % 2 == 1
        # At width 2n or more, the reflected window is uniform over the whole lane.
        self._width = min(2 * self._pieces, self._rules.shuffle_shards)
        counts = np.diff(self._edges)
        self._ends = np.append(0, (counts[::-1] if self._is_backward else counts).cumsum())

    def _times(self, first: int, last: int) -> tuple[Ints, Ints]:
        """Return the positions of the pieces at some places of the order, and their times.

        Times are in units of 2**-32 piece.
        """
        low, high = first, last
        if self._is_backward:
            low, high = self._pieces - last, self._pieces - first
        start, stop = self._edges[[low, high]].tolist()
        pieces = np.repeat(np.arange(low, high), np.diff(self._edges[low : high + 1]))
        places = self._pieces - 1 - pieces if self._is_backward else pieces
        period = self._pieces << 33
        draws = random_words(stop - start, self._rules, WINDOWS, self._key, start) >> np.uint64(32)
        times = draws.astype(np.int64) * self._width + ((2 * places + 1 - self._width) << 31)
        times %= period
        return np.arange(start, stop), np.minimum(times, period - 1 - times)

    def _around(self, done: int) -> tuple[int, int]:
        """Return places such that the entries after the first ``done`` begin between them."""
        place = int(np.searchsorted(self._ends, done, side="right")) - 1
        return max(0, place - self._width - 2), min(self._pieces, place + self._width + 3)

    def mixed(self, skip: int) -> Iterator[Ints]:
        """Yield the positions in mixed order, from the ``skip``-th on."""
        if not self._width:
            for start in range(self.start + skip, self.stop, _CHUNK):
                yield np.arange(start, min(start + _CHUNK, self.stop))
            return
        place, _ = self._around(skip)
        skip -= int(self._ends[place])
        positions = times = np.zeros(0, np.int64)
        while place < self._pieces:
            enough = int(np.searchsorted(self._ends, self._ends[place] + _CHUNK))
            last = min(max(enough, place + 1), self._pieces)
            # In the order of positions, so that equal times keep it.
            new = self._times(place, last)
            pairs = zip((positions, times), new, strict=True)
            positions, times = (
                np.concatenate(pair[::-1] if self._is_backward else pair) for pair in pairs
            )
            place = last
            if place < self._pieces:
                is_due = times < (2 * place + 1 - self._width) << 31  # no later piece is earlier
            else:
                is_due = np.ones(len(times), bool)
            found = positions[is_due][times[is_due].argsort(kind="stable")]
            positions, times = positions[~is_due], times[~is_due]
            if len(found) > skip:
                yield found[skip:]
            skip = max(skip - len(found), 0)

    def left(self, done: int) -> list[Interval | Ints]:
        """Return the positions after the first ``done``, ascending: intervals and arrays."""
        if done == 0 or not self._width:
            return [(self.start + done, self.stop)]
        if done == self.stop - self.start:
            return []
        first, last = self._around(done)
        positions, times = self._times(first, last)
        behind = np.sort(times.argsort(kind="stable")[done - self._ends[first] :])
        if self._is_backward:
            return [(self.start, int(self._edges[self._pieces - last])), positions[behind]]
        return [positions[behind], (int(self._edges[last]), self.stop)]

    def taken(self, done: int) -> Ints:
        """Return the first ``done`` positions, ascending."""
        every = np.arange(self.start, self.stop)
        left = [np.arange(*each) if isinstance(each, tuple) else each for each in self.left(done)]
        return every[~np.isin(every, np.concatenate([*left, every[:0]]))]


class _Feed:
    """The entries of a lane, taken in order."""

    def __init__(self, lane: _Lane, samples: Samples) -> None:
        self._lane, self._samples = lane, samples
        self._source: Iterator[Ints] | None = None
        self._next = 0
        self._ready = np.zeros((2, 0), np.int64)
        self._held: dict[int, Ints] = {}

    def take(self, begin: int, count: int) -> Ints:
        """Return (2, count) positions and ids of some entries, after those taken before."""
        if self._source is None:
            self._source = self._lane.mixed(begin)
            self._next = begin
        needed = begin - self._next + count
        while self._ready.shape[1] < needed:
            positions = next(self._source)
            ids = self._samples.ids(positions % len(self._samples), self._held)
            self._ready = np.concatenate([self._ready, [positions, ids]], axis=1)
        taken, self._ready = self._ready[:, needed - count : needed], self._ready[:, needed:]
        self._next = begin + count
        return taken
