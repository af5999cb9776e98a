"""Resolve a URL to its store, send requests that always end, and map errors to this package's.

The only module that imports fsspec. Asynchronous file systems (HTTP, S3, GCS, Azure) are called
through their coroutines, which fsspec documents under "Async", on their own loop, where a request
can be canceled. A request to any other file system runs in its own thread, which is abandoned if it
is late.

A file system that answered before and is then refused is rebuilt once: keys and signed
URLs expire while jobs run, and the new ones are where the old ones came from.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import os
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import fsspec.asyn
from fsspec.implementations.local import LocalFileSystem

from ..errors import PCRError, StorageError, redacted_cause
from ..redaction import PIPE, redact_url, split_url
from .retry import Attempts, Cancel, Cancelled, Retry
from .urls import is_local, plain_path

T = TypeVar("T")
_HTTP = re.compile("https?://")
_S3 = re.compile(r"s3a?://")
_EXTRAS = "; pip install 'pcrshard[http]', 'pcrshard[s3]', 'pcrshard[hf]', or fsspec's own package"
_POLL_SECONDS = 0.2
# Concurrent requests of this process to a host or bucket.
MAX_REQUESTS = 32
# Stores list a folder in one call without progress; a million files take a minute.
LISTING_SECONDS = 3600.0
# Status of an answer to old credentials. Of a signed URL, S3 and GCS say 400.
_REFUSED, _SIGNATURE_REFUSED = (401, 403), (400, 401, 403)
_CONFLICTS = {"PreconditionFailed", "412", "ConditionalRequestConflict"}
# Bytes per second of the slowest upload.
_LEAST_RATE = 1 << 20


@dataclass(frozen=True)
class Store:
    """How the files of a dataset are reached: fsspec storage options, and when to give up.

    One for all files of a root. It travels to workers; each process has file systems of its own.

    Attributes:
        options: fsspec storage options. ``sign``, which is not fsspec's, is called with the URL of
            a file and returns the one to read it by, such as one that is signed for an hour. It is
            called again once that one is refused.
        retry: When to give up.
    """

    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    retry: Retry = field(default_factory=Retry)

    @classmethod
    def of(cls, options: Access, retry: Retry | None = None) -> Store:
        """Return the store of some options, or a store itself."""
        return options if isinstance(options, Store) else cls(options or {}, retry or Retry())


# fsspec storage options, and what may be given in their place within the package.
Options = Mapping[str, Any] | None
Access = Options | Store


class Connection:
    """A file system as it is used for a host or bucket by all reads of this process.

    Attributes:
        fs: The file system; after :meth:`renew` another one.
        slots: Limits the concurrent requests.
        has_ranges: Whether a range was returned. Without, one request at a time is sent, because
            each answer might be the whole file.
        is_trusted: Whether it was answered, so that a refusal is that of old credentials.
        is_refused: Whether it was refused at last, so that the next request needs another one.
    """

    def __init__(self, fs: Any) -> None:
        self.fs = fs
        self.slots = asyncio.Semaphore(MAX_REQUESTS)
        self.has_ranges = self.is_trusted = self.is_refused = False

    def renew(self, url: str, options: Mapping[str, Any]) -> None:
        """Rebuild the file system with the current credentials."""
        self.fs, _ = _make(url, {**options, "skip_instance_cache": True})
        self.is_trusted = self.is_refused = False


# By file system, which is equal to others of the same arguments in the same process, and host. In a
# forked process, fsspec drops its file systems and then waits a second per session of the parent
# for a thread that does not exist; so references are kept here, as fsspec keeps its own.
_connections: dict[tuple[Any, str], Connection] = {}


class Target:
    """A remote file, and what it is reached by at this moment.

    Args:
        url: The file.
        access: Its store.

    Attributes:
        connection: The connection to its host.
        fs: The fsspec file system.
        path: The path within it.

    Raises:
        StorageError: The protocol is unknown, or the URL is a command (``pipe:``).
    """

    def __init__(self, url: str, access: Access) -> None:
        self._url = url
        self._options = dict(Store.of(access).options)
        self._sign = self._options.pop("sign", None)
        self._is_new = False
        made, self.path = _make(self._signed(), self._options)
        self.connection = Connection(made)
        if not self._options.get("skip_instance_cache"):
            host = split_url(self.path).host or self.path.partition("/")[0]
            self.connection = _connections.setdefault((made, host), self.connection)
        if self.connection.is_refused:
            self.connection.renew(url, self._options)
        self.fs = self.connection.fs

    def _signed(self) -> str:
        if self._sign is None:
            return self._url
        with mapped_errors(self._url, "sign the URL"):
            return str(self._sign(self._url))

    def note_answer(self) -> None:
        """Note that the store accepts the credentials."""
        self._is_new = False
        self.connection.is_trusted = True

    async def is_renewed(self, error: BaseException) -> bool:
        """Return whether an error was that of old credentials, in whose place others are now."""
        status = getattr(error, "status", None) or vars(error).get("code")
        refused = _SIGNATURE_REFUSED if self._sign else _REFUSED
        if not (isinstance(error, PermissionError) or status in refused):
            return False
        is_old = self.fs is not self.connection.fs  # another request has renewed it
        if self._is_new or not (is_old or self.connection.is_trusted):
            self.connection.is_refused = not is_old
            return False

        def renew() -> str:
            if not is_old:
                self.connection.renew(self._url, self._options)
            return _make(self._signed(), self._options)[1]

        self._is_new = True
        self.path = await asyncio.wrap_future(in_thread(renew))
        self.fs = self.connection.fs
        return True


def resolve(url: str, access: Access) -> tuple[Any, str]:
    """Return the file system of a URL and the path within it; raises as :class:`Target`."""
    if is_local(url):
        # Not url_to_fs, which takes "::" in a file name for two chained file systems.
        return LocalFileSystem(), plain_path(url)
    target = Target(url, access)
    return target.fs, target.path


def _make(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    if url.startswith(PIPE):
        raise StorageError(
            "expected a file, got a pipe, which can only be read from its beginning", url=url
        )
    with mapped_errors(url, "open this kind of URL"):
        try:
            if _HTTP.match(url):  # which url_to_fs would split at the "::" of an IPv6 address
                fs, path = fsspec.filesystem("http", **_guarded(options)), url
                # Otherwise, listings leave out folders whose request fails.
                fs._walk = partial(type(fs)._walk, fs, on_error="raise")
            else:
                # In a chain of protocols, each store has its options under its name.
                chained = ("http", "https") if _HTTP.search(url) else ()
                own = {name: _guarded(options.get(name) or {}) for name in chained}
                if _S3.match(url):
                    # Its own pauses would use up the timeout, and hide why a connection fails.
                    given = options.get("config_kwargs") or {}
                    own["config_kwargs"] = {"retries": {"total_max_attempts": 1}, **given}
                fs, path = fsspec.core.url_to_fs(url, **{**options, **own})
        except ImportError as error:
            raise StorageError(f"{error}{_EXTRAS}") from error
    return fs, str(path)


def _guarded(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return options under which redirects carry none of the user's headers to another server."""
    if "get_client" in options:
        return options
    # aiohttp takes half a second to import; readers of other stores should not wait for it.
    from .redirects import with_redirect_guard

    return with_redirect_guard(options)


