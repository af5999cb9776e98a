"""Read ranges of remote files in parts; each part is checked and retried alone.

Bodies over HTTP and from S3 are streamed into place, which takes a tenth to a third less CPU time
than ``cat_file``, and no memory. A part must have the requested length. Only the caller's checksums
can tell which version of the file its bytes come from.
"""

from __future__ import annotations

import asyncio
import collections
import errno
import math
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from typing import Any, NamedTuple

from ..errors import StorageError, TruncatedShard
from ..redaction import get_logger, redact, redact_url
from .retry import Attempts, Refused, Retry
from .stores import Target, call, is_refused, retried, run, time_limit

log = get_logger(__name__)
# Size of a part, and concurrent requests of one read. Measured: a request to an object store takes
# 2 to 4 ms of CPU time, most of it in botocore. Streamed bodies need no buffer of their own.
STREAMED = (8 << 20, 8)
BUFFERED = (4 << 20, 3)
# Parts are not halved below this size.
LEAST_PART_BYTES = 64 << 10
_LOUD_FAILURES = 3
_CHUNK_BYTES = 256 << 10
_OUT_OF_RANGE = re.compile(r"invalidrange|range (is )?not satisfiable", re.IGNORECASE)
# glibc returns freed memory to the system above thresholds that rise with the largest block freed
# so far. Without this block, which is never touched, the memory of each part would fault in again,
# which was measured to cost as much CPU time as the request itself.
bytes(16 << 20)


class _Part(NamedTuple):
    """The bytes ``[start, stop)`` of a file."""

    start: int
    stop: int


class WrongRange(OSError):
    """An answer is shorter or longer than the range."""

    def __init__(self, part: _Part, stop: int) -> None:
        super().__init__(f"asked for bytes {part.start} to {part.stop}, got them up to {stop}")


