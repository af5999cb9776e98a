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
from collections.abc import AsyncIterator, Mapping, Sequence
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


class Part(NamedTuple):
    """The bytes ``[start, start + len(view))`` of a file, and where to put them."""

    start: int
    view: memoryview

    @property
    def stop(self) -> int:
        """End of the bytes."""
        return self.start + len(self.view)


class WrongRange(OSError):
    """An answer is shorter or longer than the range."""

    def __init__(self, part: Part, stop: int) -> None:
        super().__init__(f"asked for bytes {part.start} to {part.stop}, got them up to {stop}")


class OtherVersion(StorageError):
    """A file is another version than the one that was asked for."""


class RangeRead:
    """A read of some ranges of a file.

    Args:
        target: The file.
        parts: The ranges. Their memory is filled by the event loop's thread, a moment longer than
            the read if it is canceled.
        retry: When to give up.
        version: What the file's version must be, see :class:`Listed`; empty for any.

    Attributes:
        is_same: Whether an answer had that version.
        todo: What to request.
        part_bytes: Size of a part.
        most_in_flight: Number of concurrent requests.
        received: Bytes received.
        requests: Requests sent.
        attempts: Consecutive failures.
    """

    def __init__(
        self, target: Target, parts: Sequence[Part], retry: Retry, version: str = ""
    ) -> None:
        self.target = target
        self.parts = [part for part in parts if part.view]
        self.version = version
        self.is_same = False
        self.timeout = retry.timeout
        self.connection = target.connection
        self.todo = collections.deque(self.parts)
        self.part_bytes, self.most_in_flight = STREAMED if _is_streamed(target.fs) else BUFFERED
        self.received = 0
        self.requests = 0
        self.attempts = Attempts(retry)

    @property
    def _bounds(self) -> tuple[int, int]:
        """The first byte of all ranges, and their end."""
        return min(part.start for part in self.parts), max(part.stop for part in self.parts)

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
            start, view = self.todo.popleft()
            part = Part(start, view[: self.part_bytes])
            if len(view) > self.part_bytes:
                self.todo.appendleft(Part(part.stop, view[self.part_bytes :]))
            pause = 0.0
            async with self.connection.slots:
                asked = time.monotonic()
                self.requests += 1
                try:
                    await self._fetch(part)
                    self.target.note_answer()
                    self.attempts.note_progress()
                except OtherVersion:
                    raise
                except Exception as error:
                    if await self.target.is_renewed(error):
                        self.todo.appendleft(part)
                        continue
                    await self._check_end(error)
                    pause = self._retry(part, asked, error)
            # The other workers end with the parts that they have requested.
            await asyncio.sleep(pause)

    async def _fetch(self, part: Part) -> None:
        """Fetch a part into its place; if the server ignores ranges, everything."""
        async with (
            time_limit(self.timeout),
            _request(self.target, (part.start, part.stop)) as (
                ranged,
                told,
                chunks,
            ),
        ):
            self._check_version(told)
            wanted, at = ([part], part.start) if ranged else (self.parts, 0)
            stop = max(each.stop for each in wanted)
            async for chunk in chunks:
                for each in wanted:
                    own = memoryview(chunk)[max(each.start - at, 0) : max(each.stop - at, 0)]
                    place = max(at - each.start, 0)
                    each.view[place : place + len(own)] = own
                at += len(chunk)
                if at > stop:
                    break
        if at < stop or (ranged and at > stop):
            raise WrongRange(part, at)
        if ranged:
            self.connection.has_ranges = True
        else:
            self.todo.clear()
        self.received += sum(len(each.view) for each in wanted)

    def _check_version(self, told: Mapping[str, Any]) -> None:
        """Compare what an answer tells of the file with its version, which begins with its size."""
        name, equals, value = self.version.partition(" ")[2].partition("=")
        if equals and told.get(name) is not None:
            if str(told[name]) != value:
                raise OtherVersion(f"expected {name}={value}, got {told[name]}")
            self.is_same = True

    async def _check_end(self, error: Exception) -> None:
        """Raise TruncatedShard if an error was because the file ends before the range does."""
        is_out_of_range = _OUT_OF_RANGE.search(str(error)) or getattr(error, "status", None) == 416
        if isinstance(error, WrongRange) or is_out_of_range:
            size = None
            with suppress(Exception):
                self.target.fs.invalidate_cache()
                async with time_limit(self.timeout):
                    size = await call(self.target.fs, "size", self.target.path)
            start, stop = self._bounds
            if size is not None and size < stop:
                message = f"expected bytes {start} to {stop}, the file has {size}"
                raise TruncatedShard(message) from error

    def _retry(self, part: Part, asked: float, error: Exception) -> float:
        """Schedule a part again, in smaller parts if need be; return the pause before it."""
        pause = self.attempts.pause_after(error, asked)
        refused = "connection refused: " if is_refused(error) else ""
        total = sum(len(each.view) for each in self.parts)
        what = (
            f"{self.received} of {total} bytes received (requests: {self.requests}): "
            f"{refused}{type(error).__name__}: {redact(str(error), self.target.path)}"
        )
        if pause is None:
            start, stop = self._bounds
            message = f"cannot read bytes {start} to {stop}, {what}"
            raise StorageError(message) from error
        if self.attempts.failures >= _LOUD_FAILURES:
            log.warning("%s: %s; trying again in %.1f s", redact_url(self.target.path), what, pause)
        self.todo.appendleft(part)
        if not hasattr(error, "status") and getattr(error, "errno", None) != errno.EBUSY:
            # The connection was closed or too slow: smaller parts may get through.
            half = (len(part.view) + 1) // 2
            self.part_bytes = max(min(half, self.part_bytes), LEAST_PART_BYTES)
        return pause