class mapped_errors:  # noqa: N801  # used as a function; a generator would take twice the calls
    """Turn any failure of a store into a :class:`StorageError` that names the URL.

    Args:
        url: The file.
        doing: Action in the message: ``cannot {doing}: ...``.
        errors: Exceptions to map; each library has its own.
    """

    def __init__(
        self, url: str, doing: str, errors: tuple[type[Exception], ...] = (Exception,)
    ) -> None:
        self._about = url, doing, errors

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> None:
        if error is None:
            return
        url, doing, errors = self._about
        if isinstance(error, PCRError):
            if error.url is None:
                raise type(error)(str(error), url=url) from redacted_cause(error.__cause__, url)
        elif isinstance(error, errors):
            refused = "connection refused: " if is_refused(error) else ""
            message = f"cannot {doing}: {refused}{type(error).__name__}: {error}"
            raise StorageError(message, url=url) from redacted_cause(error, url)


def is_refused(error: BaseException) -> bool:
    """Return whether nothing listens where a request was sent to, as each library says it."""
    inner = (error.__cause__, getattr(error, "os_error", None), vars(error).get("kwargs"))
    found = [each.get("error") if isinstance(each, dict) else each for each in inner]
    return isinstance(error, ConnectionRefusedError) or any(
        is_refused(each) for each in found if isinstance(each, BaseException)
    )


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


