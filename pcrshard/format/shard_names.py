"""Names of shards in ``pcr.json``: single ones, and runs of numbered ones (SPEC 6)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import overload

from .shard_head import require

# Of a file name, or of a run such as train-{000007..000299}.tar. Other braces would be expanded as
# a pattern. Plain tars may be compressed: ``.tar.gz``, ``.tgz``.
_PART = r"[^/\\{}\x00-\x1f\x7f]"
PATTERN = (
    rf"^({_PART}{{1,255}}|{_PART}{{0,255}}\{{\d{{1,18}}\.\.\d{{1,18}}\}}{_PART}{{0,255}})"
    r"\.t[.0-9a-z]{2,8}\Z"
)
_MAX_NAME = 255
_RUN = re.compile(r"([^{]*)\{(\d+)\.\.(\d+)\}(.*)", re.DOTALL)
_NUMBERED = re.compile(r"(.*?)(\d{1,18})(\.t[.0-9a-z]{2,8})", re.DOTALL)


class NumberedNames(Sequence[str]):
    """A run of names that differ in a number; a name is made when it is asked for.

    Args:
        head: What is before the number.
        first: The first number.
        size: How many names.
        digits: Digits of the number, with leading zeros.
        end: What is behind it.
    """

    def __init__(self, head: str, first: int, size: int, digits: int, end: str) -> None:
        self.head, self.first, self.size, self.digits, self.end = head, first, size, digits, end

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...
    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        if isinstance(place, slice):
            return tuple(map(self.__getitem__, range(self.size)[place]))
        number = self.first + range(self.size)[place]
        return f"{self.head}{number:0{self.digits}d}{self.end}"

    def __str__(self) -> str:
        last = self.first + self.size - 1
        return f"{self.head}{{{self.first:0{self.digits}d}..{last:0{self.digits}d}}}{self.end}"


def pack_names(names: Sequence[str]) -> list[str]:
    """Return names with runs of numbered ones as one.

    >>> pack_names(["a-07.tar", "a-08.tar", "a-09.tar", "b.tar", "a-1.tar"])
    ['a-{07..09}.tar', 'b.tar', 'a-1.tar']
    """
    if isinstance(names, NumberedNames):
        return [str(names)]
    packed: list[str | NumberedNames] = []
    for name in names:
        last = packed[-1] if packed else ""
        found = _NUMBERED.fullmatch(name)
        if found is None:
            packed.append(name)
            continue
        head, digits, end = found.groups()
        if isinstance(last, NumberedNames):
            following = last.first + last.size
            if (
                name == f"{last.head}{following:0{last.digits}d}{last.end}"
                and len(digits) == last.digits
            ):
                last.size += 1
                continue
        packed.append(NumberedNames(head, int(digits), 1, len(digits), end))
    return [
        each[0] if isinstance(each, NumberedNames) and each.size == 1 else str(each)
        for each in packed
    ]


def unpack_names(packed: Iterable[str], count: int) -> Sequence[str]:
    """Return the names that are written so; the reverse of :func:`pack_names`.

    Args:
        packed: Names and runs, each of ``PATTERN``.
        count: The number of names, which bounds what is made of runs.

    Raises:
        CorruptIndex: A run is not one, a name is too long, or there are more or fewer names.
    """
    runs: list[Sequence[str]] = [_unpack(each) for each in packed]
    found = sum(map(len, runs))
    require(found == count, f"expected {count} names of shards, got {found}")
    return runs[0] if len(runs) == 1 else tuple(name for run in runs for name in run)


def _unpack(name: str) -> Sequence[str]:
    found = _RUN.fullmatch(name)
    if found is None:
        run: Sequence[str] = (name,)
    else:
        head, first, last, end = found.groups()
        count = int(last) - int(first) + 1
        rises = len(first) == len(last) and count > 1
        require(rises, f"expected numbers that rise, of the same length, got {name!r}")
        run = NumberedNames(head, int(first), count, len(first), end)
    fits = len(run[0]) <= _MAX_NAME
    require(fits, f"expected names of at most {_MAX_NAME} characters, got {name!r}")
    return run