class RangeRead:
    """A read of one range of a file.

    Args:
        target: The file.
        start: Absolute first byte.
        view: Filled by the event loop's thread, a moment longer than the read if it is canceled.
        retry: When to give up.

    Attributes:
        todo: What to request.
        part_bytes: Size of a part.
        most_in_flight: Number of concurrent requests.
        received: Bytes received.
        requests: Requests sent.
        attempts: Consecutive failures.
    """

    def __init__(self, target: Target, start: int, view: memoryview, retry: Retry) -> None:
        self.target = target
        self.all = _Part(start, start + len(view))
        self.view = view
        self.timeout = retry.timeout
        self.connection = target.connection
        self.todo = collections.deque([self.all] if view else [])
        self.part_bytes, self.most_in_flight = STREAMED if _is_streamed(target.fs) else BUFFERED
        self.received = 0
        self.requests = 0
        self.attempts = Attempts(retry)

    @property
    def _in_flight(self) -> int:
        """Parts to request at a time."""
        is_known = not self.attempts.failures and self.connection.has_ranges
        return self.most_in_flight if is_known else 1

    async def run(self) -> None:
        """Request all parts, several at a time.

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
            start, stop = self.todo.popleft()
            part = _Part(start, min(start + self.part_bytes, stop))
            if part.stop < stop:
                self.todo.appendleft(_Part(part.stop, stop))
            pause = 0.0
            async with self.connection.slots:
                asked = time.monotonic()
                self.requests += 1
                try:
                    await self._fetch(part)
                    self.target.note_answer()
                    self.attempts.note_progress()
                except Exception as error:
                    if await self.target.is_renewed(error):
                        self.todo.appendleft(part)
                        continue
                    await self._check_end(error)
                    pause = self._retry(part, asked, error)
            # The other workers end with the parts that they have requested.
            await asyncio.sleep(pause)

    async def _fetch(self, part: _Part) -> None:
        """Fetch a part into its place; if the server ignores ranges, everything."""
        async with time_limit(self.timeout), _request(self.target, part) as (ranged, chunks):
            wanted, at = (part, part.start) if ranged else (self.all, 0)
            async for chunk in chunks:
                own = memoryview(chunk)[max(wanted.start - at, 0) : wanted.stop - at]
                place = max(at, wanted.start) - self.all.start
                self.view[place : place + len(own)] = own
                at += len(chunk)
                if at > wanted.stop:
                    break
        if at < wanted.stop or (ranged and at > wanted.stop):
            raise WrongRange(wanted, at)
        if ranged:
            self.connection.has_ranges = True
        else:
            self.todo.clear()
        self.received += wanted.stop - wanted.start

    async def _check_end(self, error: Exception) -> None:
        """Raise TruncatedShard if an error was because the file ends before the range does."""
        is_out_of_range = _OUT_OF_RANGE.search(str(error)) or getattr(error, "status", None) == 416
        if isinstance(error, WrongRange) or is_out_of_range:
            size = None
            with suppress(Exception):
                self.target.fs.invalidate_cache()
                async with time_limit(self.timeout):
                    size = await call(self.target.fs, "size", self.target.path)
            start, stop = self.all
            if size is not None and size < stop:
                message = f"expected bytes {start} to {stop}, the file has {size}"
                raise TruncatedShard(message) from error

    def _retry(self, part: _Part, asked: float, error: Exception) -> float:
        """Schedule a part again, in smaller parts if need be; return the pause before it."""
        pause = self.attempts.pause_after(error, asked)
        refused = "connection refused: " if is_refused(error) else ""
        refused = "connection refused: " if is_refused(error) else ""
        what = (
            f"{self.received} of {len(self.view)} bytes received (requests: {self.requests}): "
            f"{refused}{type(error).__name__}: {redact(str(error), self.target.path)}"
        )
        if pause is None:
            message = f"cannot read bytes {self.all.start} to {self.all.stop}, {what}"
            raise StorageError(message) from error
        if self.attempts.failures >= _LOUD_FAILURES:
            log.warning("%s: %s; trying again in %.1f s", redact_url(self.target.path), what, pause)
        self.todo.appendleft(part)
        if not hasattr(error, "status") and getattr(error, "errno", None) != errno.EBUSY:
            # The connection was closed or too slow: smaller parts may get through.
            half = (part.stop - part.start + 1) // 2
            self.part_bytes = max(min(half, self.part_bytes), LEAST_PART_BYTES)
        return pause


def _is_streamed(fs: Any) -> bool:
    """Return whether bodies come in chunks, which take no memory: over HTTP, and from s3fs."""
    return fs.async_impl and not {"https", "s3"}.isdisjoint(fs.protocol)


@asynccontextmanager
async def _request(
    target: Target, part: _Part | None
) -> AsyncIterator[tuple[bool, AsyncIterator[bytes]]]:
    """Request a part of a file, or all of it; yield whether that part comes, and its bytes."""
    fs, path = target.fs, target.path
    if not _is_streamed(fs):
        # The base class's cat_file opens a buffered file that reads 5 MiB ahead.
        plain = fs.async_impl or "cat_file" in vars(type(fs))
        how: dict[str, Any] = {} if plain else {"cache_type": "none"}
        how |= {"start": part.start, "end": part.stop} if part else {}
        yield True, _one(await call(fs, "cat_file", path, **how))
        return
    wanted = {"Range": f"bytes={part.start}-{part.stop - 1}"} if part else {}
    if "https" not in fs.protocol:
        bucket, key, version = fs.split_path(path)
        wanted |= {"VersionId": version} if version else {}
        # What cat_file calls, too; it would join the chunks of the body.
        answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, **wanted)
        # Not ``async with``: until 2025, aiobotocore entered what the body wraps.
        with closing(answer["Body"]) as body:
            yield True, body.iter_chunks(_CHUNK_BYTES)
        return
    session = await fs.set_session()
    headers = {**fs.kwargs.get("headers", {}), "Accept-Encoding": "identity", **wanted}
    async with session.get(fs.encode_url(path), **{**fs.kwargs, "headers": headers}) as response:
        if response.status == 404:
            raise FileNotFoundError(path)
        if response.status in (401, 403):
            raise PermissionError(f"{response.status} {response.reason}")
        response.raise_for_status()
        if part is None and "Content-Encoding" in response.headers:
            raise Refused("expected the file as it is, the server compressed it")
        yield response.status == 206, response.content.iter_any()


async def has_ranges(target: Target, retry: Retry) -> bool:
    """Return whether a store sends ranges; one request to a host that has not sent one so far."""
    connection = target.connection
    if not _is_streamed(target.fs) or connection.has_ranges:
        return True

    async def send() -> None:
        async with time_limit(retry.timeout), _request(target, _Part(0, 1)) as (ranged, _):
            connection.has_ranges |= ranged

    try:
        await retried(send, target, retry)
    except Exception as error:
        # No byte of an empty file can be asked for.
        if getattr(error, "status", None) != 416 and not _OUT_OF_RANGE.search(str(error)):
            raise
        return True
    return connection.has_ranges


async def _one(data: bytes) -> AsyncIterator[bytes]:
    yield data


def read_file(target: Target, max_bytes: int | None, retry: Retry) -> bytes:
    """Return a whole file with one request; never hold more than ``max_bytes``.

    Raises:
        StorageError: The file is larger.
    """
    most = math.inf if max_bytes is None else max_bytes
    is_streamed = _is_streamed(target.fs)
    # A streamed body is left where the limit is, because a server may send it endlessly.
    part = None if max_bytes is None or is_streamed else _Part(0, max_bytes + 1)
    # Only a stream tells a large file from a silent server.
    timeout = retry.timeout if is_streamed else retry.deadline

    async def send() -> bytes:
        data, clock = bytearray(), asyncio.get_running_loop().time
        end = clock() + retry.deadline
        async with time_limit(timeout) as limit, _request(target, part) as (_, chunks):
            async for chunk in chunks:
                limit.reschedule(min(clock() + timeout, end))
                data += chunk
                if len(data) > most:
                    message = f"expected a file of at most {most} bytes, got {len(data)} or more"
                    raise Refused(message)
        return bytes(data)

    return run(retried(send, target, retry))
