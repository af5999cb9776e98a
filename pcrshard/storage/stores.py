"""The one door to fsspec: which store a URL belongs to, and its errors made ours."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ..errors import PCRError, StorageError, harmless
from ..redaction import PIPE, redact_url
from .http_s3 import call
from .retry import Retry, asked_pause, is_hopeless
from .urls import is_local, plain_path

# Those of fsspec, if any.
Options = Mapping[str, Any] | None
T = TypeVar("T")
_HTTP = re.compile("https?://")
ANY_NETWORK = Retry()
# fsspec forgets its file systems in a forked process, and then waits a second for each session of
# its parent to be closed by a thread that is not there; so they are kept, as fsspec keeps its own.
_used: set[Any] = set()


def resolve(url: str, options: Options) -> tuple[Any, str]:
    """The file system of a URL, and the file's name in it.

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
        fs, path = fsspec.core.url_to_fs(url, **_careful_options(url, options or {}))
    except (ImportError, ValueError) as error:
        message = f"cannot open this kind of URL: {error}"
        raise StorageError(message, url=url) from harmless(error, url)
    if not (options or {}).get("skip_instance_cache"):
        _used.add(fs)
    return fs, str(path)


def _careful_options(url: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options, so that a redirect takes no header of the user's to another server."""
    if _HTTP.search(url) is None or "get_client" in options:
        return options
    if _HTTP.match(url):
        return _careful(options)
    # In a chain each store has its options under its name.
    chained = {name: _careful(options.get(name) or {}) for name in ("http", "https")}
    return {**options, **chained}


def _careful(options: Mapping[str, Any]) -> Mapping[str, Any]:
    # aiohttp takes half a second, which readers of other stores need not wait for.
    from .redirects import careful

    return {
        **options,
        "client_kwargs": careful(options.get("client_kwargs") or {}),
    }


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


def ask(
    url: str,
    doing: str,
    method: str,
    options: Options,
    retry: Retry = ANY_NETWORK,
) -> Any:
    """The answer to one small request: the result of a file system's method for this file.

    It is sent again as :class:`Retry` says.

    Args:
        url: The file.
        doing: What failed, for the error.
        method: Name of the fsspec method.
        options: fsspec storage options.
        retry: When to give up.
    """
    fs, path = resolve(url, options)
    with mapped_errors(url, doing):
        return retried(lambda: call(fs, method, path, seconds=retry.timeout), retry)


def retried(request: Callable[[], T], retry: Retry = ANY_NETWORK) -> T:
    """The result of a small request, which is sent again as :class:`Retry` says."""
    for failures in range(1, retry.attempts):
        try:
            return request()
        except Exception as error:
            if is_hopeless(error):
                raise
            asked = min(asked_pause(error), retry.deadline / retry.attempts)
            time.sleep(max(retry.delay(failures), asked))
    return request()
