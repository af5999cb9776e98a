"""Sequences of samples, shard by shard, without an array of samples.

A sample's id is its shard's first id plus its row in the shard. A sequence is a list of parts, each
some samples of one shard in a seeded order, which is drawn when it is needed.

Randomness is the raw output of Philox 4x64, a counter-based generator whose values NumPy guarantees
(the values of NumPy's distributions may change), and any of whose values can be drawn alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..arguments import Natural, check_fields
from ..lazy import lazy

Ints = NDArray[np.int64]
Counts = Sequence[int] | Ints
# Numbers, such as epoch and stage, that select a stream of random numbers.
Key = tuple[int, int]
# Purposes are words of the generator's counter, so that no two uses share a random number. Changing
# them changes every order.
SHARDS, ROWS, WINDOWS, MERGE, BUCKETS, SPLIT = range(6)
_HALF = np.uint64(32)


@dataclass(frozen=True)
class Rules:
    """Rules of the order that must not change during an epoch.

    Attributes:
        seed: Integer in [0, 2**64).
        shuffle_shards: Number of shards mixed at a time in a lane; 0 keeps the order of the
            dataset. Twice a lane's number of shards or more shuffles it completely.
        last: What happens to the samples that do not fill a global batch. "drop": they are left
            out, different ones in each epoch. "pad": the sequence wraps around to its beginning.
            "short": the last step is smaller and spread evenly over the ranks; with fewer samples
            than ranks, it takes some of the step before it.
    """

    seed: Natural = 0
    shuffle_shards: Natural = 4
    last: Literal["drop", "pad", "short"] = "drop"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.seed >= 1 << 64:
            raise ValueError(f"expected seed to be below 2**64, got {self.seed}")


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


def run_begins(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a (len(values),) bool mask of the first entry of each run of equal values."""
    begins = np.ones(len(values), bool)
    begins[1:] = values[1:] != values[:-1]
    return begins


class Dataset:
    """The samples of each shard of a dataset, by itself or in a mixture.

    Args:
        sizes: (shards,) samples per shard.
        rules: Seed, and whether to shuffle.
        number: Position of the dataset in a mixture; 0 without one.
        first_id: Id of its first sample.

    Attributes:
        samples: Number of samples.
    """

    def __init__(self, sizes: Counts, rules: Rules, number: int = 0, first_id: int = 0) -> None:
        self.sizes = np.asarray(sizes, np.int64)
        self.rules = rules
        self.number = number
        self.first_id = first_id
        self._starts = self.sizes.cumsum() - self.sizes
        self.samples = int(self.sizes.sum())

    def shards(self, number: int) -> Ints:
        """Return the shards in the order of a pass, from pass 0."""
        count = len(self.sizes)
        if not self.rules.shuffle_shards:
            return np.arange(count)
        words = random_words(count, self.rules, SHARDS, (self.number, 0), number * count)
        return words.argsort(kind="stable")

    def ids(self, shard: int, number: int) -> Ints:
        """Return the ids of a shard in the order of a pass."""
        start, size = int(self._starts[shard]), int(self.sizes[shard])
        first = self.first_id + start
        if not self.rules.shuffle_shards:
            return np.arange(first, first + size)
        begin = number * self.samples + start
        words = random_words(size, self.rules, ROWS, (self.number, 0), begin) >> _HALF
        return first + words.argsort(kind="stable")


