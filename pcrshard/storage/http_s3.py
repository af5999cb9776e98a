"""Exact ranged reads from remote stores: into the caller's memory, checked, tried again.

A read is resumed after the last byte that came.

HTTP and S3 are streamed, because their file systems' own ``cat_file`` loses what came before a cut,
gives a short or a whole file without a word, and ends after five minutes however well it goes.
Other stores are asked for the rest of the range at once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from ..errors import StorageError, TruncatedShard, harmless
from ..redaction import get_logger, redact, redact_url
from .retry import PROGRESS_BYTES, Cancel, Cancelled, Refused, Retry, asked_pause, is_hopeless

# From a server that ignores Range this much is read and dropped to come to the start of a range;
# more is refused.
_MAX_SKIP = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)", re.IGNORECASE)
_OUT_OF_RANGE = re.compile(r"invalidrange|range (is )?not satisfiable", re.IGNORECASE)
_POLL_SECONDS = 0.2
_PATIENT_FAILURES = 3
_MAX_REPLACED = 3
log = get_logger(__name__)


class _Reply(NamedTuple):
    """The head of a store's answer.

    ``content_range`` is ``None`` if it sends the whole file, of ``length`` bytes.
    """

    content_range: str | None
    length: int | None
    tag: str | None
    chunks: AsyncIterator[bytes]


class Transfer:
    """The state of one range: what came, and of which version of the file.

    Args:
        start: Absolute first byte.
        view: Where the bytes go.
    """

    def __init__(self, start: int, view: memoryview) -> None:
        self.start = start
        self.view = view
        self.done = 0
        self.tag: str | None = None
        self.num_replaced = 0
        # The last byte that counted as progress, and when it came.
        self.most = 0
        self.last_progress = time.monotonic()
        self._lock = threading.Lock()
        self._abandoned = False

    @property
    def stop(self) -> int:
        """Absolute byte after the last one."""
        return self.start + len(self.view)

    @property
    def position(self) -> int:
        """Absolute byte that comes next."""
        return self.start + self.done

    @property
    def complete(self) -> bool:
        """Whether every byte is there."""
        return self.done == len(self.view)

    @property
    def wanted(self) -> str:
        """The range, for errors."""
        return f"bytes {self.start} to {self.stop}"

    def seconds_left(self, deadline: float) -> float:
        """Seconds until the time without progress reaches the deadline."""
        return self.last_progress + deadline - time.monotonic()

    def begin(self, reply: _Reply) -> int:
        """Check the head of an answer.

        Returns:
            How many bytes of its body stand before those that are wanted.
        """
        if self.tag and reply.tag != self.tag:
            self._start_again()
        self.tag = reply.tag
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
        if match is None or int(match[1]) != self.position or int(match[2]) >= self.stop:
            raise StorageError(
                f"asked for bytes {self.position} to {self.stop}, got {reply.content_range!r}"
            )
        return 0

    def _check_total(self, total: str) -> None:
        if total.isdecimal() and int(total) < self.stop:
            raise TruncatedShard(f"expected {self.wanted}, the file has {total}")

    def _start_again(self) -> None:
        self.done = 0
        self.most = 0
        self.tag = None
        self.num_replaced += 1
        # What begins again and again would never end.
        kind = StorageError if self.num_replaced < _MAX_REPLACED else Refused
        raise kind("the file was replaced while it was read")

    def put(self, chunk: bytes | memoryview, *, whole_file: bool) -> None:
        """Take bytes of a body; of a whole file those after the range are left."""
        room = len(self.view) - self.done
        if len(chunk) > room and not whole_file:
            raise StorageError(f"asked for {self.wanted}, got more")
        count = min(len(chunk), room)
        with self._lock:
            if self._abandoned:
                raise Cancelled("the read was cancelled")
            self.view[self.done : self.done + count] = chunk[:count]
        self.done += count
        if self.done - self.most >= PROGRESS_BYTES:
            self.most = self.done
            self.last_progress = time.monotonic()

    def abandon(self) -> None:
        """Put no more into the view, which others may use from now on.

        A request that runs in another thread ends a little later.
        """
        with self._lock:
            self._abandoned = True


def read_into(
    fs: Any,
    path: str,
    transfer: Transfer,
    retry: Retry,
    cancel: Cancel = None,
) -> None:
    """Fill a transfer from a remote file system.

    Args:
        fs: The fsspec file system, made in this process.
        path: The file, as the file system calls it.
        transfer: What is wanted; filled in place.
        retry: When to give up.
        cancel: Ends the transfer from another thread, within a fraction of a second.

    Raises:
        TruncatedShard: The file ends before the range.
        Cancelled: By ``cancel``.
        StorageError: All else; says how often it was tried and how far it came.
    """
    attempt = _attempt_of(fs, path, transfer, retry)
    cancel = cancel or threading.Event()
    failures = 0
    requests = 0
    while not transfer.complete:
        before = transfer.most
        requests += 1
        error = _try(attempt, cancel)
        if transfer.complete:
            return
        failures = 1 if transfer.most > before else failures + 1
        left = transfer.seconds_left(retry.deadline)
        if is_hopeless(error) or failures >= retry.attempts or left <= 0:
            raise _final(path, error, transfer, requests) from harmless(error, path)
        pause = max(retry.delay(failures), min(asked_pause(error), left))
        _log_failure(path, error, transfer, failures, pause)
        if cancel.wait(pause):
            raise Cancelled("the read was cancelled")


def _try(attempt: Callable[[threading.Event], None], cancel: threading.Event) -> Exception:
    """What went wrong in one attempt; what nothing can help is raised."""
    try:
        attempt(cancel)
    except (Cancelled, TruncatedShard):
        raise
    except Exception as error:
        return error
    return StorageError("the connection ended early")


def _log_failure(
    path: str,
    error: Exception,
    transfer: Transfer,
    failures: int,
    pause: float,
) -> None:
    level = logging.INFO if failures < _PATIENT_FAILURES else logging.WARNING
    came = f"{transfer.done} of {len(transfer.view)} bytes came"
    shown = redact_url(path)
    log.log(level, "%s: %s; %s, trying again in %.1f s", shown, _describe(path, error), came, pause)


def _describe(path: str, error: Exception) -> str:
    return f"{type(error).__name__}: {redact(str(error), path)}"


def _final(
    path: str,
    error: Exception,
    transfer: Transfer,
    requests: int,
) -> StorageError:
    what = _describe(path, error)
    if isinstance(error, StorageError):
        what = redact(str(error), path)
    elif isinstance(error, TimeoutError) and not str(error):
        what = "the server is too slow or silent"
    tried = "1 request" if requests == 1 else f"{requests} requests"
    came = f"{transfer.done} of {len(transfer.view)} came in {tried}"
    return StorageError(f"cannot read {transfer.wanted}, {came}: {what}")


def _attempt_of(
    fs: Any,
    path: str,
    transfer: Transfer,
    retry: Retry,
) -> Callable[[threading.Event], None]:
    """One request, as a function that may be called again for the rest."""
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    openers = [opener for name, opener in _STREAMS.items() if name in protocols]
    if not (openers and fs.async_impl):
        return lambda _: _cat(fs, path, transfer)

    def attempt(cancel: threading.Event) -> None:
        opened = openers[0](fs, path, transfer, retry.timeout)
        _wait(fs.loop, _stream(opened, transfer, retry), transfer, cancel)

    return attempt


def _cat(
    fs: Any,
    path: str,
    transfer: Transfer,
) -> None:
    # The base class's cat_file opens a buffered file, which reads 5 MiB ahead.
    plain = fs.async_impl or "cat_file" in vars(type(fs))
    options = {} if plain else {"cache_type": "none"}
    data = fs.cat_file(path, start=transfer.position, end=transfer.stop, **options)
    if len(data) > transfer.stop - transfer.position:
        raise Refused(
            f"asked for {transfer.wanted}, got {len(data)} bytes: the store ignores ranges"
        )
    transfer.put(data, whole_file=False)
    if not transfer.complete and transfer.position >= fs.size(path):
        raise TruncatedShard(f"expected {transfer.wanted}, the file has {fs.size(path)}")


def _wait(
    loop: asyncio.AbstractEventLoop,
    coroutine: Any,
    transfer: Transfer,
    cancel: threading.Event,
) -> None:
    """Run a coroutine on the file system's own loop; whatever ends this wait ends the request."""
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        while not concurrent.futures.wait([future], timeout=_POLL_SECONDS).done:
            if cancel.is_set():
                raise Cancelled("the read was cancelled")
        future.result()
    except BaseException:
        if not future.done():
            transfer.abandon()
        raise
    finally:
        future.cancel()


