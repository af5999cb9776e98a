"""The one door to bytes: exact ranged reads, atomic writes, listings, through fsspec.

A range is asked for once, exactly, and what comes is measured: a short or long answer is an error.
"""

from __future__ import annotations

import contextlib
import glob
import io
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, TypeVar

import braceexpand
import fsspec
from fsspec.implementations.local import LocalFileSystem

from .. import memory
from ..errors import PCRError, StorageError, TruncatedShard, redact
from . import command_output, http_s3
from .local_file import LocalFile
from .retry import Retry, asked_pause, is_hopeless

Options = Mapping[str, Any]
T = TypeVar("T")
_ANY_NETWORK = Retry()
_TEMPORARY = ".pcrshard-"


def expand(urls: str | Sequence[str]) -> list[str]:
    """Expand brace patterns in one URL or several; ``::`` separates URLs in one string, as in WebDataset.

    >>> expand("a-{000..002}.tar::b.tar")
    ['a-000.tar', 'a-001.tar', 'a-002.tar', 'b.tar']
    """
    patterns = urls.split("::") if isinstance(urls, str) else [str(url) for url in urls]
    try:
        return [url for pattern in patterns for url in braceexpand.braceexpand(pattern)]
    except ValueError as error:
        raise StorageError(f"not a brace pattern: {error}") from error


def split_query(url: str) -> tuple[str, str]:
    """An HTTP URL up to its query, and the rest, which may be a signature for a whole folder; elsewhere ``?`` may be in a name."""
    if not url.startswith(("http://", "https://")):
        return url, ""
    path, mark, query = url.partition("?")
    return path, mark + query


def file_name(url: str) -> str:
    """The last part of a URL's path."""
    return split_query(url)[0].rpartition("/")[2]


def join(folder: str, name: str) -> str:
    """The URL of a file in a folder, with the folder's query."""
    path, query = split_query(folder)
    return f"{path.rstrip('/')}/{name}{query}"


def _resolve(url: str, options: Options | None) -> tuple[Any, str]:
    """The file system and the file's name in it; for a ``pipe:`` no file system, and the command."""
    if url.startswith(command_output.PIPE):
        return None, url.removeprefix(command_output.PIPE)
    if "://" not in url:
        # Not through url_to_fs, which takes "::" in a file's name for two chained file systems.
        local = fsspec.filesystem("file", **(options or {}))
        return local, str(local._strip_protocol(url))
    try:
        fs, path = fsspec.core.url_to_fs(url, **(options or {}))
    except (ImportError, ValueError) as error:
        raise StorageError(f"cannot open this kind of URL: {error}", url=url) from error
    return fs, str(path)


@contextlib.contextmanager
def _mapped(
    url: str, doing: str, errors: tuple[type[Exception], ...] = (Exception,)
) -> Iterator[None]:
    """Make any failure of a store an error of ours that names the URL; each library has errors of its own."""
    try:
        yield
    except PCRError as error:
        if url in str(error) or redact(url) in str(error):
            raise
        raise type(error)(str(error), url=url) from error.__cause__
    except errors as error:
        # A cause is printed with its own text, which may hold a password or a signature.
        cause = error if redact(str(error)) == str(error) else None
        raise StorageError(
            f"cannot {doing}: {type(error).__name__}: {redact(str(error))}", url=url
        ) from cause


def _retried(call: Callable[[], T], retry: Retry = _ANY_NETWORK) -> T:
    """The result of a small request, tried again as :class:`Retry` says."""
    for failures in range(1, retry.attempts):
        try:
            return call()
        except Exception as error:
            if is_hopeless(error):
                raise
            time.sleep(
                max(retry.delay(failures), min(asked_pause(error), retry.deadline / retry.attempts))
            )
    return call()


