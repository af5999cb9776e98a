"""What comes of a file from a remote store: which bytes are there, and of which version of it."""

from __future__ import annotations

import abc
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from ..errors import StorageError, TruncatedShard
from ..memory import Buffer
from .retry import PROGRESS_BYTES, Cancelled, Refused

# From a server that ignores Range this much is read and dropped to come to the start of a range;
# more is refused.
_MAX_SKIP = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)", re.IGNORECASE)
_MAX_REPLACED = 3
# A file that was sent compressed may become so many times as large, or at least so large.
_MAX_EXPANSION = 16
_EXPANSION_FLOOR_BYTES = 1 << 24


class Reply(NamedTuple):
    """The head of a store's answer.

    ``content_range`` is ``None`` if it sends the whole file, of ``length`` bytes. ``encoded_bytes``
    is what it sends of a compressed file, 0 if it does not tell, ``None`` without compression.
    """

    content_range: str | None
    length: int | None
    tag: str | None
    chunks: AsyncIterator[bytes]
    encoded_bytes: int | None = None


@dataclass(eq=False)
class Transfer(abc.ABC):
    """Bytes of a file that are wanted, and how many of them came.

    Attributes:
        start: Absolute first byte.
        done: Bytes that came.
        tag: Of the version that they are of.
        num_replaced: Times that the file was replaced meanwhile.
        most: The last byte that counted as progress.
        last_progress: When it came.
    """

    start: int
    done: int = 0
    tag: str | None = None
    num_replaced: int = 0
    most: int = 0
    last_progress: float = field(default_factory=time.monotonic)
    _lock: Lock = field(default_factory=Lock)
    _abandoned: bool = False

    @property
    @abc.abstractmethod
    def stop(self) -> int:
        """Absolute byte after the last one that may come."""

    @property
    @abc.abstractmethod
    def complete(self) -> bool:
        """Whether every byte is there."""

    @property
    @abc.abstractmethod
    def wanted(self) -> str:
        """What is wanted, for errors."""

    @property
    @abc.abstractmethod
    def came(self) -> str:
        """How many bytes came of how many, for errors."""

    @property
    @abc.abstractmethod
    def range_header(self) -> str | None:
        """The value of ``Range`` that asks for the rest; ``None`` for the whole file."""

    @abc.abstractmethod
    def begin(self, reply: Reply) -> int:
        """Check the head of an answer.

        Returns:
            How many bytes of its body stand before those that are wanted.
        """

    @abc.abstractmethod
    def put(self, chunk: Buffer, *, whole_file: bool) -> None:
        """Take bytes of a body; of a whole file those after the range are left."""

    def finish(self) -> None:  # noqa: B027  # most need not know
        """The body came to its end."""

    @property
    def position(self) -> int:
        """Absolute byte that comes next."""
        return self.start + self.done

    def seconds_left(self, deadline: float) -> float:
        """Seconds until the time without progress reaches the deadline."""
        return self.last_progress + deadline - time.monotonic()

    def abandon(self) -> None:
        """Put no more into the memory, which others may use from now on.

        A request that runs in another thread ends a little later.
        """
        with self._lock:
            self._abandoned = True

    def _check_tag(self, tag: str | None) -> None:
        if self.tag and tag != self.tag:
            self._start_again()
        self.tag = tag

    def _start_again(self) -> None:
        self.done = 0
        self.most = 0
        self.tag = None
        self.num_replaced += 1
        # What begins again and again would never end.
        kind = StorageError if self.num_replaced < _MAX_REPLACED else Refused
        raise kind("the file was replaced while it was read")

    def _check_part(self, content_range: str) -> str | None:
        """Check that a part is the one that was asked for; the total of the file if it is told."""
        match = _CONTENT_RANGE.fullmatch(content_range)
        if match is None or int(match[1]) != self.position or int(match[2]) >= self.stop:
            asked = f"bytes {self.position} to {self.stop}"
            raise StorageError(f"asked for {asked}, got {content_range!r}")
        return match[3]

    def _keep(self, chunk: Buffer) -> None:
        """Put bytes after those that are there, unless nobody wants them any more."""
        with self._lock:
            if self._abandoned:
                raise Cancelled("the read was cancelled")
            self._write(chunk)
        self._note(len(chunk))

    def _note(self, count: int) -> None:
        self.done += count
        if self.done - self.most >= PROGRESS_BYTES:
            self.most = self.done
            self.last_progress = time.monotonic()

    @abc.abstractmethod
    def _write(self, chunk: Buffer) -> None:
        """Put bytes after those that are there."""


