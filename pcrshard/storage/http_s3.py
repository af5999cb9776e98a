"""Exact ranged reads from remote stores: into the caller's memory, checked, tried again, resumed behind the last byte that came.

HTTP and S3 are streamed, because their file systems' own ``cat_file`` loses what came before a cut, gives a short or a whole file
without a word, and ends after five minutes however well it goes. Other stores are asked for the rest of the range at once.
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

from ..errors import StorageError, TruncatedShard, redact
from .retry import PROGRESS_BYTES, Refused, Retry, asked_pause, is_hopeless

# From a server that ignores Range this much is read and dropped to come to the start of a range; more is refused.
_MAX_SKIP = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)", re.IGNORECASE)
_POLL_SECONDS = 0.2
_PATIENT_FAILURES = 3
_MAX_REPLACED = 3
log = logging.getLogger(__name__)


class Cancelled(StorageError):
    """The reader has no more use for the range."""


class _Reply(NamedTuple):
    """The head of a store's answer; ``content_range`` is ``None`` if it sends the whole file, of ``length`` bytes."""

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
        self.start, self.view = start, view
        self.done = 0
        self.tag: str | None = None
        self.num_replaced = 0
        # The last byte that counted as progress, and when it came.
        self.most, self.last_progress = 0, time.monotonic()
        self._lock, self._abandoned = threading.Lock(), False

    @property
    def stop(self) -> int:
        """Absolute byte after the last one."""
        return self.start + len(self.view)

    @property
    def complete(self) -> bool:
        """Whether every byte is there."""
        return self.done == len(self.view)

    def begin(self, reply: _Reply) -> int:
        """Check the head of an answer; how many bytes of its body stand before those that are wanted."""
        if self.tag and reply.tag != self.tag:
            self.done, self.most, self.tag = 0, 0, None
            self.num_replaced += 1
            # What begins again and again would never end.
            kind = StorageError if self.num_replaced < _MAX_REPLACED else Refused
            raise kind("the file was replaced while it was read")
        self.tag = reply.tag
        wanted = self.start + self.done
        first, last, total = wanted, self.stop - 1, str(reply.length)
        if reply.content_range is not None:
            match = _CONTENT_RANGE.fullmatch(reply.content_range)
            first, last, total = (
                (int(match[1]), int(match[2]), match[3]) if match else (-1, -1, "*")
            )
        elif self.start > _MAX_SKIP:
            raise Refused(
                f"asked for bytes {self.start} to {self.stop}, got the whole file: the server ignores Range"
            )
        if total.isdecimal() and int(total) < self.stop:
            raise TruncatedShard(
                f"expected bytes {self.start} to {self.stop}, the file has {total}"
            )
        if first != wanted or last >= self.stop:
            raise StorageError(
                f"asked for bytes {wanted} to {self.stop}, got {reply.content_range!r}"
            )
        return wanted if reply.content_range is None else 0

    def put(self, chunk: bytes | memoryview, *, whole_file: bool) -> None:
        """Take bytes of a body."""
        room = len(self.view) - self.done
        if len(chunk) > room and not whole_file:
            raise StorageError(f"asked for bytes {self.start} to {self.stop}, got more")
        count = min(len(chunk), room)
        with self._lock:
            if self._abandoned:
                raise Cancelled("the read was cancelled")
            self.view[self.done : self.done + count] = chunk[:count]
        self.done += count
        if self.done - self.most >= PROGRESS_BYTES:
            self.most, self.last_progress = self.done, time.monotonic()

    def abandon(self) -> None:
        """Put no more into the view, which others may use from now on; a request that runs in another thread ends a little later."""
        with self._lock:
            self._abandoned = True