def _is_streamed(fs: Any) -> bool:
    """Return whether bodies come in chunks, which take no memory: over HTTP, and from s3fs."""
    return fs.async_impl and not {"https", "s3"}.isdisjoint(fs.protocol)


@asynccontextmanager
async def _request(
    target: Target, part: tuple[int, int] | None
) -> AsyncIterator[tuple[bool, Mapping[str, Any], AsyncIterator[bytes]]]:
    """Request ``[start, stop)`` of a file, or all of it.

    Yields:
        Whether that part comes, what the store tells of the file, and the bytes.
    """
    fs, path = target.fs, target.path
    if not _is_streamed(fs):
        # The base class's cat_file opens a buffered file that reads 5 MiB ahead.
        plain = fs.async_impl or "cat_file" in vars(type(fs))
        how: dict[str, Any] = {} if plain else {"cache_type": "none"}
        how |= {"start": part[0], "end": part[1]} if part else {}
        yield True, {}, _one(await call(fs, "cat_file", path, **how))
        return
    wanted = {"Range": f"bytes={part[0]}-{part[1] - 1}"} if part else {}
    if "https" not in fs.protocol:
        bucket, key, version = fs.split_path(path)
        wanted |= {"VersionId": version} if version else {}
        # What cat_file calls, too; it would join the chunks of the body.
        answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, **wanted)
        # Not ``async with``: until 2025, aiobotocore entered what the body wraps.
        with closing(answer["Body"]) as body:
            yield True, answer, body.iter_chunks(_CHUNK_BYTES)
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
        yield response.status == 206, response.headers, response.content.iter_any()


async def has_ranges(target: Target, retry: Retry) -> bool:
    """Return whether a store sends ranges; one request to a host that has not sent one so far."""
    connection = target.connection
    if not _is_streamed(target.fs) or connection.has_ranges:
        return True

    async def send() -> None:
        async with time_limit(retry.timeout), _request(target, (0, 1)) as (ranged, _, _):
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
    part = None if max_bytes is None or is_streamed else (0, max_bytes + 1)
    # Only a stream tells a large file from a silent server.
    timeout = retry.timeout if is_streamed else retry.deadline

    async def send() -> bytes:
        data, clock = bytearray(), asyncio.get_running_loop().time
        end = clock() + retry.deadline
        async with time_limit(timeout) as limit, _request(target, part) as (_, _, chunks):
            async for chunk in chunks:
                limit.reschedule(min(clock() + timeout, end))
                data += chunk
                if len(data) > most:
                    message = f"expected a file of at most {most} bytes, got {len(data)} or more"
                    raise Refused(message)
        return bytes(data)

    return run(retried(send, target, retry))