@contextlib.contextmanager
def open_range(
    url: str,
    start: int,
    stop: int,
    *,
    options: Options | None = None,
    retry: Retry = _ANY_NETWORK,
    cancel: threading.Event | None = None,
) -> Iterator[memoryview]:
    """Read the bytes ``[start, stop)`` of a file in one request; more only after a fault, for what is still missing.

    They are read into a buffer that is used again after the ``with`` block: copy what must live longer.

    Args:
        url: Local path, any fsspec URL, or ``pipe:COMMAND``, whose output is read up to ``stop``.
        start: Absolute first byte.
        stop: Absolute byte after the last one.
        options: fsspec storage options.
        retry: When to give up on a remote store.
        cancel: Ends a remote read from another thread.

    Yields:
        Exactly ``stop - start`` bytes.

    Raises:
        TruncatedShard: The file ends before ``stop``.
        StorageError: It cannot be read, or the server does not do what was asked.
    """
    fs, path = _resolve(url, options)
    with contextlib.ExitStack() as stack:
        with _mapped(url, f"read bytes {start} to {stop}"):
            if (
                type(fs) is LocalFileSystem and (size := os.stat(path).st_size) < stop
            ):  # a claim must not take memory
                raise TruncatedShard(
                    f"expected bytes {start} to {stop}, got {max(size - start, 0)} of {stop - start}"
                )
            view = stack.enter_context(memory.borrow(stop - start))
            _fill(view, fs, path, start, retry, cancel)
        yield view


def read_into(
    url: str,
    start: int,
    view: memoryview,
    *,
    options: Options | None = None,
    retry: Retry = _ANY_NETWORK,
    cancel: threading.Event | None = None,
) -> None:
    """Fill ``view`` with the bytes of a file from ``start`` on; see :func:`open_range`."""
    fs, path = _resolve(url, options)
    with _mapped(url, f"read bytes {start} to {start + len(view)}"):
        _fill(view, fs, path, start, retry, cancel)


def _fill(
    view: memoryview, fs: Any, path: str, start: int, retry: Retry, cancel: threading.Event | None
) -> None:
    if fs is None:
        command_output.read_range(path, start, view, cancel)
    elif type(fs) is LocalFileSystem:
        with open(path, "rb", buffering=0) as file:  # a buffered file reads ahead
            _read_exactly(file, view, start)
    else:
        http_s3.read_into(fs, path, http_s3.Transfer(start, view), retry, cancel)


def local_path(url: str) -> str | None:
    """The path of a local file; ``None`` for what is elsewhere, and where a program has put a local file system of its own into fsspec."""
    own = fsspec.get_filesystem_class("file") is LocalFileSystem
    return str(LocalFileSystem._strip_protocol(url)) if own and is_local(url) else None


@contextlib.contextmanager
def open_local(path: str, *, url: str) -> Iterator[LocalFile]:
    """Open a local file by the path that :func:`local_path` gives for a URL, for several reads of its parts.

    Raises:
        StorageError: It cannot be opened, or the system gives an error in the ``with`` block.
    """
    with (
        _mapped(url, "read", (OSError, MemoryError, ValueError, OverflowError)),
        LocalFile(path) as file,
    ):
        yield file


def _read_exactly(file: io.RawIOBase, view: memoryview, start: int) -> None:
    file.seek(start)
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise TruncatedShard(
                f"expected bytes {start} to {start + len(view)}, got {done} of {len(view)}"
            )
        done += count


@contextlib.contextmanager
def _mapped_os_errors(url: str) -> Iterator[None]:
    """A full disk is a :class:`StorageError`; any other error of the block passes."""
    try:
        yield
    except PCRError:
        raise
    except OSError as error:
        raise StorageError(f"cannot write: {type(error).__name__}: {error}", url=url) from error


def read_bytes(url: str, *, options: Options | None = None) -> bytes:
    """Read a whole file in one request.

    Raises:
        StorageError
    """
    fs, path = _resolve(url, options)
    if fs is None:
        raise StorageError("expected a file, a pipe has no end that could be known", url=url)
    with _mapped(url, "read"):
        return bytes(
            _retried(lambda: http_s3.call(fs, "cat_file", path, seconds=_ANY_NETWORK.deadline))
        )


