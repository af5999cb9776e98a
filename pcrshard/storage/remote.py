"""Read ranges of remote files in parts; each part is checked and retried alone.

HTTP bodies are streamed into place, which takes a fifth to a third less CPU time than ``cat_file``.
A part must have the requested length. Only the caller's checksums can tell which version of the
file its bytes come from.
"""

from __future__ import annotations

import asyncio
import collections
import errno
import re
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple

from ..errors import StorageError, TruncatedShard
from ..redaction import get_logger, redact, redact_url, split_url
from .retry import Attempts, Refused, Retry
from .stores import call, retried, run, time_limit

log = get_logger(__name__)
# Measured: a request to an object store takes 4 ms of CPU time, most of it in botocore.
PART_BYTES = 4 << 20
# Parts that one read requests concurrently from a slow store. HTTP takes no memory for them.
IN_FLIGHT = 3
HTTP_IN_FLIGHT = 8
# Parts are not halved below this size.
LEAST_PART_BYTES = 64 << 10
# Concurrent requests of all reads of this process.
MAX_REQUESTS = 32
# A store that answers faster gets one request at a time: as fast, for less CPU time.
_FAST_SECONDS = 0.02
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


# Duration of the last part, by host or bucket. A store that has not returned a range yet gets one
# request at a time, because each answer might be the whole file.
_part_seconds: dict[str, float] = {}


