"""Whole files: existence, listings, and writes that appear complete or not at all."""

from __future__ import annotations

import errno
import glob
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..errors import StorageError
from ..redaction import get_logger, redact_url
from .stores import (
    LISTING_SECONDS,
    Access,
    ask,
    create_file,
    is_conditional,
    is_conflict,
    mapped_errors,
    resolve,
    upload,
)
from .urls import is_local, is_there, plain_path, split

log = get_logger(__name__)
_WILDCARD = re.compile(r"[*?[]")
_TEMPORARY = ".pcrshard-"
_STREAM_BLOCK = 8 << 20
# (PID, path) of temporary files; a forked child also inherits the entries of its parent.
_begun: set[tuple[int, str]] = set()
# Keys by which different stores identify a version of a file.
_VERSION_NAMES = (
    "size", "ETag", "etag", "mtime", "LastModified", "Last-Modified", "updated", "md5Hash",
    "Content-MD5", "ino",
)  # fmt: skip
# The first one that a store reports says which version it is. A listing may round times.
_VERSIONS = (
    "ETag", "etag", "generation", "md5Hash", "Content-MD5", "mtime", "LastModified",
    "Last-Modified", "last_modified", "updated", "created",
)  # fmt: skip


class Listed(NamedTuple):
    """A file that a store listed.

    Attributes:
        name: Its path in the folder, or its URL.
        size: Bytes; ``None`` if the store does not report them.
        version: Text that changes when the file does: its size, with its ETag or time of writing;
            empty if the store reports neither.
    """

    name: str
    size: int | None
    version: str


@contextmanager
def open_stream(url: str, *, options: Access = None) -> Iterator[BinaryIO]:
    """Open a file to be read once from its beginning; only a local one can be seeked.

    Raises:
        StorageError: The file cannot be read, now or in the ``with`` block.
    """
    if is_local(url):
        with mapped_errors(url, "read", (OSError,)), open(plain_path(url), "rb", 0) as file:
            yield file
        return
    fs, path = resolve(url, options)
    # Over HTTP, 0 is one request; other stores get ever larger ranges.
    how: dict[str, Any] = (
        {"block_size": 0}
        if "https" in fs.protocol
        else {"block_size": _STREAM_BLOCK, "cache_type": "readahead"}
    )
    with mapped_errors(url, "read"), fs.open(path, "rb", **how) as file:
        yield file


def file_bytes(url: str, *, options: Access = None) -> int | None:
    """Return the size in bytes, or ``None`` if the store does not report it; one request.

    Raises:
        StorageError: The file does not exist, or the store cannot be reached.
    """
    size = ask(url, "look up", "size", options)
    return None if size is None else int(size)


def look_up(url: str, *, options: Access = None) -> Listed:
    """Return what a listing would say of a file, by its URL; one request.

    Raises:
        StorageError: The file does not exist, or the store cannot be reached.
    """
    if is_local(url):
        with mapped_errors(url, "look up"):
            return _listed(url, os.stat(plain_path(url)))
    fs, _ = resolve(url, options)
    fs.invalidate_cache()  # a listing may be older than the file
    info = ask(url, "look up", "info", options)
    return Listed(url, info.get("size"), _version(info))


def local_version(size: int, nanoseconds: int) -> str:
    """Return the version of a local file of this time of writing, see :class:`Listed`."""
    return f"{size} mtime={nanoseconds}"


def _version(info: Mapping[str, Any]) -> str:
    name = next((name for name in _VERSIONS if info.get(name)), None)
    return f"{info.get('size')} {name}={info[name]}" if name else ""


def exists(url: str, *, options: Access = None) -> bool:
    """Return whether a file or folder exists; one request.

    Raises:
        StorageError: The store cannot be reached, or refuses the request.
    """
    # Not fsspec's exists, which takes any failure for a missing file.
    try:
        ask(url, "look up", "info", options)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return False
        raise
    return True


def list_files(
    folder: str,
    *,
    options: Access = None,
) -> list[Listed]:
    """Return all files under a folder, sorted, named by their paths relative to it.

    Links to folders are followed, except those that form a cycle. The size is ``None`` for a broken
    link, and if the store does not report it.

    Args:
        folder: A local folder, or any fsspec URL.
        options: fsspec storage options, or a :class:`Store`.

    Raises:
        StorageError: The folder does not exist, or the store does not answer.
    """
    fs, path = resolve(folder, options)
    fs.invalidate_cache()  # another process may have written since the last listing
    if not ask(folder, "list", "isdir", options):
        raise StorageError("expected a folder, there is none", url=folder)
    root = path.rstrip("/") + "/"
    if is_local(folder):
        with mapped_errors(folder, "list"):
            found = list(_walk(root))
    else:
        files = ask(folder, "list", "find", options, seconds=LISTING_SECONDS, detail=True)
        found = [Listed(name, info["size"], _version(info)) for name, info in files.items()]
    return sorted(file._replace(name=file.name[len(root) :]) for file in found)


