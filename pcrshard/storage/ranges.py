"""Exact ranged reads: a range is asked for once, exactly, and what comes is measured.

A short or a long answer is an error.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from .. import memory
from ..errors import PCRError, StorageError, TruncatedShard, harmless
from ..native import scatter
from ..redaction import PIPE
from . import command_output, http_s3
from .local_file import LocalFile
from .retry import Cancel, Retry
from .stores import ANY_NETWORK, Options, mapped_errors, resolve
from .transfers import FileTransfer, RangeTransfer
from .urls import is_local, plain_path

# As much as anybody can have meant to read into memory at once.
_UNBOUNDED = 1 << 40

Range = tuple[str, int, int | None]
Answer = bytes | PCRError
# A path in a store, and the range of it, by number.
Wanted = dict[int, tuple[str, Range]]


class Window(NamedTuple):
    """Bytes of a file in memory, from the absolute offset ``start`` on; read like a LocalFile."""

    view: memoryview
    start: int

    def check_range(self, start: int, stop: int) -> None:
        """Raise :class:`TruncatedShard` if the window ends before ``stop``."""
        if self.start + len(self.view) < stop:
            raise TruncatedShard(f"expected bytes {start} to {stop}, got {len(self.view)}")

    def read(self, start: int, stop: int) -> memoryview:
        """The bytes ``[start, stop)``, valid as long as the window."""
        return self.view[start - self.start : stop - self.start]

    def scatter(
        self,
        start: int,
        stop: int,
        groups: scatter.Groups,
        **how: Any,
    ) -> scatter.Items:
        """Put each piece of ``[start, stop)`` into its object; see :func:`.native.scatter.read`."""
        return scatter.read(self.read(start, stop), start, stop, groups, **how)


@contextmanager
def open_range(
    url: str,
    start: int,
    stop: int,
    *,
    options: Options = None,
    retry: Retry = ANY_NETWORK,
    cancel: Cancel = None,
) -> Iterator[memoryview]:
    """Read the bytes ``[start, stop)`` of a file in one request.

    There are more requests only after a fault, for what is still missing. The bytes are read into
    a buffer that is used again after the ``with`` block: copy what must live longer.

    Args:
        url: Local path, any fsspec URL, or ``pipe:COMMAND``, whose output is read up to ``stop``.
        start: Absolute first byte.
        stop: Absolute byte after the last one.
        options: fsspec storage options.
        retry: When to give up on a remote store.
        cancel: Ends a remote read from another thread.

    Yields:
        Exactly ``stop - start`` bytes.

    Raises:
        TruncatedShard: The file ends before ``stop``.
        StorageError: It cannot be read, or the server does not do what was asked.
    """
    with ExitStack() as stack:
        with mapped_errors(url, f"read bytes {start} to {stop}"):
            if is_local(url):
                # A claim must not take memory.
                file = stack.enter_context(LocalFile(plain_path(url)))
                file.check_range(start, stop)
                view = stack.enter_context(memory.borrow(stop - start))
                file.read_into(start, view)
            else:
                view = stack.enter_context(memory.borrow(stop - start))
                _fill(view, url, start, options, retry, cancel)
        yield view


def read_into(
    url: str,
    start: int,
    view: memoryview,
    *,
    options: Options = None,
    retry: Retry = ANY_NETWORK,
    cancel: Cancel = None,
) -> None:
    """Fill ``view`` with the bytes of a file from ``start`` on; see :func:`open_range`."""
    with mapped_errors(url, f"read bytes {start} to {start + len(view)}"):
        if is_local(url):
            with LocalFile(plain_path(url)) as file:
                file.read_into(start, view)
        else:
            _fill(view, url, start, options, retry, cancel)


def _fill(
    view: memoryview,
    url: str,
    start: int,
    options: Options,
    retry: Retry,
    cancel: Cancel,
) -> None:
    if url.startswith(PIPE):
        command_output.read_range(url.removeprefix(PIPE), start, view, cancel)
        return
    fs, path = resolve(url, options)
    http_s3.read_into(fs, path, RangeTransfer(start, view), retry, cancel)


@contextmanager
def open_local(
    url: str,
    first: int = 0,
    expected: int = 0,
) -> Iterator[LocalFile]:
    """Open a local file for several reads of its parts.

    Args:
        url: Local path, or ``file:`` URL.
        first: How many bytes to read at once; see :class:`LocalFile`.
        expected: How many will be read.

    Raises:
        StorageError: It cannot be opened, or the system gives an error in the ``with`` block.
    """
    faults = (OSError, MemoryError, ValueError, OverflowError)
    with mapped_errors(url, "read", faults), LocalFile(plain_path(url), first, expected) as file:
        yield file


def read_bytes(
    url: str,
    *,
    options: Options = None,
    max_bytes: int | None = None,
    retry: Retry = ANY_NETWORK,
) -> bytes:
    """Read a whole file in one request.

    Args:
        url: Local path, or any fsspec URL.
        options: fsspec storage options.
        max_bytes: A larger file is refused, before more than this is in memory; ``None`` for a
            file that is the user's own.
        retry: When to give up on a remote store.

    Raises:
        StorageError: It cannot be read, or is too large.
    """
    limit = _UNBOUNDED if max_bytes is None else max_bytes
    with mapped_errors(url, "read"):
        if is_local(url):
            return _read_local(plain_path(url), max_bytes)
        fs, path = resolve(url, options)
        transfer = FileTransfer(limit)
        http_s3.read_into(fs, path, transfer, retry)
        return bytes(transfer.data)


def _read_local(path: str, max_bytes: int | None) -> bytes:
    if max_bytes is None:
        with open(path, "rb") as file:  # it may be a FIFO, such as <(ls) in a shell
            return file.read()
    with LocalFile(path) as whole:
        if whole.size > max_bytes:
            raise StorageError(f"expected a file of at most {max_bytes} bytes, got {whole.size}")
        return whole.read(0, whole.size)


def read_ranges(ranges: Sequence[Range], *, options: Options = None) -> list[Answer]:
    """Read several ranges ``(url, start, stop)``, one request each, concurrently where possible.

    A stop of ``None`` means the end of the file.

    Returns:
        For each range its bytes, or the :class:`StorageError` or :class:`TruncatedShard` that
        came instead.
    """
    by_store: dict[Any, Wanted] = collections.defaultdict(dict)
    for i, asked in enumerate(ranges):
        url, start, stop = asked
        if start != stop:
            fs, path = resolve(url, options)
            by_store[fs][i] = (path, asked)
    results: dict[int, Answer] = {}
    for fs, wanted in by_store.items():
        results |= _read_store(fs, wanted)
    return [results.get(i, b"") for i in range(len(ranges))]


def _read_store(fs: Any, wanted: Wanted) -> dict[int, Answer]:
    paths, ranges = zip(*wanted.values(), strict=True)
    urls, starts, stops = map(list, zip(*ranges, strict=True))
    with mapped_errors(urls[0], "read ranges"):
        parts = fs.cat_ranges(list(paths), starts, stops, on_error="return")
        return dict(zip(wanted, map(_range_result, ranges, parts), strict=True))


def _range_result(asked: Range, part: bytes | Exception) -> Answer:
    url, start, stop = asked
    if isinstance(part, Exception):
        error = StorageError(f"cannot read: {type(part).__name__}: {part}", url=url)
        error.__cause__ = harmless(part, url)
        return error
    if stop is None or len(part) == stop - start:
        return bytes(part)
    got = f"got {len(part)}"
    if len(part) < stop - start:
        return TruncatedShard(f"expected bytes {start} to {stop}, {got} of {stop - start}", url=url)
    return StorageError(f"asked for {stop - start} bytes, {got}: the server ignores Range", url=url)
