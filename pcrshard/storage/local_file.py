"""Local files by their descriptor: several exact reads of one opened file, none of them buffered."""

from __future__ import annotations

import os
import stat
from typing import Any, Self

from ..errors import TruncatedShard
from ..native import scatter


class LocalFile:
    """A file that is open for reading; to be used in a ``with`` statement.

    Args:
        path: Of a regular file.

    Raises:
        OSError: It cannot be opened, or is not a regular file.
    """

    def __init__(self, path: str) -> None:
        self._fd = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK
        )  # a FIFO would wait for who writes to it
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            raise OSError(f"expected a regular file, got {stat.filemode(status.st_mode)} {path}")
        self._size = status.st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def check_range(self, start: int, stop: int) -> None:
        """Raise :class:`TruncatedShard` if the file ends before ``stop``: a claim must not take memory."""
        if self._size < stop:
            raise TruncatedShard(
                f"expected bytes {start} to {stop}, got {max(self._size - start, 0)} of {stop - start}"
            )

    def read(self, start: int, stop: int) -> bytes:
        """The bytes ``[start, stop)``.

        Raises:
            TruncatedShard: The file ends before ``stop``.
            OSError: It cannot be read.
        """
        self.check_range(start, stop)
        data = b""
        while len(data) < stop - start:
            part = os.pread(self._fd, stop - start - len(data), start + len(data))
            if not part:
                raise TruncatedShard(
                    f"expected bytes {start} to {stop}, got {len(data)} of {stop - start}"
                )
            data += part
        return data

    def scatter(
        self, start: int, stop: int, groups: scatter.Groups, **how: Any
    ) -> list[bytes | None]:
        """Read ``[start, stop)`` once, each piece into its object; see :func:`.native.scatter.read`.

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