def list_names(folder: str, *, options: Access = None) -> list[str]:
    """Return the names of the files and folders in a folder; none if there is no such folder.

    Raises:
        StorageError: The folder cannot be listed.
    """
    fs, path = resolve(folder, options)
    fs.invalidate_cache()  # another process may have written since the last listing
    try:
        with mapped_errors(folder, "list"):
            if is_local(folder):
                return os.listdir(path)
            found = ask(folder, "list", "ls", options, seconds=LISTING_SECONDS, detail=False)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return []
        raise
    return [name.rstrip("/").rpartition("/")[2] for name in found]


def is_pattern(url: str) -> bool:
    """Return whether a URL has wildcards (``*``, ``?``, ``[``) and is not an existing local file.

    In an HTTP URL, ``?`` begins the query. Passwords and queries may have any character.
    """
    return _wildcard(url) is not None and not is_there(url)


def fixed_folder(pattern: str) -> str:
    """Return the part of a pattern before the first wildcard, up to and including the last ``/``.

    >>> fixed_folder("photos/2023-*/a?.jpg"), fixed_folder("*.jpg")
    ('photos/', '')
    """
    path = plain_path(pattern)
    fixed = path[: _wildcard(path)]
    return fixed[: fixed.rfind("/") + 1]


def _wildcard(url: str) -> int | None:
    """Return the position of the first wildcard in a URL's path, ``None`` without one."""
    protocol, path, _ = split(url)
    # A password may have any character, and an IPv6 address has brackets.
    found = _WILDCARD.search(path, max(path.find("/"), 0) if protocol else 0)
    return len(protocol) + found.start() if found else None


def list_matching(
    pattern: str,
    *,
    options: Access = None,
) -> list[Listed]:
    """Return the files that match a pattern, named by their URLs.

    ``**`` matches any number of folders.

    Args:
        pattern: Local path or fsspec URL with wildcards.
        options: fsspec storage options, or a :class:`Store`.

    Raises:
        StorageError: The folder cannot be listed or the store does not answer.
    """
    folder, rest = fixed_folder(pattern), split(pattern)[2]
    if is_local(pattern):
        with mapped_errors(pattern, "list"):
            names = glob.iglob(plain_path(pattern), recursive=True)
            return [_listed(name, os.stat(name)) for name in names if os.path.isfile(name)]
    _, root = resolve(folder + rest, options)
    files = ask(pattern, "list", "glob", options, seconds=LISTING_SECONDS, detail=True)
    start = len(root.removesuffix(rest).rstrip("/"))
    return [
        Listed(f"{folder}{name[start:].lstrip('/')}{rest}", info["size"], _version(info))
        for name, info in files.items()
        if info["type"] == "file"
    ]


def status_version(status: os.stat_result) -> str:
    """Return the version of a local file, see :class:`Listed`."""
    return local_version(status.st_size, status.st_mtime_ns)


def _listed(path: str, status: os.stat_result) -> Listed:
    return Listed(path, status.st_size, status_version(status))


def _walk(folder: str, above: tuple[str, ...] = ()) -> Iterator[Listed]:
    """Yield each file under a folder, which is a link into none of ``above``."""
    real = os.path.realpath(folder)
    if real in above:
        return
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        try:
            status = os.stat(path)
        except OSError:
            yield Listed(path, None, "")
            continue
        if stat.S_ISDIR(status.st_mode):
            yield from _walk(path, (*above, real))
        else:
            yield _listed(path, status)


def make_folder(url: str, *, options: Access = None) -> None:
    """Make a folder and its parents, if the store has folders.

    Raises:
        StorageError: The store cannot be reached, or refuses the request.
    """
    ask(url, "make the folder", "makedirs", options, exist_ok=True)


def remove(url: str, *, options: Access = None) -> None:
    """Remove a file, or a folder with its contents.

    Raises:
        StorageError: It does not exist, or the store refuses the request.
    """
    ask(url, "remove", "rm", options, seconds=LISTING_SECONDS, recursive=True)


def remove_temporary_files(folder: str) -> None:
    """Remove temporary files that a killed :func:`atomic_write` left in a local folder.

    No other process may be writing to the folder. Remote folders have none.
    """
    if is_local(folder):
        with mapped_errors(folder, "remove temporary files"):
            for left in Path(plain_path(folder)).glob(f"{_TEMPORARY}*.tmp"):
                left.unlink(missing_ok=True)