@lru_cache(1)
def _slots(_loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    """Return the limit of this process's requests; a forked child has another event loop."""
    return asyncio.Semaphore(MAX_REQUESTS)


class WrongRange(OSError):
    """An answer is shorter or longer than the range."""

    def __init__(self, part: _Part, stop: int) -> None:
        super().__init__(f"asked for bytes {part.start} to {part.stop}, got them up to {stop}")


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
        self.store = split_url(path).host or path.partition("/")[0]
        self.todo = _split([_Part(start, self.stop)], PART_BYTES)
        self.came = 0
        self.requests = 0
        self.attempts = Attempts(retry)
        self.not_before = 0.0

    @property
    def _in_flight(self) -> int:
        """Parts to request at a time."""
        is_fast = _part_seconds.get(self.store, 0.0) < _FAST_SECONDS
        several = HTTP_IN_FLIGHT if _is_http(self.fs) else IN_FLIGHT
        return 1 if is_fast or self.attempts.failures else several

    async def run(self) -> None:
        """Request parts one at a time, and several at a time from a slow store.

        Raises:
            TruncatedShard: The file ends before the range does.
            StorageError: Any other failure; the message has the bytes received and the requests
                sent.
        """
        while self.todo:
            count = self._in_flight
            workers = [asyncio.create_task(self._work(count)) for _ in range(count)]
            try:
                await asyncio.gather(*workers)
            finally:
                while workers:  # left behind, they would keep an error's frames and the memory
                    workers.pop().cancel()

    async def _work(self, count: int) -> None:
        while self.todo and self._in_flight == count:
            await self._fetch()

    async def _fetch(self) -> None:
        """Fetch the next part, or schedule a retry."""
        part = self.todo.popleft()
        await asyncio.sleep(self.not_before - time.monotonic())
        async with _slots(asyncio.get_running_loop()):
            asked = time.monotonic()
            self.requests += 1
            try:
                is_part = await (self._stream(part) if _is_http(self.fs) else self._cat(part))
            except Exception as error:
                await self._check_end(error)
                self._retry(part, asked, error)
                return
        if is_part:
            _part_seconds[self.store] = time.monotonic() - asked
        else:  # the server ignores ranges and sent the whole file
            self.todo.clear()
            part = _Part(self.start, self.stop)
        self.came += part.stop - part.start
        self.attempts.note_progress()

    async def _cat(self, part: _Part) -> bool:
        """Fetch a part with ``cat_file``."""
        # The base class's cat_file opens a buffered file that reads 5 MiB ahead.
        plain = self.fs.async_impl or "cat_file" in vars(type(self.fs))
        how: dict[str, Any] = {"start": part.start, "end": part.stop}
        how |= {} if plain else {"cache_type": "none"}
        data = await call(self.fs, "cat_file", self.path, self.timeout, **how)
        if len(data) != part.stop - part.start:
            raise WrongRange(part, part.start + len(data))
        self.view[part.start - self.start : part.stop - self.start] = data
        return True

    async def _stream(self, part: _Part) -> bool:
        """Fetch a part over HTTP; return whether it was that, or the whole file."""
        headers = {"Range": f"bytes={part.start}-{part.stop - 1}"}
        async with time_limit(self.timeout), _get(self.fs, self.path, headers) as response:
            is_part: bool = response.status == 206
            at, stop = part if is_part else (0, self.stop)
            async for chunk in response.content.iter_any():
                wanted = memoryview(chunk)[max(self.start - at, 0) : stop - at]
                place = max(at - self.start, 0)
                self.view[place : place + len(wanted)] = wanted
                at += len(chunk)
                if at > stop:
                    break
        if at < stop or (is_part and at > stop):
            raise WrongRange(part, at)
        return is_part

    async def _check_end(self, error: Exception) -> None:
        """Raise TruncatedShard if an error was because the file ends before the range does."""
        is_out_of_range = _OUT_OF_RANGE.search(str(error)) or getattr(error, "status", None) == 416
        if isinstance(error, WrongRange) or is_out_of_range:
            size = None
            with suppress(Exception):
                self.fs.invalidate_cache()
                size = await call(self.fs, "size", self.path, self.timeout)
            if size is not None and size < self.stop:
                message = f"expected bytes {self.start} to {self.stop}, the file has {size}"
                raise TruncatedShard(message) from error

    def _retry(self, part: _Part, asked: float, error: Exception) -> None:
        pause = self.attempts.pause_after(error, asked)
        what = (
            f"{self.came} of {len(self.view)} bytes came (requests: {self.requests}): "
            f"{type(error).__name__}: {redact(str(error), self.path)}"
        )
        if pause is None:
            message = f"cannot read bytes {self.start} to {self.stop}, {what}"
            raise StorageError(message) from error
        if self.attempts.failures >= _LOUD_FAILURES:
            log.warning("%s: %s; trying again in %.1f s", redact_url(self.path), what, pause)
        self.not_before = max(self.not_before, time.monotonic() + pause)
        self.todo.appendleft(part)
        if not hasattr(error, "status") and getattr(error, "errno", None) != errno.EBUSY:
            # The connection was closed or too slow: smaller parts may get through.
            half = (part.stop - part.start + 1) // 2
            self.todo = _split(self.todo, max(half, LEAST_PART_BYTES))


def _is_http(fs: Any) -> bool:
    return bool(fs.async_impl and "https" in fs.protocol)


def _split(parts: Iterable[_Part], step: int) -> collections.deque[_Part]:
    return collections.deque(
        _Part(start, min(start + step, part.stop))
        for part in parts
        for start in range(part.start, part.stop, step)
    )


@asynccontextmanager
async def _get(fs: Any, path: str, headers: Mapping[str, str]) -> AsyncIterator[Any]:
    """Send a GET request to an HTTP server; yield the response."""
    session = await fs.set_session()
    headers = {**fs.kwargs.get("headers", {}), "Accept-Encoding": "identity", **headers}
    async with session.get(fs.encode_url(path), **{**fs.kwargs, "headers": headers}) as response:
        if response.status == 404:
            raise FileNotFoundError(path)
        response.raise_for_status()
        yield response


def read_file(fs: Any, path: str, max_bytes: int, retry: Retry) -> bytes:
    """Return a whole file with one request; never hold more than ``max_bytes``.

    Raises:
        StorageError: The file is larger.
    """
    # A buffered file allocates everything that is requested from it.
    bounds = {} if max_bytes >= 1 << 40 else {"start": 0, "end": max_bytes + 1}

    async def send() -> bytes:
        if _is_http(fs):
            async with time_limit(retry.deadline):
                data = await _stream(fs, path, max_bytes)
        else:
            data = await call(fs, "cat_file", path, retry.deadline, **bounds)
        if len(data) > max_bytes:
            raise Refused(f"expected a file of at most {max_bytes} bytes, got {len(data)} or more")
        return bytes(data)

    return run(retried(send, retry))


async def _stream(fs: Any, path: str, max_bytes: int) -> bytearray:
    """Read an HTTP body in chunks, because a server may send it endlessly, or compress it."""
    data = bytearray()
    async with _get(fs, path, {}) as response:
        if "Content-Encoding" in response.headers:
            raise Refused("expected the file as it is, the server compressed it")
        async for chunk in response.content.iter_any():
            data += chunk
            if len(data) > max_bytes:
                break
    return data