async def _stream(
    opened: contextlib.AbstractAsyncContextManager[_Reply],
    transfer: Transfer,
    retry: Retry,
) -> None:
    async with asyncio.timeout(retry.timeout) as patience:
        async with opened as reply:
            skip = transfer.begin(reply)
            async for chunk in reply.chunks:
                # A server that drips is as bad as a silent one.
                seconds = min(retry.timeout, transfer.seconds_left(retry.deadline))
                patience.reschedule(asyncio.get_running_loop().time() + seconds)
                dropped = min(skip, len(chunk))
                skip -= dropped
                transfer.put(memoryview(chunk)[dropped:], whole_file=reply.content_range is None)
                if transfer.complete and reply.content_range is None:
                    return


@contextlib.asynccontextmanager
async def _http_get(
    fs: Any,
    url: str,
    transfer: Transfer,
    silence: float,
) -> AsyncIterator[_Reply]:
    session = await fs.set_session()
    options = dict(fs.kwargs)
    options["headers"] = {
        **fs.kwargs.get("headers", {}),
        "Range": f"bytes={transfer.position}-{transfer.stop - 1}",
        "Accept-Encoding": "identity",
    }
    if "timeout" not in options:
        # The session's default ends every request after five minutes; ours is about silence.
        timeout = type(session.timeout)
        options["timeout"] = timeout(total=None, sock_connect=silence, sock_read=silence)
    async with session.get(fs.encode_url(url), **options) as reply:
        if reply.status == 416:
            raise TruncatedShard(f"expected {transfer.wanted}, the server has none of them")
        fs._raise_not_found_for_status(reply, url)
        yield _http_reply(reply)


