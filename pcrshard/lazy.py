"""Values made when they are needed, without a lock that a forked child could inherit held."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801  # used as a decorator
    """A property that is computed at first use and then kept in the object.

    Not ``functools.cached_property``: before Python 3.12, it holds one lock for all objects of the
    class while it computes, so that requests inside it wait for each other, and a process forked in
    the meantime hangs. Two threads may compute the same value.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Self | T:
        if instance is None:
            return self
        value = vars(instance)[self.name] = self.compute(instance)
        return value


class Chain(Sequence[T]):
    """Sequences one after the other; nothing is copied.

    >>> Chain([range(2), "ab"])[2]
    'a'
    """

    def __init__(self, parts: Sequence[Sequence[T]]) -> None:
        self.parts = parts
        self._starts = [0, *itertools.accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[T]: ...
    def __getitem__(self, place: int | slice) -> T | Sequence[T]:
        places = range(len(self))[place]
        if isinstance(places, range):
            return [self[each] for each in places]
        part = bisect.bisect_right(self._starts, places) - 1
        return self.parts[part][places - self._starts[part]]


class PerProcess(Generic[T]):
    """State that threads share, such as locks and what they guard: each process makes its own.

    A forked child would otherwise inherit locks that threads of its parent hold, and hang.

    >>> shared = PerProcess(dict)
    >>> shared.here is shared.here
    True

    Args:
        make: Makes the state. It travels to other processes; the state does not.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: dict[int, T] = {}

    @property
    def here(self) -> T:
        """The state of this process."""
        process = os.getpid()
        if process not in self._made:
            # Of two threads, the first one wins.
            self._made.setdefault(process, self._make())
            for parent in self._made.keys() - {process}:
                self._made.pop(parent, None)
        return self._made[process]

    def __reduce__(self) -> Any:
        return PerProcess, (self._make,)
