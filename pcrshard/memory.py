"""Memory for prefixes and batches, used again: fresh memory would cost more in page faults than the read itself."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

_idle: list[mmap.mmap] = []
_MAX_IDLE = 16  # as many prefixes as a rank of PCRDataset holds at a time
_HUGE_PAGE = 2 << 20


@contextlib.contextmanager
def borrow(size: int) -> Iterator[memoryview]:
    """A buffer of ``size`` bytes until the end of the ``with`` block; what it holds before is not defined.

    Raises:
        MemoryError: There is not so much.
    """
    buffer = _take(size)
    try:
        yield memoryview(buffer)[:size]
    finally:
        _give_back(buffer)


def borrow_array(size: int) -> npt.NDArray[np.uint8]:
    """Such a buffer as (size,) uint8, until nothing refers to the array, a view of it, or a tensor made of it."""
    buffer = _take(size)
    array = np.frombuffer(buffer, np.uint8, size)
    weakref.finalize(array, _give_back, buffer).atexit = False
    return array


def _take(size: int) -> mmap.mmap:
    # Without a lock, which a fork could leave locked in the child: another thread may be faster.
    for buffer in sorted(_idle, key=len):
        if len(buffer) >= size:
            with contextlib.suppress(ValueError):
                _idle.remove(buffer)
                return buffer
    with contextlib.suppress(IndexError):
        if len(_idle) >= _MAX_IDLE:
            del _idle[0]  # it is too small
    return _allocate(size)


def _give_back(buffer: mmap.mmap) -> None:
    # At the interpreter's end the pool may be gone before an abandoned iterator is.
    if _idle is not None and len(_idle) < _MAX_IDLE:
        _idle.append(buffer)


def _allocate(size: int) -> mmap.mmap:
    """Anonymous memory in huge pages where the system has them: a hundred times fewer page faults."""
    size = max(size, 1)
    length = -(-size // _HUGE_PAGE) * _HUGE_PAGE if size > _HUGE_PAGE else size
    try:
        buffer = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot take {length} bytes: {error}") from error
    if size > _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer
