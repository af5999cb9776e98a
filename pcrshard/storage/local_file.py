"""Local files by their descriptor: exact reads of one opened file, none of them buffered."""

from __future__ import annotations

import os
import stat
from typing import Any, Self

from ..errors import TruncatedShard
from ..native import scatter


class LocalFile:
    """A file that is open for reading; to be used in a ``with`` statement.

    Args:
        path: Path of a regular file.

    Attributes:
        size: Its bytes.

    Raises:
        OSError: It cannot be opened, or is not a regular file.
    """

    start = 0

    def __init__(self, path: str) -> None:
        # Opened without O_NONBLOCK, a FIFO would wait for a writer.
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            kind = stat.filemode(status.st_mode)
            raise OSError(f"expected a regular file, got {kind} {path}")
        self.size = status.st_size

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
        data = os.pread(self._fd, stop - start, start)
        while len(data) < stop - start:
            part = os.pread(self._fd, stop - start - len(data), start + len(data))
            if not part:
                raise _ended(start, stop, len(data))
            data += part
        return data

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
            return scatter.read(self._fd, start, stop, groups, **how)
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
