"""Which store a URL belongs to, requests to it that end, and its errors made ours.

The only module that imports fsspec. Asynchronous file systems (HTTP, S3, GCS, Azure) are called by
their coroutines, which fsspec documents under "Async", on their own loop, where a request can be
canceled. A request to any other runs in a thread of its own, which is abandoned if it is late.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ..errors import PCRError, StorageError, harmless
from ..redaction import PIPE, redact_url
from .retry import Retry, asked_pause, is_hopeless
from .urls import is_local, plain_path

# Those of fsspec, if any.
Options = Mapping[str, Any] | None
T = TypeVar("T")
Request = concurrent.futures.Future[Any]
_HTTP = re.compile("https?://")
DEFAULT_RETRY = Retry()
# Stores that list a folder in one call do not report progress; a million files take a minute.
LISTING_SECONDS = 3600.0
# fsspec forgets its file systems in a forked process, and then waits a second for each session of
# its parent to be closed by a thread that is not there; so they are kept, as fsspec keeps its own.
_used: set[Any] = set()


def resolve(url: str, options: Options) -> tuple[Any, str]:
    """Return the file system of a URL, and the file's name in it.

    Raises:
        StorageError: There is no such kind of store, or the URL is a command's output.
    """
    if url.startswith(PIPE):
        raise StorageError(
            "expected a file, got a pipe, which can only be read from its beginning", url=url
        )
    if is_local(url):
        # Not through url_to_fs, which takes "::" in a file's name for two chained file systems.
        return LocalFileSystem(), plain_path(url)
    try:
        fs, path = fsspec.core.url_to_fs(url, **_guarded_options(url, options or {}))
    except (ImportError, ValueError) as error:
        message = f"cannot open this kind of URL: {error}"
        raise StorageError(message, url=url) from harmless(error, url)
    if not (options or {}).get("skip_instance_cache"):
        _used.add(fs)
    return fs, str(path)


def _guarded_options(url: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return options under which a redirect takes no header of the user's to another server."""
    if _HTTP.search(url) is None or "get_client" in options:
        return options
    # aiohttp takes half a second to import, which readers of other stores need not wait for.
    from .redirects import with_redirect_guard

    if _HTTP.match(url):
        return with_redirect_guard(options)
    # In a chain each store has its options under its name.
    chained = {name: with_redirect_guard(options.get(name) or {}) for name in ("http", "https")}
    return {**options, **chained}


@contextmanager
def mapped_errors(
    url: str,
    doing: str,
    errors: tuple[type[Exception], ...] = (Exception,),
) -> Iterator[None]:
    """Make any failure of a store an error of ours that names the URL.

    Args:
        url: The file.
        doing: What failed: ``cannot {doing}: ...``.
        errors: What a store may raise; each library has errors of its own.
    """
    try:
        yield
    except PCRError as error:
        if redact_url(url) in str(error):
            raise
        raise type(error)(str(error), url=url) from harmless(error.__cause__, url)
    except errors as error:
        message = f"cannot {doing}: {type(error).__name__}: {error}"
        raise StorageError(message, url=url) from harmless(error, url)


def begin(fs: Any, method: str, *args: Any, **kwargs: Any) -> Request:
    """Begin a request by a method of a file system."""
    if fs.async_impl:
        coroutine = getattr(fs, f"_{method}")(*args, **kwargs)
        return asyncio.run_coroutine_threadsafe(coroutine, fs.loop)
    return in_thread(partial(getattr(fs, method), *args, **kwargs))


def in_thread(call: Callable[[], Any]) -> Request:
    """Run a call that nothing can end in a daemon thread of its own."""
    request: Request = concurrent.futures.Future()
    request.set_running_or_notify_cancel()

    def run() -> None:
        try:
            request.set_result(call())
        except BaseException as error:
            request.set_exception(error)

    threading.Thread(target=run, name="pcrshard request", daemon=True).start()
    return request


def result(request: Request, seconds: float) -> Any:
    """Wait for a request, and cancel one that is late.

    Raises:
        TimeoutError: There was no answer in time.
    """
    try:
        return request.result(seconds)
    except concurrent.futures.TimeoutError:
        if request.done():  # the store's own timeout
            raise
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    finally:
        request.cancel()


def collect(items: Iterator[T], url: str, retry: Retry = DEFAULT_RETRY) -> list[T]:
    """Return all items of an iterator that reads from a store, which may hang.

    Raises:
        StorageError: None came for ``retry.deadline`` seconds.
    """
    found: list[T] = []
    request = in_thread(lambda: found.extend(items))
    before = 0
    while not concurrent.futures.wait([request], retry.deadline).done:
        if len(found) == before:
            message = f"nothing came for {retry.deadline:g} s after {before} entries"
            raise StorageError(f"cannot list: {message}", url=url)
        before = len(found)
    request.result()
    return found


def call(fs: Any, method: str, *args: Any, seconds: float, **kwargs: Any) -> Any:
    """Return the answer to a small request.

    Raises:
        TimeoutError: There was no answer in time.
    """
    if isinstance(fs, LocalFileSystem):
        return getattr(fs, method)(*args, **kwargs)
    return result(begin(fs, method, *args, **kwargs), seconds)


def ask(
    url: str,
    doing: str,
    method: str,
    options: Options,
    retry: Retry = DEFAULT_RETRY,
    seconds: float | None = None,
    **kwargs: Any,
) -> Any:
    """Return the result of a file system's method for a file, trying as :class:`Retry` says.

    Args:
        url: The file.
        doing: What failed, for the error.
        method: Name of the fsspec method.
        options: fsspec storage options.
        retry: When to give up.
        seconds: How long one answer may take; ``retry.timeout`` by default.
        kwargs: Arguments of the method, after the path.
    """
    fs, path = resolve(url, options)
    limit = min(retry.timeout, retry.deadline) if seconds is None else seconds
    with mapped_errors(url, doing):
        return retried(lambda: call(fs, method, path, seconds=limit, **kwargs), retry)


def retried(request: Callable[[], T], retry: Retry = DEFAULT_RETRY) -> T:
    """Return the result of a small request, which is sent again as :class:`Retry` says."""
    end = time.monotonic() + retry.deadline
    for failures in range(1, retry.attempts):
        try:
            return request()
        except Exception as error:
            if is_hopeless(error) or time.monotonic() > end:
                raise
            asked = min(asked_pause(error), retry.deadline / retry.attempts)
            time.sleep(max(retry.delay(failures), asked))
    return request()