def read_ranges(
    ranges: Sequence[tuple[str, int, int | None]], *, options: Options | None = None
) -> list[bytes | PCRError]:
    """Read several ranges ``(url, start, stop)``, one request each, concurrently where the store can.

    A stop of ``None`` means the end of the file.

    Returns:
        For each range its bytes, or the :class:`StorageError` or :class:`TruncatedShard` that came instead.
    """
    results: dict[int, bytes | PCRError] = {}
    by_store: dict[int, tuple[fsspec.AbstractFileSystem, list[tuple[int, str]]]] = {}
    for i, (url, start, stop) in enumerate(ranges):
        if start == stop:
            results[i] = b""
            continue
        fs, path = _resolve(url, options)
        by_store.setdefault(id(fs), (fs, []))[1].append((i, path))
    for fs, wanted in by_store.values():
        starts, stops = ([ranges[i][field] for i, _ in wanted] for field in (1, 2))
        with _mapped(ranges[wanted[0][0]][0], "read ranges"):
            parts = fs.cat_ranges([path for _, path in wanted], starts, stops, on_error="return")
        results |= {
            i: _range_result(*ranges[i], part) for (i, _), part in zip(wanted, parts, strict=True)
        }
    return [results[i] for i in range(len(ranges))]


def _check_length(length: int, start: int, stop: int, url: str) -> None:
    if length < stop - start:
        raise TruncatedShard(
            f"expected bytes {start} to {stop}, got {max(length, 0)} of {stop - start}", url=url
        )
    if length > stop - start:
        raise StorageError(
            f"asked for {stop - start} bytes, got {length}: the server ignores Range", url=url
        )


def _range_result(
    url: str, start: int, stop: int | None, part: bytes | Exception
) -> bytes | PCRError:
    if isinstance(part, Exception):
        error = StorageError(f"cannot read: {type(part).__name__}: {part}", url=url)
        error.__cause__ = part
        return error
    try:
        if stop is not None:
            _check_length(len(part), start, stop, url)
    except PCRError as error:
        return error
    return bytes(part)


@contextlib.contextmanager
def open_file(url: str, *, options: Options | None = None) -> Iterator[BinaryIO]:
    """Open a file for seeking reads (a tar's headers); remote ones in blocks of 1 MiB.

    Raises:
        StorageError: Also for what goes wrong in the ``with`` block, but for errors of ours.
    """
    fs, path = _resolve(url, options)
    if fs is None:
        raise StorageError("expected a file that can be sought in, got a pipe", url=url)
    with _mapped(url, "read"), fs.open(path, "rb", block_size=1 << 20) as file:
        yield file


def file_bytes(url: str, *, options: Options | None = None) -> int | None:
    """Size of a file in bytes, ``None`` where the server does not tell it; one request."""
    fs, path = _resolve(url, options)
    with _mapped(url, "look up"):
        size = _retried(lambda: http_s3.call(fs, "size", path))
        return None if size is None else int(size)


def is_local(url: str) -> bool:
    """Whether the URL is a local path."""
    return "://" not in url and not url.startswith(command_output.PIPE)


def plain_path(url: str) -> str:
    """The path of a ``file://`` URL; any other URL as it is."""
    return str(LocalFileSystem._strip_protocol(url)) if url.startswith("file://") else url


def identity(url: str, *, options: Options | None = None) -> str:
    """What tells this content of a file from another under the same URL: ETag, time or checksum, and size; one request.

    Raises:
        StorageError: It is not there.
    """
    fs, path = _resolve(url, options)
    if fs is None:
        return url
    with _mapped(url, "look up"):
        fs.invalidate_cache()  # a listing may be older than the file
        info = _retried(lambda: http_s3.call(fs, "info", path))
    known = (
        "size",
        "ETag",
        "etag",
        "mtime",
        "LastModified",
        "Last-Modified",
        "updated",
        "md5Hash",
        "Content-MD5",
        "ino",
    )
    return " ".join(f"{name}={info[name]}" for name in known if info.get(name) is not None)


def exists(url: str, *, options: Options | None = None) -> bool:
    """Whether a file or folder is there; one request."""
    fs, path = _resolve(url, options)
    with _mapped(url, "look up"):
        return bool(_retried(lambda: http_s3.call(fs, "exists", path)))


def is_folder(url: str, *, options: Options | None = None) -> bool:
    """Whether the URL is a folder; one request."""
    fs, path = _resolve(url, options)
    with _mapped(url, "look up"):
        return bool(fs.isdir(path))


