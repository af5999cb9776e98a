"""Local files by their descriptor: exact reads of one opened file, none of them buffered."""

from __future__ import annotations

import errno
import os
import stat
from typing import Any, Self

from ..errors import TruncatedShard
from ..native import scatter

# Read at once from a disk or over a network. A hint for more than a file system's read-ahead may
# be cut short, so it is given for so many bytes at a time, too.
_STEP_BYTES = 1 << 20
_NOT_CACHED = (errno.EAGAIN, errno.EOPNOTSUPP)


class LocalFile:
    """A file that is open for reading; to be used in a ``with`` statement.

    Args:
        path: Path of a regular file.
        first: How many bytes from its start on to read at once, with the first read.
        expected: How many will be read in all. Where the first ones are not in memory, the system
            is asked for all of them, because on a network each read that waits is a round trip.

    Attributes:
        size: Its bytes.

    Raises:
        OSError: It cannot be opened, or is not a regular file.
    """

    start = 0

    def __init__(
        self,
        path: str,
        first: int = 0,
        expected: int = 0,
    ) -> None:
        # Opened without O_NONBLOCK, a FIFO would wait for a writer.
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            kind = stat.filemode(status.st_mode)
            raise OSError(f"expected a regular file, got {kind} {path}")
        self.size = status.st_size
        self._first = min(first, self.size)
        self._expected = min(expected, self.size)
        self._ahead = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def check_range(self, start: int, stop: int) -> None:
        """Raise :class:`TruncatedShard` if the file ends before ``stop``.

        To be called before memory is taken: a claim must not take any.
        """
        if self.size < stop:
            raise _ended(start, stop, max(self.size - start, 0))

    def read(self, start: int, stop: int) -> bytes:
        """The bytes ``[start, stop)``.

        Raises:
            TruncatedShard: The file ends before ``stop``.
            OSError: It cannot be read.
        """
        self.check_range(start, stop)
        if self._first and not self._ahead:
            self._read_ahead()
        if stop <= len(self._ahead):
            return bytes(memoryview(self._ahead)[start:stop])
        data = os.pread(self._fd, stop - start, start)
        while len(data) < stop - start:
            part = os.pread(self._fd, stop - start - len(data), start + len(data))
            if not part:
                raise _ended(start, stop, len(data))
            data += part
        return data

    def _read_ahead(self) -> None:
        self._ahead = bytearray(self._first)
        done = self._read_cached(self._ahead)
        if done < self._first:
            self._ask_for(done, self._expected)
            self._ahead += bytes(max(min(self._expected, _STEP_BYTES) - self._first, 0))
            self.read_into(done, memoryview(self._ahead)[done:])

    def _read_cached(self, buffer: bytearray) -> int:
        """Fill the buffer from the file's start with what is in memory; returns how much it is."""
        if not hasattr(os, "RWF_NOWAIT"):  # Linux has it
            return 0
        try:
            return os.preadv(self._fd, [buffer], 0, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno in _NOT_CACHED:
                return 0
            raise

    def _ask_for(self, start: int, stop: int) -> None:
        """Tell the system that ``[start, stop)`` will be read; it begins and does not wait."""
        if hasattr(os, "posix_fadvise"):  # macOS does not have it
            for first in range(start, stop, _STEP_BYTES):
                size = min(_STEP_BYTES, stop - first)
                os.posix_fadvise(self._fd, first, size, os.POSIX_FADV_WILLNEED)

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``start`` on; raises as :meth:`read`."""
        done = 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], start + done)
            if not count:
                raise _ended(start, start + len(view), done)
            done += count

    def scatter(
        self,
        start: int,
        stop: int,
        groups: scatter.Groups,
        **how: Any,
    ) -> scatter.Items:
        """Read ``[start, stop)`` once, each piece into its object.

        See :func:`.native.scatter.read`.

        Raises:
            TruncatedShard: The file ends before ``stop``.
            OSError: It cannot be read.
        """
        self.check_range(start, stop)
        try:
            return scatter.read(self._fd, start, stop, groups, ahead=self._ahead, **how)
        except EOFError as error:
            raise TruncatedShard(f"expected bytes {start} to {stop}: {error}") from error
        except MemoryError as error:
            raise MemoryError(f"cannot take {stop - start} bytes") from error


def _ended(
    start: int,
    stop: int,
    got: int,
) -> TruncatedShard:
    return TruncatedShard(f"expected bytes {start} to {stop}, got {got} of {stop - start}")
