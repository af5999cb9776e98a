"""Read ranges of remote files in parts, with ``cat_file``; each part is checked and retried alone.

A part must have the requested length. Only the caller's checksums can tell which version of the
file its bytes come from.
"""

from __future__ import annotations

import asyncio
import collections
import errno
import logging
import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from ..errors import StorageError, TruncatedShard, redacted_cause
from ..redaction import get_logger, redact, redact_url, split_url
from .retry import Attempts, Refused, Retry
from .stores import answer, begin, in_thread, retried, run

log = get_logger(__name__)
# Measured: an HTTP request takes 0.2 ms of CPU time, and a part of this size fits the CPU's cache.
# A request to an object store takes 4 ms, most of it in botocore.
HTTP_PART_BYTES = 1 << 20
PART_BYTES = 4 << 20
# Total size of the parts that one read requests concurrently from a slow store.
BYTES_IN_FLIGHT = 12 << 20
# Parts are not halved below this size.
LEAST_PART_BYTES = 64 << 10
# Concurrent requests of all reads of this process.
MAX_REQUESTS = 32
# A store that answers faster gets one request at a time: as fast, for less CPU time.
_FAST_SECONDS = 0.02
# Limit of a compressed answer after decompression.
_MAX_EXPANDED = 1 << 24
_STREAM_BYTES = 1 << 18
_LOUD_FAILURES = 3
_OUT_OF_RANGE = re.compile(r"invalidrange|range (is )?not satisfiable", re.IGNORECASE)
# glibc returns freed memory to the system above thresholds that rise with the largest block freed
# so far. Without this block, which is never touched, the memory of each part would fault in again:
# measured, up to the CPU time of the request.
bytes(16 << 20)


class _Part(NamedTuple):
    """The bytes ``[start, stop)`` of a file."""

    start: int
    stop: int


class _Process:
    """State shared by all reads of a process.

    Attributes:
        slots: Limits concurrent requests.
        part_seconds: Duration of the last part, by store. A store that has not returned a range
            yet gets one request at a time, because each answer might be the whole file.
    """

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(MAX_REQUESTS)
        self.part_seconds: dict[str, float] = {}


_process = _Process()
# In a forked child, the parent's requests never complete.
os.register_at_fork(after_in_child=_process.__init__)  # type: ignore[misc]  # of an instance