def read_into(
    fs: Any, path: str, transfer: Transfer, retry: Retry, cancel: threading.Event | None = None
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
    failures, requests = 0, 0
    while not transfer.complete:
        before = transfer.most
        requests += 1
        try:
            attempt(cancel)
            error: Exception = StorageError("the connection ended early")
        except Exception as caught:
            if isinstance(caught, Cancelled | TruncatedShard):
                raise
            error = caught
        if transfer.complete:
            return
        failures = 1 if transfer.most > before else failures + 1
        late = time.monotonic() - transfer.last_progress >= retry.deadline
        if is_hopeless(error) or failures >= retry.attempts or late:
            # Tracebacks print the cause too, and those of workers end up in the logs of jobs.
            raise _final(error, transfer, requests) from (
                error if redact(str(error)) == str(error) else None
            )
        left = transfer.last_progress + retry.deadline - time.monotonic()
        pause = max(retry.delay(failures), min(asked_pause(error), left))
        log.log(
            logging.INFO if failures < _PATIENT_FAILURES else logging.WARNING,
            "%s: %s: %s; %d of %d bytes came, trying again in %.1f s",
            *(
                redact(path),
                type(error).__name__,
                redact(str(error)),
                transfer.done,
                len(transfer.view),
                pause,
            ),
        )
        if cancel.wait(pause):
            raise Cancelled("the read was cancelled")


def _final(error: Exception, transfer: Transfer, requests: int) -> StorageError:
    tried = "1 request" if requests == 1 else f"{requests} requests"
    what = (
        redact(str(error))
        if isinstance(error, StorageError)
        else f"{type(error).__name__}: {redact(str(error))}"
    )
    what = (
        "the server is too slow or silent"
        if isinstance(error, TimeoutError) and not str(error)
        else what
    )
    return StorageError(
        f"cannot read bytes {transfer.start} to {transfer.stop}, {transfer.done} of {len(transfer.view)} came in {tried}: {what}"
    )


def _attempt_of(
    fs: Any, path: str, transfer: Transfer, retry: Retry
) -> Callable[[threading.Event], None]:
    """One request, as a function that may be called again for the rest."""
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    streams = {"http": _http_get, "https": _http_get, "s3": _s3_get}
    opener = next(
        (streams[name] for name in sorted(protocols & set(streams)) if fs.async_impl), None
    )
    if opener is None:
        return lambda _: _cat(fs, path, transfer)
    return lambda cancel: _wait(
        fs.loop,
        _stream(opener(fs, path, transfer, retry.timeout), transfer, retry),
        transfer,
        cancel,
    )


def _cat(fs: Any, path: str, transfer: Transfer) -> None:
    # The base class's cat_file opens a buffered file, which reads 5 MiB ahead.
    plain = fs.async_impl or "cat_file" in vars(type(fs))
    options = {} if plain else {"cache_type": "none"}
    data = fs.cat_file(path, start=transfer.start + transfer.done, end=transfer.stop, **options)
    if len(data) > len(transfer.view) - transfer.done:
        raise Refused(
            f"asked for bytes {transfer.start} to {transfer.stop}, got {len(data)} bytes: the store ignores ranges"
        )
    transfer.put(data, whole_file=False)
    if not transfer.complete and transfer.start + transfer.done >= fs.size(path):
        raise TruncatedShard(
            f"expected bytes {transfer.start} to {transfer.stop}, the file has {fs.size(path)}"
        )


def _wait(
    loop: asyncio.AbstractEventLoop, coroutine: Any, transfer: Transfer, cancel: threading.Event
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
    opened: contextlib.AbstractAsyncContextManager[_Reply], transfer: Transfer, retry: Retry
) -> None:
    async with asyncio.timeout(retry.timeout) as patience:
        async with opened as reply:
            skip = transfer.begin(reply)
            async for chunk in reply.chunks:
                # A server that drips is as bad as a silent one.
                left = transfer.last_progress + retry.deadline - time.monotonic()
                patience.reschedule(asyncio.get_running_loop().time() + min(retry.timeout, left))
                dropped = min(skip, len(chunk))
                skip -= dropped
                transfer.put(memoryview(chunk)[dropped:], whole_file=reply.content_range is None)
                if transfer.complete and reply.content_range is None:
                    return


@contextlib.asynccontextmanager
async def _http_get(fs: Any, url: str, transfer: Transfer, silence: float) -> AsyncIterator[_Reply]:
    session = await fs.set_session()
    wanted = {
        "Range": f"bytes={transfer.start + transfer.done}-{transfer.stop - 1}",
        "Accept-Encoding": "identity",
    }
    options = {**fs.kwargs, "headers": {**fs.kwargs.get("headers", {}), **wanted}}
    # The session's default ends every request after five minutes; ours is about silence.
    options.setdefault(
        "timeout", type(session.timeout)(total=None, sock_connect=silence, sock_read=silence)
    )
    async with session.get(fs.encode_url(url), **options) as reply:
        if reply.status == 416:
            raise TruncatedShard(
                f"expected bytes {transfer.start} to {transfer.stop}, the server has none of them"
            )
        fs._raise_not_found_for_status(reply, url)
        partial = reply.headers.get("Content-Range", "") if reply.status == 206 else None
        tag = (reply.headers.get("ETag") or reply.headers.get("Last-Modified") or "").removeprefix(
            "W/"
        ) or None
        length = (
            None if "Content-Encoding" in reply.headers else reply.content_length
        )  # that of what is sent, not of the file
        yield _Reply(partial, length, tag, reply.content.iter_any())


@contextlib.asynccontextmanager
async def _s3_get(fs: Any, path: str, transfer: Transfer, _: float) -> AsyncIterator[_Reply]:
    bucket, key, version = fs.split_path(path)
    request = {
        "Bucket": bucket,
        "Key": key,
        "Range": f"bytes={transfer.start + transfer.done}-{transfer.stop - 1}",
    }
    if version:
        request["VersionId"] = version
    try:
        reply = await fs._call_s3("get_object", **request)
    except OSError as error:
        if any(
            text in str(error).lower()
            for text in ("invalidrange", "range not satisfiable", "range is not satisfiable")
        ):
            raise TruncatedShard(
                f"expected bytes {transfer.start} to {transfer.stop}, the store has none of them"
            ) from error
        raise
    body = reply["Body"]
    try:
        yield _Reply(
            reply.get("ContentRange"), reply.get("ContentLength"), reply.get("ETag"), _chunks(body)
        )
    finally:
        body.close()


async def _chunks(body: Any) -> AsyncIterator[bytes]:
    while chunk := await body.read(1 << 18):
        yield chunk


def call(fs: Any, name: str, path: str, *, seconds: float = 30.0) -> Any:
    """A small request by a file system's own method, which ends after some seconds where it can be ended.

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
