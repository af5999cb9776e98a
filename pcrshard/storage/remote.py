"""Read ranges of remote files in parts, with ``cat_file``; each part is checked and retried alone.

A part must have the requested length. Only the caller's checksums can tell which version of the
file its bytes come from.
"""

from __future__ import annotations

import collections
import concurrent.futures
import errno
import logging
import os
import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import StorageError, TruncatedShard, redacted_cause
from ..memory import Buffer
from ..redaction import get_logger, redact, redact_url, split_url
from .retry import Cancel, Cancelled, Refused, Retry, asked_pause, is_hopeless
from .stores import Request, begin, call, in_thread, result, retried

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
_POLL_SECONDS = 0.2
_LOUD_FAILURES = 3
_OUT_OF_RANGE = re.compile(r"invalidrange|range (is )?not satisfiable", re.IGNORECASE)


class _Part(NamedTuple):
    """The bytes ``[start, stop)`` of a file, and when they were requested (monotonic)."""

    start: int
    stop: int
    asked: float = 0.0


class _Process:
    """State shared by all reads of a process.

    Attributes:
        slots: Limits concurrent requests.
        part_seconds: Duration of the last part, by store. A store that has not returned a range
            yet gets one request at a time, because each answer might be the whole file.
    """

    def __init__(self) -> None:
        self.slots = threading.BoundedSemaphore(MAX_REQUESTS)
        self.part_seconds: dict[str, float] = {}


_process = _Process()
# In a forked child, the parent's requests never complete.
os.register_at_fork(after_in_child=_process.__init__)  # type: ignore[misc]  # of an instance


def read_range(
    fs: Any,
    path: str,
    start: int,
    view: memoryview,
    retry: Retry,
    cancel: Cancel = None,
) -> None:
    """Fill ``view`` with the bytes of a file that start at ``start``.

    Args:
        fs: The fsspec file system.
        path: Path of the file within the file system.
        start: Absolute first byte.
        view: Written only by the caller's thread.
        retry: When to give up.
        cancel: Set by another thread to end the read within a fraction of a second.

    Raises:
        TruncatedShard: The file ends before the range does.
        Cancelled: ``cancel`` was set.
        StorageError: Any other failure; the message has the bytes received and the requests sent.
    """
    read = _Read(fs, path, start, view, retry, cancel)
    try:
        read.run()
    finally:
        for request in read.asked:
            request.cancel()