class RangeRead:
    """A read of one range of a file; times are monotonic.

    Args:
        fs: The fsspec file system.
        path: Path of the file within the file system.
        start: Absolute first byte.
        view: Filled by the event loop's thread, a moment longer than the read if it is canceled.
        retry: When to give up.

    Attributes:
        todo: Parts to request.
        came: Bytes received.
        requests: Requests sent.
        attempts: Consecutive failures.
        not_before: Earliest time of the next request.
    """

    def __init__(self, fs: Any, path: str, start: int, view: memoryview, retry: Retry) -> None:
        self.fs = fs
        self.path = path
        self.start = start
        self.stop = start + len(view)
        self.view = view
        self.timeout = retry.timeout
        host = split_url(path).host or path.partition("/")[0]
        self.store = f"{type(fs).__name__} {host}"
        self.part_bytes = HTTP_PART_BYTES if _is_http(fs) else PART_BYTES
        self.todo = _split([_Part(start, self.stop)], self.part_bytes)
        self.came = 0
        self.requests = 0
        self.attempts = Attempts(retry)
        self.not_before = 0.0

    async def run(self) -> None:
        """Request parts one at a time, and several at a time from a slow store.

        Raises:
            TruncatedShard: The file ends before the range does.
            StorageError: Any other failure; the message has the bytes received and the requests
                sent.
        """
        while self.todo:
            is_fast = _process.part_seconds.get(self.store, 0.0) < _FAST_SECONDS
            if is_fast or self.attempts.failures:
                await self._fetch()
                continue
            in_flight = BYTES_IN_FLIGHT // self.part_bytes
            workers = [asyncio.create_task(self._work()) for _ in range(in_flight)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()

    async def _work(self) -> None:
        """Fetch parts until none is left, or one fails and is then requested alone."""
        while self.todo and not self.attempts.failures:
            await self._fetch()

    async def _fetch(self) -> None:
        """Fetch the next part, or schedule a retry."""
        part = self.todo.popleft()
        await asyncio.sleep(self.not_before - time.monotonic())
        async with _process.slots:
            asked = time.monotonic()
            self.requests += 1
            try:
                data = await self._cat_file(part)
                if len(data) == part.stop - part.start:
                    # An answer from byte 0 might still be a whole file of exactly this size.
                    if part.start or self.todo:
                        _process.part_seconds[self.store] = time.monotonic() - asked
                else:
                    await self._check_whole(part, data)
                    # The server ignores ranges and sent the whole file: no other part is needed.
                    _process.part_seconds.pop(self.store, None)
                    self.todo.clear()
                    part = _Part(self.start, self.stop)
                    data = memoryview(data)[part.start : part.stop]
            except TruncatedShard:
                raise
            except Exception as error:
                self._retry(part, asked, error)
                return
        self.view[part.start - self.start : part.stop - self.start] = data
        self.came += len(data)
        self.attempts.note_progress()

    async def _cat_file(self, part: _Part) -> Any:
        """Return the answer to the request of a part, nothing if it is beyond the file's end."""
        # The base class's cat_file opens a buffered file that reads 5 MiB ahead.
        plain = self.fs.async_impl or "cat_file" in vars(type(self.fs))
        options = {} if plain else {"cache_type": "none"}
        try:
            return await self._call("cat_file", start=part.start, end=part.stop, **options)
        except Exception as error:
            if not _is_out_of_range(error):
                raise
            return b""

    async def _call(self, method: str, **kwargs: Any) -> Any:
        return await answer(begin(self.fs, method, self.path, **kwargs), self.timeout)

    async def _check_whole(self, part: _Part, data: bytes) -> None:
        """Raise an error unless an answer of unexpected length is the whole file."""
        size = None
        with suppress(Exception):
            self.fs.invalidate_cache()
            size = await self._call("size")
        if size is not None and size < self.stop:
            raise TruncatedShard(f"expected bytes {self.start} to {self.stop}, the file has {size}")
        if len(data) != size and (size is not None or len(data) < self.stop):
            asked = f"bytes {part.start} to {part.stop}"
            raise StorageError(f"asked for {asked}, got {len(data)} bytes")

    def _retry(self, part: _Part, asked: float, error: Exception) -> None:
        pause = self.attempts.pause_after(error, asked)
        came = f"{self.came} of {len(self.view)}"
        what = redact(str(error), self.path)
        if not isinstance(error, StorageError):
            what = f"{type(error).__name__}: {what}"
        if pause is None:
            tried = "1 request" if self.requests == 1 else f"{self.requests} requests"
            asked_for = f"bytes {self.start} to {self.stop}"
            raise StorageError(
                f"cannot read {asked_for}, {came} came in {tried}: {what}"
            ) from redacted_cause(error, self.path)
        level = logging.INFO if self.attempts.failures < _LOUD_FAILURES else logging.WARNING
        url = redact_url(self.path)
        log.log(level, "%s: %s; %s bytes came, trying again in %.1f s", url, what, came, pause)
        self.not_before = max(self.not_before, time.monotonic() + pause)
        self.todo.appendleft(part)
        if not hasattr(error, "status") and getattr(error, "errno", None) != errno.EBUSY:
            # The connection was closed or too slow: smaller parts may get through.
            half = (part.stop - part.start + 1) // 2
            self.todo = _split(self.todo, max(half, LEAST_PART_BYTES))


def _is_http(fs: Any) -> bool:
    return "http" in fs.protocol or "https" in fs.protocol


def _split(parts: Iterable[_Part], step: int) -> collections.deque[_Part]:
    return collections.deque(
        _Part(start, min(start + step, part.stop))
        for part in parts
        for start in range(part.start, part.stop, step)
    )


def _is_out_of_range(error: Exception) -> bool:
    return getattr(error, "status", None) == 416 or bool(_OUT_OF_RANGE.search(str(error)))


def read_file(fs: Any, path: str, max_bytes: int, retry: Retry) -> bytes:
    """Return a whole file with one request; never hold more than ``max_bytes``.

    Raises:
        StorageError: The file is larger.
    """
    # A buffered file allocates everything that is requested from it.
    bounds = {} if max_bytes >= 1 << 40 else {"start": 0, "end": max_bytes + 1}

    async def send() -> bytes:
        if fs.async_impl and _is_http(fs):
            request = in_thread(lambda: _stream(fs, path, max_bytes))
        else:
            request = begin(fs, "cat_file", path, **bounds)
        data = await answer(request, retry.deadline)
        if len(data) > max_bytes:
            raise Refused(f"expected a file of at most {max_bytes} bytes, got {len(data)} or more")
        return bytes(data)

    return run(retried(send, retry))


def _stream(fs: Any, path: str, max_bytes: int) -> bytearray:
    """Read an HTTP body in chunks, because a server may send it endlessly.

    A block size of 0 makes fsspec stream; given a size, it sends no request to find it out.
    """
    headers = {**fs.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
    data = bytearray()
    with fs.open(path, "rb", block_size=0, size=1, headers=headers) as file:
        if "Content-Encoding" in file.r.headers:
            max_bytes = min(max_bytes, _MAX_EXPANDED)
        while len(data) <= max_bytes and (chunk := file.read(_STREAM_BYTES)):
            data += chunk
        if len(data) > max_bytes:
            raise Refused(f"expected a file of at most {max_bytes} bytes, got {len(data)} or more")
    return data
