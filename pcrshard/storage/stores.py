"""Resolve a URL to its store, send requests that always end, and map errors to this package's.

The only module that imports fsspec. Asynchronous file systems (HTTP, S3, GCS, Azure) are called
through their coroutines, which fsspec documents under "Async", on their own loop, where a request
can be canceled. A request to any other file system runs in its own thread, which is abandoned if it
is late.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

import fsspec
import fsspec.asyn
from fsspec.implementations.local import LocalFileSystem

from ..errors import PCRError, StorageError, redacted_cause
from ..redaction import PIPE
from .retry import Attempts, Cancel, Cancelled, Retry
from .urls import is_local, plain_path

# fsspec storage options.
Options = Mapping[str, Any] | None
T = TypeVar("T")
_HTTP = re.compile("https?://")
_EXTRAS = "; pip install 'pcrshard[http]', 'pcrshard[s3]', 'pcrshard[hf]', or fsspec's own package"
DEFAULT_RETRY = Retry()
_POLL_SECONDS = 0.2
# Stores list a folder in one call without progress; a million files take a minute.
LISTING_SECONDS = 3600.0
# In a forked process, fsspec drops its file systems and then waits a second per session of the
# parent for a thread that does not exist; so a reference is kept here, as fsspec keeps its own.
_used: set[Any] = set()


def resolve(url: str, options: Options) -> tuple[Any, str]:
    """Return the file system of a URL and the path within it.

    Raises:
        StorageError: The protocol is unknown, or the URL is a command (``pipe:``).
    """
    if url.startswith(PIPE):
        raise StorageError(
            "expected a file, got a pipe, which can only be read from its beginning", url=url
        )
    if is_local(url):
        # Not url_to_fs, which takes "::" in a file name for two chained file systems.
        return LocalFileSystem(), plain_path(url)
    given = options or {}
    with mapped_errors(url, "open this kind of URL"):
        try:
            if _HTTP.match(url):  # which url_to_fs would split at the "::" of an IPv6 address
                fs, path = fsspec.filesystem("http", **_guarded(given)), url
                # Otherwise, listings leave out folders whose request fails.
                fs._walk = partial(type(fs)._walk, fs, on_error="raise")
            else:
                # In a chain of protocols, each store has its options under its name.
                chained = ("http", "https") if _HTTP.search(url) else ()
                own = {name: _guarded(given.get(name) or {}) for name in chained}
                fs, path = fsspec.core.url_to_fs(url, **{**given, **own})
        except ImportError as error:
            raise StorageError(f"{error}{_EXTRAS}") from error
    if not given.get("skip_instance_cache"):
        _used.add(fs)
    return fs, str(path)


def _guarded(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return options under which redirects carry none of the user's headers to another server."""
    if "get_client" in options:
        return options
    # aiohttp takes half a second to import; readers of other stores should not wait for it.
    from .redirects import with_redirect_guard

    return with_redirect_guard(options)


@contextmanager
def mapped_errors(
    url: str,
    doing: str,
    errors: tuple[type[Exception], ...] = (Exception,),
) -> Iterator[None]:
    """Turn any failure of a store into a :class:`StorageError` that names the URL.

    Args:
        url: The file.
        doing: Action in the message: ``cannot {doing}: ...``.
        errors: Exceptions to map; each library has its own.
    """
    try:
        yield
    except PCRError as error:
        if error.url is not None:
            raise
        raise type(error)(str(error), url=url) from redacted_cause(error.__cause__, url)
    except errors as error:
        message = f"cannot {doing}: {type(error).__name__}: {error}"
        raise StorageError(message, url=url) from redacted_cause(error, url)


def in_thread(call: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Run a call that cannot be canceled in its own daemon thread."""
    request: concurrent.futures.Future[T] = concurrent.futures.Future()
    request.set_running_or_notify_cancel()

    def run() -> None:
        try:
            request.set_result(call())
        except BaseException as error:
            request.set_exception(error)

    threading.Thread(target=run, name="pcrshard request", daemon=True).start()
    return request


async def call(fs: Any, method: str, path: str, **kwargs: Any) -> Any:
    """Call a method of a file system for a path, in a way that can be canceled."""
    if fs.async_impl:
        try:
            return await getattr(fs, f"_{method}")(path, **kwargs)
        except FileNotFoundError as error:
            # The HTTP file system takes any failure to look up a file for a missing file.
            cause = error.__cause__ if "https" in fs.protocol else None
            if cause is None or getattr(cause, "status", None) == 404:
                raise
        raise cause  # here, where the missing file is not its context
    request = in_thread(partial(getattr(fs, method), path, **kwargs))
    return await asyncio.wrap_future(request)


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Cancel the block and raise a clear TimeoutError if it takes longer than was granted."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield limit
    except TimeoutError as error:
        message = f"the server is too slow or silent: no answer within {seconds:g} s"
        raise TimeoutError(message) from error


def run(coroutine: Coroutine[Any, Any, T], cancel: Cancel = None) -> T:
    """Run a coroutine on fsspec's event loop.

    Raises:
        Cancelled: ``cancel`` was set by another thread.
    """
    request = asyncio.run_coroutine_threadsafe(coroutine, fsspec.asyn.get_loop())
    try:
        while not concurrent.futures.wait([request], _POLL_SECONDS).done:
            if cancel is not None and cancel.is_set():
                raise Cancelled("the read was canceled")
        return request.result()
    finally:
        request.cancel()  # also after Ctrl-C
        del request  # it refers to an error, whose traceback refers to this frame


def collect(items: Iterator[T], url: str, retry: Retry = DEFAULT_RETRY) -> list[T]:
    """Return all items of an iterator that reads from a store and may hang.

    Raises:
        StorageError: No item arrived for ``retry.deadline`` seconds.
    """
    found: list[T] = []
    request = in_thread(lambda: found.extend(items))
    before = -1
    while len(found) > before:
        before = len(found)
        if concurrent.futures.wait([request], retry.deadline).done:
            request.result()
            return found
    message = f"cannot list: no answer for {retry.deadline:g} s after {before} entries"
    raise StorageError(message, url=url)


def ask(
    url: str,
    doing: str,
    method: str,
    options: Options,
    retry: Retry = DEFAULT_RETRY,
    seconds: float | None = None,
    **kwargs: Any,
) -> Any:
    """Call a file system's method for a file, retrying as :class:`Retry` says.

    Args:
        url: The file.
        doing: Action in the error message.
        method: Name of the fsspec method.
        options: fsspec storage options.
        retry: When to give up.
        seconds: Timeout of one response; ``retry.timeout`` by default.
        kwargs: Arguments of the method after the path.

    Raises:
        StorageError: All attempts failed, or the error is not transient.
    """
    fs, path = resolve(url, options)
    limit = min(retry.timeout, retry.deadline) if seconds is None else seconds

    async def send() -> Any:
        async with time_limit(limit):
            return await call(fs, method, path, **kwargs)

    with mapped_errors(url, doing):
        if isinstance(fs, LocalFileSystem):
            return getattr(fs, method)(path, **kwargs)
        return run(retried(send, retry))


async def retried(send: Callable[[], Awaitable[T]], retry: Retry = DEFAULT_RETRY) -> T:
    """Return the answer to a small request, retrying as :class:`Retry` says."""
    attempts = Attempts(retry)
    while True:
        try:
            return await send()
        except Exception as error:
            pause = attempts.pause_after(error)
            if pause is None:
                raise
        await asyncio.sleep(pause)
