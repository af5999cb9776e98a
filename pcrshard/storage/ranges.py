"""Exact ranged reads: a range is asked for once, exactly, and what comes is measured.

A short or a long answer is an error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .. import memory
from ..errors import PCRError, StorageError, TruncatedShard, harmless
from ..native import scatter
from ..redaction import PIPE
from . import command_output, http_s3
from .local_file import LocalFile
from .retry import Retry
from .stores import ANY_NETWORK, Options, ask, mapped_errors, resolve
from .urls import is_local, plain_path

Range = tuple[str, int, int | None]


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


@contextlib.contextmanager
def open_range(
    url: str,
    start: int,
    stop: int,
    *,
    options: Options | None = None,
    retry: Retry = ANY_NETWORK,
    cancel: threading.Event | None = None,
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
    with contextlib.ExitStack() as stack:
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
    options: Options | None = None,
    retry: Retry = ANY_NETWORK,
    cancel: threading.Event | None = None,
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
    options: Options | None,
    retry: Retry,
    cancel: threading.Event | None,
) -> None:
    if url.startswith(PIPE):
        command_output.read_range(url.removeprefix(PIPE), start, view, cancel)
        return
    fs, path = resolve(url, options)
    http_s3.read_into(fs, path, http_s3.Transfer(start, view), retry, cancel)


@contextlib.contextmanager
def open_local(url: str) -> Iterator[LocalFile]:
    """Open a local file for several reads of its parts.

    Raises:
        StorageError: It cannot be opened, or the system gives an error in the ``with`` block.
    """
    faults = (OSError, MemoryError, ValueError, OverflowError)
    with mapped_errors(url, "read", faults), LocalFile(plain_path(url)) as file:
        yield file


def read_bytes(url: str, *, options: Options | None = None) -> bytes:
    """Read a whole file in one request.

    Raises:
        StorageError: It cannot be read.
    """
    return bytes(ask(url, "read", "cat_file", options, seconds=ANY_NETWORK.deadline))


def read_ranges(
    ranges: Sequence[Range], *, options: Options | None = None
) -> list[bytes | PCRError]:
    """Read several ranges ``(url, start, stop)``, one request each, concurrently where possible.

    A stop of ``None`` means the end of the file.

    Returns:
        For each range its bytes, or the :class:`StorageError` or :class:`TruncatedShard` that
        came instead.
    """
    results: list[bytes | PCRError] = [b""] * len(ranges)
    by_store: dict[int, tuple[Any, list[tuple[int, str]]]] = {}
    for i, (url, start, stop) in enumerate(ranges):
        if start != stop:
            fs, path = resolve(url, options)
            by_store.setdefault(id(fs), (fs, []))[1].append((i, path))
    for fs, places in by_store.values():
        asked = [ranges[i] for i, _ in places]
        parts = _read_parts(fs, [path for _, path in places], asked)
        for (i, _), wanted, part in zip(places, asked, parts, strict=True):
            results[i] = _range_result(wanted, part)
    return results


def _read_parts(fs: Any, paths: list[str], asked: list[Range]) -> list[bytes | Exception]:
    starts = [start for _, start, _ in asked]
    stops = [stop for _, _, stop in asked]
    with mapped_errors(asked[0][0], "read ranges"):
        return list(fs.cat_ranges(paths, starts, stops, on_error="return"))


def _range_result(asked: Range, part: bytes | Exception) -> bytes | PCRError:
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
