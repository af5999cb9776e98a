"""Integers shared by a process and its DataLoader workers, under any start method."""

from __future__ import annotations

import multiprocessing.context
import multiprocessing.sharedctypes
from collections.abc import Sequence
from typing import Any

from ..native.pieces import atomic_add, compare_exchange


class SharedIntegers:
    """A fixed number of signed 64-bit integers in shared memory.

    A worker that is being started gets the same memory. Any other copy (``copy.deepcopy``,
    ``pickle``) has its own memory with the values at that moment.

    >>> numbers = SharedIntegers([2, 5])
    >>> numbers[1:] = [7]
    >>> numbers[:]
    [2, 7]

    Args:
        values: Initial values; their number never changes.
    """

    def __init__(self, values: Sequence[int]) -> None:
        self._memory: Any = multiprocessing.sharedctypes.RawArray("q", list(values))

    def __getitem__(self, where: Any) -> Any:
        return self._memory[where]

    def __setitem__(self, where: Any, value: Any) -> None:
        self._memory[where] = value

    def add(self, place: int, amount: int) -> None:
        """Add to one integer, atomically across processes and threads."""
        atomic_add(self._memory, place, amount)

    def replace(self, place: int, expected: int, value: int) -> bool:
        """Set one integer, atomically, if it is the expected one; return whether it was."""
        return compare_exchange(self._memory, place, expected, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if multiprocessing.context.get_spawning_popen() is None:
            return SharedIntegers, (self[:],)
        return super().__reduce_ex__(protocol)
