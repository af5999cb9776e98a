"""Many samples in little memory: columns instead of objects, which are made when they are read."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from .samples import FieldRef, SampleRef, distinct_keys

T = TypeVar("T")
Known = tuple[tuple[str, bytes], ...]


class Texts:
    """Strings, one after the other in one block of memory."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._stops = array("Q", [0])

    def append(self, text: str) -> None:
        """Add a string, which may be a file name that is not UTF-8."""
        self._bytes += text.encode("utf-8", "surrogatepass")
        self._stops.append(len(self._bytes))

    def __len__(self) -> int:
        return len(self._stops) - 1

    def __getitem__(self, place: int) -> str:
        start, stop = self._stops[place], self._stops[place + 1]
        return self._bytes[start:stop].decode("utf-8", "surrogatepass")


class Files(Protocol):
    """The files that samples are in."""

    def file(self, number: int) -> tuple[str, str]:
        """Return the URL and the version of a file."""


class NamedFiles(NamedTuple):
    """Files whose URLs have nothing in common."""

    files: list[tuple[str, str]]

    def file(self, number: int) -> tuple[str, str]:
        """Return the URL and the version of a file."""
        return self.files[number]


class SampleTable(Sequence[SampleRef]):
    """Samples in columns.

    Attributes:
        fields: The names of the fields to read, in order of first appearance.
    """

    def __init__(self, files: Files, fields: Sequence[str] = ()) -> None:
        self._files = files
        self.fields = list(fields)
        self._keys = Texts()
        self._stops = array("Q", [0])
        # Of each field of each sample, in order.
        self._names = array("H")
        self._numbers = array("I")
        self._ranges = array("q")
        # Samples of a class know the same.
        self._known: list[Known] = []
        self._known_numbers = array("I")
        self._number_of: dict[Known, int] = {}

    def append(
        self, key: str, refs: Iterable[tuple[int, int, int, int | None]], known: Known = ()
    ) -> None:
        """Add a sample; its fields as (number of the name, of the file, start, stop)."""
        self._keys.append(key)
        for name, file, start, stop in refs:
            self._names.append(name)
            self._numbers.append(file)
            self._ranges.append(start)
            self._ranges.append(-1 if stop is None else stop)
        self._stops.append(len(self._names))
        number = self._number_of.setdefault(known, len(self._known))
        if number == len(self._known):
            self._known.append(known)
        self._known_numbers.append(number)

    @classmethod
    def of(cls, samples: Iterable[SampleRef]) -> SampleTable:
        """Return a table of samples."""
        files: dict[tuple[str, str], int] = {}
        fields: dict[str, int] = {}
        urls: list[tuple[str, str]] = []
        table = cls(NamedFiles(urls))
        for key, refs, known in samples:
            rows = []
            for name, url, start, stop, version in refs:
                number = files.setdefault((url, version), len(urls))
                if number == len(urls):
                    urls.append((url, version))
                rows.append((fields.setdefault(name, len(fields)), number, start, stop))
            table.append(key, rows, known)
        table.fields = list(fields)
        return table

    def make_keys_distinct(self) -> None:
        """Give keys that were there before a number at their end."""
        keys = Texts()
        for key in distinct_keys(map(self._keys.__getitem__, range(len(self)))):
            keys.append(key)
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def key(self, place: int) -> str:
        """Return the key of a sample."""
        return self._keys[place]

    def name_sets(self) -> dict[tuple[str, ...], str]:
        """Return the names of fields that samples have, and the key of the first such sample."""
        known = [tuple(name for name, _ in own) for own in self._known]
        first: dict[tuple[bytes, tuple[str, ...]], int] = {}
        for place, number in enumerate(self._known_numbers):
            own = self._names[self._stops[place] : self._stops[place + 1]]
            first.setdefault((own.tobytes(), known[number]), place)
        sets: dict[tuple[str, ...], str] = {}
        for (own_bytes, others), place in first.items():
            names = [self.fields[number] for number in array("H", own_bytes)]
            sets.setdefault((*names, *others), self.key(place))
        return sets

    @overload
    def __getitem__(self, place: int) -> SampleRef: ...

    @overload
    def __getitem__(self, place: slice) -> list[SampleRef]: ...

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[row] for row in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        refs = []
        for row in range(self._stops[place], self._stops[place + 1]):
            url, version = self._files.file(self._numbers[row])
            start, stop = self._ranges[2 * row], self._ranges[2 * row + 1]
            name = self.fields[self._names[row]]
            refs.append(FieldRef(name, url, start, None if stop < 0 else stop, version))
        return SampleRef(self._keys[place], tuple(refs), self._known[self._known_numbers[place]])


class Rows(Sequence[T]):
    """Some items of a sequence, by their places: (n,) integers."""

    def __init__(self, items: Sequence[T], places: NDArray[Any]) -> None:
        self._items = items
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> T: ...

    @overload
    def __getitem__(self, place: slice) -> list[T]: ...

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self._items[row] for row in self._places[place].tolist()]
        return self._items[int(self._places[place])]

    def __iter__(self) -> Iterator[T]:
        return map(self._items.__getitem__, self._places.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows | list) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as a list

    def keys(self) -> Iterator[str]:
        """Yield the keys of samples."""
        items: Any = self._items
        if isinstance(items, SampleTable):
            return map(items.key, self._places.tolist())
        return (sample.key for sample in map(items.__getitem__, self._places.tolist()))


def keys_of(samples: Sequence[SampleRef]) -> Iterator[str]:
    """Yield the keys of samples, of a table without making the samples."""
    return Rows(samples, np.arange(len(samples))).keys()


def are_distinct_hashes(hashes: array[int]) -> bool:
    """Return whether 64-bit hashes differ, in less memory than a set takes."""
    ordered = np.sort(np.frombuffer(hashes, np.int64)) if len(hashes) else np.zeros(0)
    return not (ordered[1:] == ordered[:-1]).any()