@dataclass(eq=False)
class _Read:
    """One read, with the arguments of :func:`read_range`; times are monotonic.

    Attributes:
        came: Bytes received.
        requests: Requests sent.
        failures: Consecutive failures.
        not_before: Earliest time of the next request.
        failed: When the last failure was detected.
        todo: Parts to request.
        asked: Parts in flight, by request.
        most: Upper bound of ``in_flight``.
        in_flight: Parts that may be in flight now: one after a failure, then one more per part.
        progress: When the last part arrived.
    """

    fs: Any
    path: str
    start: int
    view: memoryview
    retry: Retry
    cancel: Cancel
    came: int = 0
    requests: int = 0
    failures: int = 0
    not_before: float = 0.0
    failed: float = 0.0

    def __post_init__(self) -> None:
        host = split_url(self.path).host or self.path.partition("/")[0]
        self.store = f"{type(self.fs).__name__} {host}"
        part_bytes = HTTP_PART_BYTES if _is_http(self.fs) else PART_BYTES
        self.most = self.in_flight = BYTES_IN_FLIGHT // part_bytes
        whole = _Part(self.start, self.start + len(self.view))
        self.todo = collections.deque(_split(whole, part_bytes))
        self.asked: dict[Request, _Part] = {}
        self.progress = time.monotonic()

    def run(self) -> None:
        while self.todo or self.asked:
            self._ask()
            self._wait()
            if self.cancel is not None and self.cancel.is_set():
                raise Cancelled("the read was cancelled")
            now = time.monotonic()
            for request, part in list(self.asked.items()):
                late = now >= part.asked + self.retry.timeout
                if request in self.asked and (request.done() or late):
                    del self.asked[request]
                    self._end(request, part)

    def _ask(self) -> None:
        now = time.monotonic()
        # The base class's cat_file opens a buffered file that reads 5 MiB ahead.
        plain = self.fs.async_impl or "cat_file" in vars(type(self.fs))
        options = {} if plain else {"cache_type": "none"}
        is_fast = _process.part_seconds.get(self.store, 0.0) < _FAST_SECONDS
        most = 1 if is_fast else self.in_flight
        slots = _process.slots
        while self.todo and len(self.asked) < most and now >= self.not_before:
            if not slots.acquire(blocking=False):
                return
            part = self.todo.popleft()
            try:
                request = begin(
                    self.fs, "cat_file", self.path, start=part.start, end=part.stop, **options
                )
            except BaseException:
                slots.release()
                raise
            request.add_done_callback(lambda _: slots.release())
            self.asked[request] = part._replace(asked=now)
            self.requests += 1

    def _wait(self) -> None:
        if self.asked:
            done = concurrent.futures.FIRST_COMPLETED
            concurrent.futures.wait(self.asked, timeout=_POLL_SECONDS, return_when=done)
        else:
            pause = self.not_before - time.monotonic()
            time.sleep(min(max(pause, 0.001), _POLL_SECONDS))
            if time.monotonic() > self.progress + self.retry.deadline:
                raise self._gave_up(TimeoutError("the deadline has passed"))

    def _end(self, request: Request, part: _Part) -> None:
        """Store a part that arrived, or schedule a retry."""
        try:
            if not request.done():
                request.cancel()
                raise TimeoutError("the server is too slow or silent")
            try:
                data = request.result()
            except Exception as error:
                if not _is_out_of_range(error):
                    raise
                data = b""  # to be compared with the file's size
            self._put(part, data)
        except TruncatedShard:
            raise
        except Exception as error:
            self._retry(part, error)
        else:
            self.progress = time.monotonic()
            self.failures = 0
            self.in_flight = min(self.in_flight + 1, self.most)

    def _put(self, part: _Part, data: Buffer) -> None:
        if len(data) == part.stop - part.start:
            # An answer from byte 0 might still be a whole file of exactly this size.
            if part.start or self.todo:
                _process.part_seconds[self.store] = time.monotonic() - part.asked
        else:
            size = self._size()
            if size is not None and size < part.stop:
                raise TruncatedShard(
                    f"expected bytes {part.start} to {part.stop}, the file has {size}"
                )
            whole = len(data) == size or (size is None and len(data) >= part.stop)
            if not whole:
                asked = f"bytes {part.start} to {part.stop}"
                raise StorageError(f"asked for {asked}, got {len(data)} bytes")
            # The server ignores ranges and sent the whole file: no other part is needed.
            _process.part_seconds.pop(self.store, None)
            for request in self.asked:
                request.cancel()
            self.asked.clear()
            self.todo.clear()
            part = _Part(self.start, self.start + len(self.view))
            data = memoryview(data)[part.start : part.stop]
            self.came = 0
        self.view[part.start - self.start : part.stop - self.start] = data
        self.came += len(data)

    def _retry(self, part: _Part, error: Exception) -> None:
        # Requests sent before the last failure was detected fail for the same reason.
        self.failures += part.asked >= self.failed
        self.failed = time.monotonic()
        self.in_flight = 1
        left = self.progress + self.retry.deadline - self.failed
        if is_hopeless(error) or self.failures >= self.retry.attempts or left <= 0:
            raise self._gave_up(error) from redacted_cause(error, self.path)
        pause = max(self.retry.delay(self.failures), min(asked_pause(error), left))
        level = logging.INFO if self.failures < _LOUD_FAILURES else logging.WARNING
        came = f"{self.came} of {len(self.view)} bytes came"
        url, why = redact_url(self.path), _describe(error, self.path)
        log.log(level, "%s: %s; %s, trying again in %.1f s", url, why, came, pause)
        self.not_before = max(self.not_before, self.failed + pause)
        self.todo.appendleft(part)
        if not hasattr(error, "status") and getattr(error, "errno", None) != errno.EBUSY:
            # The connection was closed or too slow: smaller parts may get through.
            step = max((part.stop - part.start + 1) // 2, LEAST_PART_BYTES)
            halves = [half for part in self.todo for half in _split(part, step)]
            self.todo = collections.deque(halves)

    def _gave_up(self, error: Exception) -> StorageError:
        stop = self.start + len(self.view)
        tried = "1 request" if self.requests == 1 else f"{self.requests} requests"
        came = f"{self.came} of {len(self.view)} came in {tried}"
        what = _describe(error, self.path)
        return StorageError(f"cannot read bytes {self.start} to {stop}, {came}: {what}")

    def _size(self) -> int | None:
        """Return the file's size, or ``None`` if the store does not report it."""
        with suppress(Exception):
            self.fs.invalidate_cache()
            size: int | None = result(begin(self.fs, "size", self.path), self.retry.timeout)
            return size
        return None


def _is_http(fs: Any) -> bool:
    return "http" in fs.protocol or "https" in fs.protocol


def _split(part: _Part, step: int) -> list[_Part]:
    starts = range(part.start, part.stop, step)
    return [part._replace(start=start, stop=min(start + step, part.stop)) for start in starts]


def _is_out_of_range(error: Exception) -> bool:
    return getattr(error, "status", None) == 416 or bool(_OUT_OF_RANGE.search(str(error)))


def _describe(error: Exception, path: str) -> str:
    text = redact(str(error), path)
    return text if isinstance(error, StorageError) else f"{type(error).__name__}: {text}"


def read_file(fs: Any, path: str, max_bytes: int, retry: Retry) -> bytes:
    """Return a whole file with one request; never hold more than ``max_bytes``.

    Raises:
        StorageError: The file cannot be read or is larger.
    """
    streams = fs.async_impl and _is_http(fs)
    # A buffered file allocates everything that is requested from it.
    bounds = {} if max_bytes >= 1 << 40 else {"start": 0, "end": max_bytes + 1}

    def request() -> bytes:
        if streams:
            end = time.monotonic() + retry.deadline
            stream = in_thread(lambda: _stream(fs, path, max_bytes, end))
            data = result(stream, retry.deadline)
        else:
            try:
                data = call(fs, "cat_file", path, **bounds, seconds=retry.deadline)
            except Exception as error:
                # An empty file has no first byte.
                if _is_out_of_range(error) and not call(fs, "size", path, seconds=retry.timeout):
                    return b""
                raise
        if len(data) > max_bytes:
            raise Refused(f"expected a file of at most {max_bytes} bytes, got {len(data)} or more")
        return bytes(data)

    try:
        return retried(request, retry)
    except StorageError:
        raise
    except Exception as error:
        what = _describe(error, path)
        raise StorageError(f"cannot read the file: {what}") from redacted_cause(error, path)


def _stream(fs: Any, path: str, max_bytes: int, end: float) -> bytearray:
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
            if time.monotonic() > end:
                raise TimeoutError("the server is too slow or silent")
        if len(data) > max_bytes:
            message = f"expected a file of at most {max_bytes} bytes, got {len(data)} or more"
            raise Refused(message)
    return data
