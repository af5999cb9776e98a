"""Exact ranged reads of any store into one buffer; a response of any other length is an error."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from .. import memory
from ..errors import PCRError, StorageError, TruncatedShard
from ..redaction import PIPE
from . import command_output
from .files import look_up, status_version
from .remote import OtherVersion, Part, RangeRead, read_file
from .remote import has_ranges as remote_has_ranges
from .retry import Cancel
from .stores import Access, Store, Target, mapped_errors, run
from .urls import is_local, plain_path

# The kernel may truncate a hint that exceeds its read-ahead, so hints are given in steps.
_HINT_BYTES = 1 << 20
_PAGE = 4096

Range = tuple[str, int, int | None]
Answer = bytes | PCRError
# Small files read concurrently.
_MAX_THREADS = 16


def read(
    url: str,
    start: int,
    stop: int,
    *,
    options: Access = None,
    cancel: Cancel = None,
) -> NDArray[np.uint8]:
    """Read the bytes ``[start, stop)`` of a file.

    A remote file takes one request up to the size of a part, and one request per part beyond it.

    Args:
        url: Local path, any fsspec URL, or ``pipe:COMMAND``, whose output is read up to ``stop``.
        start: Absolute first byte.
        stop: Absolute end, exclusive.
        options: fsspec storage options, or a :class:`Store`.
        cancel: Set by another thread to end a remote read.

    Returns:
        (stop - start,) uint8, in memory that is reused once nothing refers to it.

    Raises:
        TruncatedShard: The file ends before ``stop``.
        StorageError: The file cannot be read, or the server does not honor the request.
    """
    buffer = allocate(url, start, stop)
    read_into(url, start, buffer.data, options=options, cancel=cancel)
    return buffer


def allocate(url: str, start: int, stop: int) -> NDArray[np.uint8]:
    """Return memory for the bytes ``[start, stop)`` of a file; raises as :func:`read`."""
    check_end(url, start, stop)
    with mapped_errors(url, f"read bytes {start} to {stop}"):
        return memory.borrow_array(stop - start)


def check_end(url: str, start: int, stop: int) -> None:
    """Raise TruncatedShard if a local file ends before ``stop``: a false claim takes no memory."""
    with mapped_errors(url, f"read bytes {start} to {stop}"):
        if is_local(url) and (size := os.path.getsize(plain_path(url))) < stop:
            raise TruncatedShard(f"expected bytes {start} to {stop}, the file has {size}")


def read_into(
    url: str,
    start: int,
    view: memoryview,
    *,
    options: Access = None,
    cancel: Cancel = None,
) -> None:
    """Fill ``view`` with the bytes of a file that start at ``start``; raises as :func:`read`."""
    if url.startswith(PIPE):
        with mapped_errors(url, f"read bytes {start} to {start + len(view)}"):
            command_output.read_range(url.removeprefix(PIPE), start, view, cancel)
        return
    read_parts(url, [Part(start, view)], options=options, cancel=cancel)


def read_parts(
    url: str,
    parts: Sequence[Part],
    *,
    version: str = "",
    options: Access = None,
    cancel: Cancel = None,
) -> None:
    """Fill the memory of some ranges of a file, several at a time; raises as :func:`read`.

    Args:
        url: Local path or any fsspec URL.
        parts: The ranges.
        version: What the file's version must be, as :func:`look_up` has reported it; empty for any.
            Costs a request only if the answers do not tell.
        options: fsspec storage options, or a :class:`Store`.
        cancel: Set by another thread to end a remote read.

    Raises:
        OtherVersion: The file is another version.
        StorageError: As for :func:`read`.
        TruncatedShard: The file ends before a range does.
    """
    start = min((part.start for part in parts), default=0)
    stop = max((part.stop for part in parts), default=0)
    with mapped_errors(url, f"read bytes {start} to {stop}"):
        if is_local(url):
            # Without O_NONBLOCK, opening a FIFO would wait for a writer.
            handle = os.open(plain_path(url), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                for part in parts:
                    read_local(handle, part.start, part.view)
                _check_version(version, status_version(os.fstat(handle)))
            finally:
                os.close(handle)
            return
        reading = RangeRead(Target(url, options), parts, Store.of(options).retry, version)
        run(reading.run(), cancel)
        if version and not reading.is_same:
            # After the read, so that it is about what was read.
            check_version(url, version, options=options)


def check_version(url: str, version: str, *, options: Access = None) -> None:
    """Raise :class:`OtherVersion` unless a file has a version; an empty one stands for any."""
    if version:
        _check_version(version, look_up(url, options=options).version)


def _check_version(expected: str, found: str) -> None:
    if expected not in ("", found):
        raise OtherVersion(f"expected {expected}, got {found or 'none'}")


def read_local(handle: int, start: int, view: memoryview) -> None:
    """Fill ``view`` with the bytes of a regular file that start at ``start``.

    Raises:
        TruncatedShard: The file is too short.
        OSError: The file cannot be read.
    """
    # Touching more than a page would start the kernel's own read-ahead, beyond the range.
    done = _read_cached(handle, start, view[:_PAGE])
    stop = start + len(view)
    # Where little follows, the kernel may read that, too: its read-ahead uses larger pages.
    more = stop + _HINT_BYTES < os.fstat(handle).st_size
    if more and not done and hasattr(os, "posix_fadvise"):  # not on macOS
        # The whole range at once: on a network file system, each blocking read is a round trip.
        for first in range(start, stop, _HINT_BYTES):
            size = min(_HINT_BYTES, stop - first)
            os.posix_fadvise(handle, first, size, os.POSIX_FADV_WILLNEED)
    while done < len(view):
        count = os.preadv(handle, [view[done:]], start + done)
        if not count:
            raise TruncatedShard(f"expected bytes {start} to {stop}, got {done} of {len(view)}")
        done += count


def _read_cached(handle: int, start: int, view: memoryview) -> int:
    """Read the bytes that are in the page cache; return their number."""
    if not hasattr(os, "RWF_NOWAIT"):  # Linux only
        return 0
    with suppress(OSError):  # a plain read comes next
        return os.preadv(handle, [view], start, os.RWF_NOWAIT)
    return 0


def has_ranges(url: str, *, options: Access = None) -> bool:
    """Return whether a store sends ranges of a file; at most one request.

    Raises:
        StorageError: The file cannot be read.
    """
    if is_local(url):
        return True
    with mapped_errors(url, "read"):
        return run(remote_has_ranges(Target(url, options), Store.of(options).retry))


def read_bytes(
    url: str,
    *,
    options: Access = None,
    max_bytes: int | None = None,
) -> bytes:
    """Return a whole file, read with one request.

    Args:
        url: Local path or any fsspec URL.
        options: fsspec storage options, or a :class:`Store`.
        max_bytes: A larger file is refused before more than this is in memory; ``None`` for the
            user's own files.

    Raises:
        StorageError: The file cannot be read or is too large.
    """
    with mapped_errors(url, "read"):
        if not is_local(url):
            return read_file(Target(url, options), max_bytes, Store.of(options).retry)
        path = plain_path(url)
        if max_bytes is not None and (size := os.path.getsize(path)) > max_bytes:
            raise StorageError(f"expected a file of at most {max_bytes} bytes, got {size}")
        with open(path, "rb") as file:  # it may be a FIFO, such as <(ls) in a shell
            return file.read()


def read_ranges(ranges: Sequence[Range], *, options: Access = None) -> list[Answer]:
    """Read several ranges ``(url, start, stop)`` concurrently.

    A stop of ``None`` means the whole file.

    Returns:
        For each range, its bytes, or the :class:`StorageError` or :class:`TruncatedShard` that it
        raised.
    """

    def read_one(asked: Range) -> Answer:
        url, start, stop = asked
        try:
            if stop is None:
                return read_bytes(url, options=options)
            return read(url, start, stop, options=options).tobytes()
        except PCRError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(_MAX_THREADS) as pool:
        return list(pool.map(read_one, ranges))
