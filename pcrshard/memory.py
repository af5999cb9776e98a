"""Reusable memory for prefixes and batches.

Page faults on fresh memory would cost more than the read itself.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

Buffer = bytes | bytearray | memoryview
_HUGE_PAGE = 2 << 20


class BufferPool:
    """Buffers that are recycled once nothing refers to them.

    Lock-free, because a forked child could inherit a held lock. If another thread wins a buffer,
    the next one is tried.

    Args:
        max_idle: Maximum number of idle buffers kept for reuse.
    """

    def __init__(self, max_idle: int = 16) -> None:
        self.max_idle = max_idle
        self._idle: list[mmap.mmap] = []

    @property
    def num_idle(self) -> int:
        """The number of idle buffers."""
        return len(self._idle)

    def borrow_array(self, *shape: int) -> NDArray[np.uint8]:
        """Return a buffer as a uint8 array of undefined content.

        The buffer is returned once nothing refers to the array, a view of it, or a tensor that
        shares it.

        Raises:
            MemoryError: The memory cannot be allocated.
        """
        buffer = self._take(math.prod(shape))
        array = np.ndarray(shape, np.uint8, buffer)
        when_gone(array, self._give_back, buffer)
        return array

    def clear(self) -> None:
        """Free the idle buffers."""
        self._idle.clear()

    def _take(self, size: int) -> mmap.mmap:
        for buffer in sorted(self._idle, key=len):
            if len(buffer) >= size:
                with suppress(ValueError):
                    self._idle.remove(buffer)
                    return buffer
        with suppress(IndexError):
            if len(self._idle) >= self.max_idle:
                del self._idle[0]  # too small
        return allocate(size)

    def _give_back(self, buffer: mmap.mmap) -> None:
        if len(self._idle) < self.max_idle:
            self._idle.append(buffer)


def when_gone(thing: Any, call: Callable[[Any], object], argument: Any) -> None:
    """Call a function once nothing refers to an object, but not at interpreter exit."""
    weakref.finalize(thing, call, argument).atexit = False


def allocate(size: int) -> mmap.mmap:
    """Allocate anonymous memory, in huge pages if available: a hundred times fewer page faults.

    Raises:
        MemoryError: The system refuses.
    """
    length = max(size, 1)
    if size > _HUGE_PAGE:
        length = -(-size // _HUGE_PAGE) * _HUGE_PAGE
    try:
        buffer = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot allocate {length} bytes: {error}") from error
    if size > _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


# Sized for the batches and prefixes that a rank of PCRLoader holds at a time.
pool = BufferPool()
borrow_array = pool.borrow_array
# glibc maps larger blocks, and grows the memory of a thread by areas of this size.
_BLOCK, _THREAD_BYTES = 120_000, 64 << 20
_malloc_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only


def trim() -> None:
    """Return idle memory to the system: the shared buffers, and what the C library keeps."""
    pool.clear()
    trim_thread()


def trim_thread() -> None:
    """Return to the system what the C library keeps, also of this thread.

    It keeps the free end of the memory of each thread but the first; only free memory before a
    block in use is returned. So blocks, too small for mappings of their own, take that end.
    """
    if _malloc_trim is not None:
        blocks = [np.empty(_BLOCK, np.uint8) for _ in range(_THREAD_BYTES // _BLOCK)]
        del blocks[:-1]
        _malloc_trim(0)