def _http_reply(reply: Any) -> _Reply:
    headers = reply.headers
    content_range = headers.get("Content-Range", "") if reply.status == 206 else None
    # With an encoding the length is that of what is sent, not of the file.
    length = None if "Content-Encoding" in headers else reply.content_length
    tag = headers.get("ETag") or headers.get("Last-Modified") or ""
    return _Reply(content_range, length, tag.removeprefix("W/") or None, reply.content.iter_any())


@contextlib.asynccontextmanager
async def _s3_get(
    fs: Any,
    path: str,
    transfer: Transfer,
    _: float,
) -> AsyncIterator[_Reply]:
    bucket, key, version = fs.split_path(path)
    wanted = f"bytes={transfer.position}-{transfer.stop - 1}"
    request = {"Bucket": bucket, "Key": key, "Range": wanted}
    if version:
        request["VersionId"] = version
    try:
        reply = await fs._call_s3("get_object", **request)
    except OSError as error:
        if _OUT_OF_RANGE.search(str(error)):
            message = f"expected {transfer.wanted}, the store has none of them"
            raise TruncatedShard(message) from harmless(error)
        raise
    body = reply["Body"]
    try:
        length = reply.get("ContentLength")
        yield _Reply(reply.get("ContentRange"), length, reply.get("ETag"), _chunks(body))
    finally:
        body.close()


_STREAMS = {"http": _http_get, "https": _http_get, "s3": _s3_get}


async def _chunks(body: Any) -> AsyncIterator[bytes]:
    while chunk := await body.read(1 << 18):
        yield chunk


def call(
    fs: Any,
    name: str,
    path: str,
    *,
    seconds: float = 30.0,
) -> Any:
    """A small request by a file system's own method.

    It ends after some seconds where it can be ended.

    Raises:
        TimeoutError: No answer.
    """
    if not fs.async_impl:
        return getattr(fs, name)(path)
    future = asyncio.run_coroutine_threadsafe(getattr(fs, f"_{name}")(path), fs.loop)
    try:
        return future.result(seconds)
    except concurrent.futures.TimeoutError:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    finally:
        future.cancel()