@dataclass(frozen=True, eq=False)
class Samples:
    """A sequence of samples, as parts of one shard each.

    Attributes:
        datasets: The datasets that the parts refer to.
        of: (parts,) dataset of each part.
        shards: (parts,) shard of each part, in its dataset.
        passes: (parts,) number of the pass whose order of the shard it has.
        first: (parts,) its first place in this order.
        counts: (parts,) its number of samples, not 0.
        places: By part, the places of a part that is not contiguous.
    """

    datasets: Sequence[Dataset]
    of: Ints
    shards: Ints
    passes: Ints
    first: Ints
    counts: Ints
    places: dict[int, Ints]

    @classmethod
    def join(cls, datasets: Sequence[Dataset], columns: Sequence[Ints]) -> Samples:
        """Return the sequence of contiguous parts, without the empty ones.

        Args:
            datasets: The datasets.
            columns: (parts,) each: the attributes from ``of`` to ``counts``.
        """
        held = columns[-1] > 0
        of, shards, passes, first, counts = (column[held] for column in columns)
        return cls(datasets, of, shards, passes, first, counts, {})

    @lazy
    def starts(self) -> Ints:
        """(parts + 1,) start of each part in the sequence, then the number of samples."""
        return np.append(0, self.counts.cumsum())

    @lazy
    def runs(self) -> Ints:
        """Start of each run of one shard in the sequence."""
        return self.starts[:-1][run_begins(self.of) | run_begins(self.shards)]

    @property
    def is_closed(self) -> bool:
        """Whether the sequence begins with the shard with which it ends."""
        ends = [(int(self.of[part]), int(self.shards[part])) for part in (0, -1)]
        return ends[0] == ends[1]

    def __len__(self) -> int:
        return int(self.starts[-1])

    def ids(self, positions: Ints, held: dict[int, Ints] | None = None) -> Ints:
        """Return the ids at (n,) positions in the sequence.

        Args:
            positions: The positions.
            held: The ids of the parts that the last call used, which this call replaces.
        """
        held = {} if held is None else held
        known = dict(held)
        held.clear()
        parts = self.parts(positions)
        order = parts.argsort(kind="stable")
        ids = np.empty(len(positions), np.int64)
        for each in np.split(order, np.flatnonzero(np.diff(parts[order])) + 1):
            if len(each):
                part = int(parts[each[0]])
                held[part] = known[part] if part in known else self._ids_of(part)
                ids[each] = held[part][positions[each] - self.starts[part]]
        return ids

    def parts(self, positions: Ints) -> Ints:
        """Return the part of each position."""
        return np.searchsorted(self.starts, positions, side="right") - 1

    def _ids_of(self, part: int) -> Ints:
        ids = self.datasets[self.of[part]].ids(int(self.shards[part]), int(self.passes[part]))
        first = int(self.first[part])
        found: Ints = ids[self.places.get(part, slice(first, first + int(self.counts[part])))]
        return found

    @lazy
    def _scattered(self) -> Ints:
        return np.array(sorted(self.places), np.int64)

    def select(self, chosen: Iterable[Ints | tuple[int, int]]) -> Samples:
        """Return the sequence of some of these samples.

        Args:
            chosen: Positions in ascending order: arrays, and intervals (start, stop).
        """
        found: list[tuple[Ints, Ints, Ints]] = [(np.zeros(0, np.int64),) * 3]
        places: dict[int, Ints] = {}
        made = 0
        for each in chosen:
            if isinstance(each, tuple):
                start, stop = each
                low, high = self.parts(np.array([start, stop - 1])).tolist()
                parts = np.arange(low, high + 1)
                begins = np.maximum(self.starts[parts], start) - self.starts[parts]
                counts = np.minimum(self.starts[parts + 1], stop) - self.starts[parts] - begins
                inside = slice(*np.searchsorted(self._scattered, [low, high + 1]))
                for part in self._scattered[inside].tolist():
                    begin, count = int(begins[part - low]), int(counts[part - low])
                    places[made + part - low] = self.places[part][begin : begin + count]
                firsts = self.first[parts] + begins
            else:
                of_each = self.parts(each)
                begins = np.flatnonzero(run_begins(of_each))
                parts = of_each[begins]
                own = np.split(each - self.starts[of_each], begins[1:])
                for number, (part, offsets) in enumerate(zip(parts.tolist(), own, strict=False)):
                    known = self.places.get(part)
                    at = offsets + self.first[part] if known is None else known[offsets]
                    places[made + number] = at
                counts = np.diff(begins, append=len(each))
                firsts = np.zeros_like(counts)
            found.append((parts, firsts, counts))
            made += len(parts)
        parts, firsts, counts = map(np.concatenate, zip(*found, strict=True))
        columns = (self.of[parts], self.shards[parts], self.passes[parts], firsts, counts)
        return Samples(self.datasets, *columns, places)


def one_pass(dataset: Dataset, number: int) -> Samples:
    """Return a pass over a dataset, shard by shard, each shard's samples shuffled."""
    shards = dataset.shards(number)
    zeros = np.zeros_like(shards)
    return Samples.join([dataset], [zeros, shards, zeros + number, zeros, dataset.sizes[shards]])
