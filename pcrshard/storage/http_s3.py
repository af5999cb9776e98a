"""Exact ranged reads from remote stores: into the caller's memory, checked, tried again.

A read is resumed after the last byte that came.

HTTP and S3 are streamed, because their file systems' own ``cat_file`` loses what came before a cut,
gives a short or a whole file without a word, and ends after five minutes however well it goes.
Other stores are asked for the rest of the range at once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from threading import Event
from typing import Any

from ..errors import StorageError, TruncatedShard, harmless
from ..redaction import get_logger, redact, redact_url
from .retry import (
    Cancel,
    Cancelled,
    Refused,
    Retry,
    asked_pause,
    is_hopeless,
)
from .transfers import FileTransfer, Reply, Transfer

_OUT_OF_RANGE = re.compile(r"invalidrange|range (is )?not satisfiable", re.IGNORECASE)
_POLL_SECONDS = 0.2
_PATIENT_FAILURES = 3
log = get_logger(__name__)


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
    cancel = cancel or Event()
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


def _try(attempt: Callable[[Event], None], cancel: Event) -> Exception:
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
    # Who waits for one small file sees the error at the end; a job waits for ranges for hours.
    silent = failures < _PATIENT_FAILURES or isinstance(transfer, FileTransfer)
    level = logging.INFO if silent else logging.WARNING
    came = f"{transfer.came} bytes came"
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
    came = f"{transfer.came} came in {tried}"
    return StorageError(f"cannot read {transfer.wanted}, {came}: {what}")


def _attempt_of(
    fs: Any,
    path: str,
    transfer: Transfer,
    retry: Retry,
) -> Callable[[Event], None]:
    """One request, as a function that may be called again for the rest."""
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    openers = [opener for name, opener in _STREAMS.items() if name in protocols]
    if not (openers and fs.async_impl):
        return lambda _: _cat(fs, path, transfer)

    def attempt(cancel: Event) -> None:
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
    data = fs.cat_file(
        path,
        start=transfer.position,
        end=transfer.stop,
        **options,
    )
    if len(data) > transfer.stop - transfer.position:
        raise Refused(
            f"asked for {transfer.wanted}, got {len(data)} bytes: the store ignores ranges"
        )
    transfer.put(data, whole_file=False)
    transfer.finish()
    if not transfer.complete and transfer.position >= fs.size(path):
        raise TruncatedShard(f"expected {transfer.wanted}, the file has {fs.size(path)}")


def _wait(
    loop: asyncio.AbstractEventLoop,
    coroutine: Any,
    transfer: Transfer,
    cancel: Event,
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
    opened: AbstractAsyncContextManager[Reply],
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
            transfer.finish()


@asynccontextmanager
async def _http_get(
    fs: Any,
    url: str,
    transfer: Transfer,
    silence: float,
) -> AsyncIterator[Reply]:
    session = await fs.set_session()
    options = dict(fs.kwargs)
    options["headers"] = {
        **fs.kwargs.get("headers", {}),
        **({"Range": transfer.range_header} if transfer.range_header else {}),
        "Accept-Encoding": "identity",
    }
    if "timeout" not in options:
        # The session's default ends every request after five minutes; ours is about silence.
        timeout = type(session.timeout)
        options["timeout"] = timeout(
            total=None,
            sock_connect=silence,
            sock_read=silence,
        )
    async with session.get(fs.encode_url(url), **options) as reply:
        if reply.status == 416:
            raise TruncatedShard(f"expected {transfer.wanted}, the server has none of them")
        fs._raise_not_found_for_status(reply, url)
        yield _http_reply(reply)


def _http_reply(reply: Any) -> Reply:
    headers = reply.headers
    content_range = headers.get("Content-Range", "") if reply.status == 206 else None
    # With an encoding the length is that of what is sent, not of the file.
    encoded = reply.content_length or 0 if "Content-Encoding" in headers else None
    length = reply.content_length if encoded is None else None
    tag = (headers.get("ETag") or headers.get("Last-Modified") or "").removeprefix("W/")
    return Reply(content_range, length, tag or None, reply.content.iter_any(), encoded)


@asynccontextmanager
async def _s3_get(
    fs: Any,
    path: str,
    transfer: Transfer,
    _: float,
) -> AsyncIterator[Reply]:
    bucket, key, version = fs.split_path(path)
    request = {
        "Bucket": bucket,
        "Key": key,
    }
    if transfer.range_header:
        request["Range"] = transfer.range_header
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
        yield Reply(reply.get("ContentRange"), length, reply.get("ETag"), _chunks(body))
    finally:
        body.close()


_STREAMS = {
    "http": _http_get,
    "https": _http_get,
    "s3": _s3_get,
}


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