def list_files(folder: str, *, options: Options | None = None) -> list[tuple[str, int | None]]:
    """All files under a folder, as (path relative to it, size in bytes or ``None``), sorted by path.

    Links to folders are followed, but for those that lead back to where they are; a link to a file that is not there has no size, nor has a file of a
    store that does not tell it.

    Raises:
        StorageError: There is no such folder.
    """
    fs, path = _resolve(folder, options)
    with _mapped(folder, "list"):
        if not fs.isdir(path):
            what = "this is a file" if fs.exists(path) else "there is none"
            raise StorageError(f"expected a folder, {what}", url=folder)
        if isinstance(fs, LocalFileSystem):
            return sorted(_walk(path))
        found = fs.find(path, detail=True)
    root = path.rstrip("/") + "/"
    return sorted((name[len(root) :], info["size"]) for name, info in found.items())


def _walk(root: str) -> Iterator[tuple[str, int | None]]:
    above = {root: {os.path.realpath(root)}}
    for folder, folders, files in os.walk(root, onerror=_raise, followlinks=True):
        inside = {name: os.path.realpath(os.path.join(folder, name)) for name in folders}
        folders[:] = [name for name in folders if inside[name] not in above[folder]]
        above |= {os.path.join(folder, name): above[folder] | {inside[name]} for name in folders}
        del above[folder]
        for name in files:
            path = os.path.join(folder, name)
            yield (
                os.path.relpath(path, root),
                os.stat(path).st_size if os.path.exists(path) else None,
            )


def _raise(error: OSError) -> None:
    raise error


def make_folder(url: str, *, options: Options | None = None) -> None:
    """Make a folder and its parents where the store has folders."""
    fs, path = _resolve(url, options)
    with _mapped(url, "make the folder"):
        fs.makedirs(path, exist_ok=True)


def remove(url: str, *, options: Options | None = None) -> None:
    """Remove a file or a folder with all that is in it."""
    fs, path = _resolve(url, options)
    with _mapped(url, "remove"):
        fs.rm(path, recursive=True)


def remove_temporary_files(folder: str, *, options: Options | None = None) -> None:
    """Remove what a killed process left of :func:`atomic_write`; no other process may be writing to the folder."""
    fs, path = _resolve(folder, options)
    if isinstance(fs, LocalFileSystem):
        with _mapped(folder, "remove temporary files"):
            for left in glob.glob(os.path.join(glob.escape(path), f"{_TEMPORARY}*.tmp")):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(left)


@contextlib.contextmanager
def atomic_write(url: str, *, options: Options | None = None) -> Iterator[BinaryIO]:
    """Write a file that appears whole or not at all.

    Local: a temporary name in the same folder, fsync, rename, fsync of the folder. Elsewhere: a local temporary file, put as one object.

    Raises:
        StorageError
    """
    fs, path = _resolve(url, options)
    local = isinstance(fs, LocalFileSystem)
    folder = os.path.dirname(path) if local else None
    with _mapped(url, "write"):
        if folder:
            os.makedirs(folder, exist_ok=True)
        handle, temporary = _open_temporary(folder)
    try:
        # Through the opener, so that file.name is the temporary path.
        with _mapped_os_errors(url), open(temporary, "wb", opener=lambda *_: handle) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with _mapped(url, "write"):
            _publish(fs, temporary, path, local)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def write_at(handle: int, position: int, data: memoryview, *, url: str) -> None:
    """Write all of ``data`` at a position of an open local file.

    Raises:
        StorageError: The disk is full, or will not.
    """
    with _mapped_os_errors(url):
        done = 0
        while done < len(data):
            done += os.pwrite(handle, data[done:], position + done)


def _open_temporary(folder: str | None) -> tuple[int, str]:
    """A new file; its mode follows the umask, as that of the final file should."""
    path = os.path.join(folder or tempfile.gettempdir(), f"{_TEMPORARY}{secrets.token_hex(8)}.tmp")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), path


def _publish(fs: fsspec.AbstractFileSystem, temporary: str, path: str, local: bool) -> None:
    if not local:
        fs.put_file(temporary, path)
        return
    os.replace(temporary, path)
    handle = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
