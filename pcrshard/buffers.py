"""Memory for prefixes, used again: fresh memory would cost more in page faults than the read itself."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

_idle: list[mmap.mmap] = []
_MAX_IDLE = 16  # as many prefixes as a rank of PCRDataset holds at a time
_HUGE_PAGE = 2 << 20


@contextlib.contextmanager
def borrow(size: int) -> Iterator[memoryview]:
    """A buffer of ``size`` bytes until the end of the ``with`` block; what it holds before is not defined.

    Raises:
        MemoryError: There is not so much.
    """
    try:
        buffer = _idle.pop()
    except IndexError:
        buffer = None
    if buffer is None or len(buffer) < size:
        buffer = _allocate(size)
    try:
        yield memoryview(buffer)[:size]
    finally:
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