class RangeTransfer(Transfer):
    """One range of a file, which fills memory of its size.

    Args:
        start: Absolute first byte.
        view: Where the bytes go.
    """

    def __init__(self, start: int, view: memoryview) -> None:
        super().__init__(start)
        self.view = view

    @property
    def stop(self) -> int:
        """Absolute byte after the last one."""
        return self.start + len(self.view)

    @property
    def complete(self) -> bool:
        """Whether every byte is there."""
        return self.done == len(self.view)

    @property
    def wanted(self) -> str:
        """The range, for errors."""
        return f"bytes {self.start} to {self.stop}"

    @property
    def came(self) -> str:
        """How much of it came, for errors."""
        return f"{self.done} of {len(self.view)}"

    @property
    def range_header(self) -> str | None:
        """The rest of the range."""
        return f"bytes={self.position}-{self.stop - 1}"

    def begin(self, reply: Reply) -> int:
        """Check the head of an answer; see :class:`Transfer`."""
        self._check_tag(reply.tag)
        if reply.content_range is None:
            if self.start > _MAX_SKIP:
                raise Refused(
                    f"asked for {self.wanted}, got the whole file: the server ignores Range"
                )
            self._check_total(str(reply.length))
            return self.position
        match = _CONTENT_RANGE.fullmatch(reply.content_range)
        if match is not None:
            self._check_total(match[3])
        self._check_part(reply.content_range)
        return 0

    def _check_total(self, total: str) -> None:
        if total.isdecimal() and int(total) < self.stop:
            raise TruncatedShard(f"expected {self.wanted}, the file has {total}")

    def put(self, chunk: Buffer, *, whole_file: bool) -> None:
        """Take bytes of a body; see :class:`Transfer`."""
        room = len(self.view) - self.done
        if len(chunk) > room and not whole_file:
            raise StorageError(f"asked for {self.wanted}, got more")
        self._keep(chunk[:room])

    def _write(self, chunk: Buffer) -> None:
        self.view[self.done : self.done + len(chunk)] = chunk


class FileTransfer(Transfer):
    """A whole file, of a size that nobody told.

    Args:
        max_bytes: A larger one is refused, as soon as that is known.

    Attributes:
        data: What came.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(0)
        self.max_bytes = max_bytes
        self.data = bytearray()
        self._limit = max_bytes
        self._total: int | None = None
        self._complete = False

    @property
    def stop(self) -> int:
        """One byte more than may come, so that a larger file is known as such."""
        return self.max_bytes + 1

    @property
    def complete(self) -> bool:
        """Whether the file came to its end."""
        return self._complete

    @property
    def wanted(self) -> str:
        """The file, for errors."""
        return "the file"

    @property
    def came(self) -> str:
        """How much came, for errors."""
        return f"{self.done} of {'?' if self._total is None else self._total}"

    @property
    def range_header(self) -> str | None:
        """What is missing; nothing at first, because an empty file has no ranges."""
        return f"bytes={self.position}-" if self.done else None

    def begin(self, reply: Reply) -> int:
        """Check the head of an answer; see :class:`Transfer`."""
        self._check_tag(reply.tag)
        self._limit = self.max_bytes
        if reply.encoded_bytes is not None:
            # Nobody knows which byte of it comes after those that are here.
            self.done = 0
            expanded = max(_MAX_EXPANSION * reply.encoded_bytes, _EXPANSION_FLOOR_BYTES)
            self._limit = min(self.max_bytes, expanded)
        skip = self.done
        self._total = reply.length
        if reply.content_range is not None:
            total = self._check_part(reply.content_range) or ""
            self._total = int(total) if total.isdecimal() else None
            skip = 0
        del self.data[self.done :]
        self._check_size(self._total or 0)
        return skip

    def _check_size(self, size: int) -> None:
        if size > self._limit:
            raise Refused(f"expected a file of at most {self._limit} bytes, got {size} or more")

    def put(self, chunk: Buffer, *, whole_file: bool) -> None:
        """Take bytes of a body; see :class:`Transfer`."""
        self._check_size(self.done + len(chunk))
        self._keep(chunk)

    def _write(self, chunk: Buffer) -> None:
        self.data += chunk

    def finish(self) -> None:
        """The body came to its end, and with it the file, unless a longer one was promised."""
        self._complete = self._total is None or self.done >= self._total