@contextmanager
def atomic_write(
    url: str,
    *,
    options: Access = None,
    durable: bool = True,
    replace: bool = True,
) -> Iterator[BinaryIO]:
    """Write a file that appears complete or not at all.

    Local: a temporary name in the same folder, fsync, rename, fsync of the folder. Remote: a local
    temporary file, uploaded as one object.

    Args:
        url: Destination.
        options: fsspec storage options, or a :class:`Store`.
        durable: Whether the file must survive a power failure; False skips both fsyncs.
        replace: Whether the file may exist already. On stores without conditional writes, whether
            it does is asked before the upload.

    Yields:
        The temporary file; ``name`` is its local path.

    Raises:
        StorageError: The disk is full, or the store refuses, or the file exists.
    """
    local, path = is_local(url), plain_path(url)
    with _temporary_file(url, _folder(path) if local else tempfile.gettempdir()) as file:
        with mapped_errors(url, "write", (OSError,)):
            yield file
            file.flush()
        with mapped_errors(url, "write"):
            if local:
                _publish(file, os.replace if replace else _link, path, durable)
            else:
                upload(url, file.name, options, replace=replace)


def _folder(path: str) -> str:
    return os.path.dirname(path) or "."


@contextmanager
def _temporary_file(url: str, folder: str) -> Iterator[BinaryIO]:
    """Yield a new file in a folder, which is created if missing; remove the file afterwards."""
    # Not mkstemp, whose mode ignores the umask.
    temporary = os.path.join(folder, f"{_TEMPORARY}{secrets.token_hex(8)}.tmp")
    begun = (os.getpid(), temporary)
    _begun.add(begun)
    try:
        with mapped_errors(url, "write"):
            os.makedirs(folder, exist_ok=True)
            file = open(temporary, "xb")  # noqa: SIM115  # closed below
        try:
            yield file
        finally:
            with suppress(OSError):  # on a full disk, the failed flush has said so already
                file.close()
    finally:
        with suppress(OSError):  # not created, as where all is read-only
            os.unlink(temporary)
        _begun.discard(begun)


def _publish(
    file: BinaryIO, rename: Callable[[str, str], object], path: str, durable: bool = True
) -> None:
    """Give a flushed file its name; if durable, both survive a power failure."""
    if durable:
        os.fsync(file.fileno())
    rename(file.name, path)
    if durable:
        handle = os.open(_folder(path), os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# Errors of file systems without hard links.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS}
_LEASE_SECONDS = 60.0
_LEASE_SETTLE_SECONDS = 0.5


def create(url: str, data: bytes, *, options: Access = None) -> None:
    """Write a file that must not exist yet; of two concurrent writers, exactly one succeeds.

    The file appears complete or not at all. Local: a temporary file, fsync, then a hard link. S3:
    ``If-None-Match: *``. GCS: generation 0. Other stores have no such request: a lease file next to
    the target excludes other processes of this package, and a warning says so.

    Args:
        url: The file.
        data: Its content.
        options: fsspec storage options, or a :class:`Store`.

    Raises:
        FileExistsError: The file exists.
        StorageError: The disk is full, or the store refuses.
    """
    fs, path = resolve(url, options)
    with mapped_errors(url, "write"):
        try:
            if is_local(url):
                with _temporary_file(url, _folder(path)) as file:
                    file.write(data)
                    file.flush()
                    _publish(file, _link, path)
            elif is_conditional(fs):
                create_file(url, data, options)
            else:
                _create_with_lease(fs, path, data)
            return
        except OSError as error:
            if not is_conflict(error):
                raise
    raise FileExistsError(f"{redact_url(url)} exists")


def _create_with_lease(fs: Any, path: str, data: bytes) -> None:
    log.warning("this store has no create-only writes: a lease file guards %s", redact_url(path))
    lease, token = f"{path}.lease", secrets.token_hex(8).encode()
    if fs.exists(lease) and time.time() - fs.modified(lease).timestamp() < _LEASE_SECONDS:
        raise FileExistsError(path)
    fs.pipe_file(lease, token)
    time.sleep(_LEASE_SETTLE_SECONDS)
    if fs.cat_file(lease) != token:
        raise FileExistsError(path)
    try:
        if fs.exists(path):
            raise FileExistsError(path)
        fs.pipe_file(path, data)
    finally:
        fs.rm_file(lease)


def _link(source: str, path: str) -> None:
    """Give a file a second name, which must not exist."""
    try:
        os.link(source, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        open(path, "xb").close()  # claims the name
        os.replace(source, path)


def age_seconds(url: str, *, options: Access = None) -> float:
    """Return the seconds since the time of writing that the store reports; one request.

    Raises:
        StorageError: The file does not exist, or the store reports no time.
    """
    fs, path = resolve(url, options)
    with mapped_errors(url, "look up"):
        return time.time() - float(fs.modified(path).timestamp())


def abandon_writes() -> None:
    """Remove this process's unfinished files; for a process about to end without cleanup."""
    for process, temporary in tuple(_begun):
        if process == os.getpid():
            with suppress(OSError):
                os.unlink(temporary)