async def call(fs: Any, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a file system for a path, in a way that can be canceled."""
    if fs.async_impl:
        try:
            return await getattr(fs, f"_{method}")(path, *args, **kwargs)
        except FileNotFoundError as error:
            # The HTTP file system takes any failure to look up a file for a missing file.
            cause = error.__cause__ if "https" in fs.protocol else None
            if cause is None or getattr(cause, "status", None) == 404:
                raise
        raise cause  # here, where the missing file is not its context
    request = in_thread(partial(getattr(fs, method), path, *args, **kwargs))
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


def collect(items: Iterator[T], url: str, retry: Retry = Retry()) -> list[T]:
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
    access: Access,
    seconds: float | None = None,
    **kwargs: Any,
) -> Any:
    """Call a file system's method for a file, retrying as the store's :class:`Retry` says.

    Args:
        url: The file.
        doing: Action in the error message.
        method: Name of the fsspec method.
        access: The store.
        seconds: Timeout of one response; ``retry.timeout`` by default.
        kwargs: Arguments of the method after the path.

    Raises:
        StorageError: All attempts failed, or the error is not transient.
    """
    if is_local(url):
        with mapped_errors(url, doing):
            return getattr(LocalFileSystem(), method)(plain_path(url), **kwargs)
    target, retry = Target(url, access), Store.of(access).retry
    limit = min(retry.timeout, retry.deadline) if seconds is None else seconds

    async def send() -> Any:
        async with time_limit(limit):
            return await call(target.fs, method, target.path, **kwargs)

    with mapped_errors(url, doing):
        return run(retried(send, target, retry))


def upload(url: str, path: str, access: Access, *, replace: bool = True) -> None:
    """Copy a local file to a store, retrying as for reads, and compare the sizes.

    An attempt may take ``retry.deadline`` seconds and one more for each MiB.

    Args:
        url: Where to.
        path: The local file.
        access: The store.
        replace: Whether another file may be there.

    Raises:
        StorageError: All attempts failed, or the error is not transient; its cause is
            ``FileExistsError`` if another file is there and must not be replaced.
    """
    target, store, size = Target(url, access), Store.of(access), os.path.getsize(path)
    seconds = store.retry.deadline + size / _LEAST_RATE
    how = {} if replace or not is_conditional(target.fs) else {"mode": "create"}

    async def find_size() -> int | None:
        target.fs.invalidate_cache()
        with suppress(FileNotFoundError):
            return int(await call(target.fs, "size", target.path) or -1)
        return None

    async def put() -> None:
        try:
            if how or replace or await find_size() is None:
                await call(target.fs, "put_file", path, rpath=target.path, **how)
                if (found := await find_size()) not in (size, -1):
                    raise OSError(f"wrote {size} bytes, the store has {found}")
                return
        except OSError as error:
            if replace or not is_conflict(error):
                raise
        # It may be the file of an earlier attempt, whose answer was lost.
        same = await find_size() == size and await call(target.fs, "cat_file", target.path)
        if same != Path(path).read_bytes():  # noqa: ASYNC240  # rare
            raise FileExistsError(f"{redact_url(url)} exists")

    async def send() -> None:
        async with time_limit(seconds):
            await put()

    with mapped_errors(url, "write"):
        retry = dataclasses.replace(store.retry, timeout=seconds, deadline=seconds)
        run(retried(send, target, retry))


def create_file(url: str, data: bytes, access: Access) -> None:
    """Write a file of a store with create-only writes, retrying as for reads.

    An attempt may take ``retry.timeout`` seconds and one more for each MiB.

    Raises:
        FileExistsError: The file exists, and is not that of an attempt whose answer was lost.
        OSError: All attempts failed, or the error is not transient.
    """
    target, retry = Target(url, access), Store.of(access).retry
    seconds = retry.timeout + len(data) / _LEAST_RATE
    failed = False

    async def send() -> None:
        nonlocal failed
        async with time_limit(seconds):
            try:
                await call(target.fs, "pipe_file", target.path, data, mode="create")
            except OSError as error:
                if not is_conflict(error):
                    failed = True
                    raise
                mine = failed and await call(target.fs, "cat_file", target.path) == data
                if not mine:
                    raise FileExistsError(f"{redact_url(url)} exists") from error
            except BaseException:
                failed = True
                raise

    run(retried(send, target, retry))


def is_conditional(fs: Any) -> bool:
    """Return whether a store can refuse to replace a file.

    S3 by ``If-None-Match``, GCS by generation 0, and fsspec's memory.
    """
    names = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    return not names.isdisjoint({"s3", "s3a", "gs", "gcs", "memory"})


def is_conflict(error: OSError) -> bool:
    """Return whether a store refused to replace a file."""
    # Some servers do not say which condition failed; s3fs then passes on the bare code.
    answer = getattr(error.__cause__, "response", None) or {}
    code = answer.get("Error", {}).get("Code")
    return isinstance(error, FileExistsError) or code in _CONFLICTS


async def retried(send: Callable[[], Awaitable[T]], target: Target, retry: Retry) -> T:
    """Return the answer to a small request, retrying as :class:`Retry` says."""
    attempts = Attempts(retry)
    while True:
        try:
            answer = await send()
        except Exception as error:
            if await target.is_renewed(error):
                continue
            pause = attempts.pause_after(error)
            if pause is None:
                raise
        else:
            target.note_answer()
            return answer
        await asyncio.sleep(pause)
