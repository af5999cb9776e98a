"""A cache of shard prefixes on local disk: one growing file per shard.

    FOLDER/pcrshard-cache-<user>/            nothing else in FOLDER is touched
        .pcrshard                            the mark, with the token of this cache
        <signature>-<hash>-<name>            the bytes [0, size) of the shard
        room                                 bytes of all files; locked while a file grows
        CACHEDIR.TAG

1. A file holds the first bytes of one version of one shard, whichever process is killed at any
   moment: files are only appended to or truncated.
2. The process that fetches a shard holds the exclusive lock of its file, and so does the one that
   truncates it, which never waits. Readers share the lock, because the kernel clears the last page
   of a truncated file after they have checked its size. A damaged file is unlinked without the
   lock: open files stay whole.
3. ``room`` is raised before a write, so that files never exceed the limit. It is lowered after a
   file was cut, and by counting the files, once the limit seems to be reached.
4. The lock of a file is taken before that of ``room``, whose holder never waits for a file.
5. Damage by the disk or a power failure is detected by the shard's own checksums. Because these
   are not signatures, a file that another user owns or can write to is not used.
6. The name of each file is signed with the token of the folder, so that only names that a cache has
   written there are listed, truncated or unlinked.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import math
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from .. import storage
from ..arguments import num_bytes
from ..errors import PCRError, StorageError, TruncatedShard
from ..format.shard_head import HEAD_STOP, read_head
from ..redaction import get_logger, redact_url
from ..storage.locks import hold_lock
from ..storage.ownership import Owner, find_owner, take_folder
from ..storage.retry import Cancel, Cancelled
from .shared_integers import SharedIntegers

log = get_logger(__name__)
Fetch = Callable[[int, memoryview], None]
_KIND = "cache"
_SIGNATURE_DIGITS = 16
# Signature, hash, and the two hyphens.
_NAME_START = _SIGNATURE_DIGITS + 32 + 2
_UNSAFE = re.compile(r"[^\w.-]", re.ASCII)
_ROOM_BYTES = 8
# The convention of https://bford.info/cachedir/, by which backup tools skip caches.
_TAG = "CACHEDIR.TAG"
_TAG_TEXT = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"
    b"# A cache of pcrshard: `pcrshard cache clear` empties it.\n"
)
# Files idle this long may be evicted even if used during this job; their user may have exited.
_FORGOTTEN_SECONDS = 24 * 3600.0
# List the files again after cutting at least one file in this number of those listed before, or
# after this multiple of the time that listing took.
_PAUSE = 20
_LONGEST_PAUSE = 60.0


class Cached(NamedTuple):
    """A cached prefix of a shard.

    Attributes:
        path: Path of the file.
        num_bytes: Bytes cached.
        last_use: Time of the last read or growth, in seconds since 1970.
    """

    path: str
    num_bytes: int
    last_use: float

    @property
    def name(self) -> str:
        """The shard's file name."""
        return os.path.basename(self.path)[_NAME_START:]

    @property
    def scan(self) -> int:
        """The highest complete scan, 0 for none; reads the head."""
        return sum(stop <= self.num_bytes for stop in _stops(self.path)[1:-1])


class CacheStats(NamedTuple):
    """Totals of a cache.

    Attributes:
        hit_bytes: Bytes served from the cache.
        fetched_bytes: Bytes fetched from the store.
    """

    hit_bytes: int
    fetched_bytes: int


class _Victim(NamedTuple):
    """A file that may be evicted.

    Attributes:
        file: The file as it was listed.
        is_idle: Whether it is spared once it is used again; otherwise it is one that this job now
            reads at a lower scan.
        whole: Whether all of it may go.
    """

    file: Cached
    is_idle: bool
    whole: bool


class PrefixCache:
    """Prefixes of shards on local disk, shared by the processes of a node.

    At the limit, it evicts the groups of high scans before whole shards, least recently used first,
    and never a file that is being read.

    Args:
        folder: A folder on local disk, created if missing. The cache is a subfolder that is
            accessible to its owner only, and touches no other file.
        max_bytes: Limit of all files, a number or a size such as ``"50GB"``; ``None`` for none.
        since: Start of the job, in seconds since 1970; by default now. Files used since then are
            not evicted for other shards, which are then read without being cached. In a new order
            each epoch, the least recently used shards are often the next ones needed, so caching
            half of the shards saves half of the bytes instead of a sixth. With ``math.inf``,
            eviction is plain least recently used.

    Attributes:
        folder: The subfolder.

    Raises:
        ValueError: ``folder`` is not local, or ``max_bytes`` is not a size.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int | str | None = None,
        since: float | None = None,
    ) -> None:
        if isinstance(max_bytes, str):
            max_bytes = num_bytes("max_bytes", max_bytes)
        folder = os.fspath(folder)
        if not storage.is_local(folder):
            raise ValueError(f"expected cache_dir to be a local folder, got {redact_url(folder)}")
        named = os.path.abspath(storage.plain_path(folder))
        self.folder = os.path.join(named, f"pcrshard-cache-{os.geteuid()}")
        self.max_bytes: float = math.inf if max_bytes is None else max_bytes
        self.since = time.time() if since is None else since
        # What to evict next, the number of files when they were last listed, the files cut since
        # then, and the monotonic time before which too few cuts do not justify another listing.
        self._victims: deque[_Victim] = deque()
        self._listed = self._cuts = 0
        self._full_until = 0.0
        # How much of each file was last read.
        self._read_stops: dict[str, int] = {}
        self._counts = SharedIntegers([0, 0])

    @property
    def stats(self) -> CacheStats:
        """Totals of this object and its copies in DataLoader workers."""
        return CacheStats(*self._counts[:])

    def read(
        self,
        url: str,
        identity: str,
        view: memoryview,
        fetch: Fetch,
        *,
        start: int = 0,
        cancel: Cancel = None,
    ) -> None:
        """Fill a prefix of a shard: from disk, and the rest with one ``fetch``.

        Args:
            url: The shard, credentials included.
            identity: Identifies the version of the shard at this URL.
            view: The prefix.
            fetch: Called with the first missing byte and the memory to fill.
            start: Bytes of the prefix that are already in place.
            cancel: Set by another thread to end a wait for the process that fetches this shard.
        """
        stop = len(view)
        token = self._enter()
        if token is None:
            fetch(start, view[start:])
            self._counts.add(1, stop - start)
            return
        path = self._path(token, url, identity)
        self._read_stops[path] = stop
        with self._hold(path, shared=True, create=False, wait=False) as handle:
            held = _read(handle, view, start)
        if held < stop:
            with self._hold(path, cancel=cancel) as handle:
                # Another process may have fetched it while this one waited.
                held = _read(handle, view, held)
                if held < stop:
                    fetch(held, view[held:])
                    if handle is not None:
                        self._append(handle, path, view, cancel)
        self._counts.add(0, held - start)
        self._counts.add(1, stop - held)

    def remember(self, url: str, data: bytes) -> None:
        """Keep a small file, such as a dataset index, in place of what was kept of it before."""
        token = self._enter()
        if token is None or self.recall(url) == data:
            return
        path = self._path(token, url, "")
        with self._tolerate(), self._hold(path) as handle:
            if handle is not None:
                os.truncate(handle, 0)
                self._append(handle, path, memoryview(data), None)

    def recall(self, url: str) -> bytes:
        """Return what :meth:`remember` kept of a file last; empty for nothing."""
        owner = self._find_owner()
        if owner is None:
            return b""
        path = self._path(owner.token, url, "")
        with self._hold(path, shared=True, create=False, wait=False) as handle:
            size = 0 if handle is None else os.fstat(handle).st_size
            view = memoryview(bytearray(size))
            return bytes(view[: _read(handle, view, 0)])

    def forget(self, url: str, identity: str) -> None:
        """Remove a damaged shard from the cache; readers that have it open continue."""
        if owner := self._find_owner():
            with suppress(OSError):
                os.unlink(self._path(owner.token, url, identity))

    def entries(self) -> list[Cached]:
        """Return all cached prefixes, least recently used first.

        Raises:
            StorageError: The folder has no cache.
        """
        owner = self._find_owner()
        if owner is None:
            raise StorageError(
                f"expected a folder that a job has used as cache_dir, without a {self.folder}"
            )
        found = []
        with suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    signature, _, name = entry.name.partition("-")
                    if signature == _sign(owner.token, name) and entry.is_file(
                        follow_symlinks=False
                    ):
                        status = entry.stat(follow_symlinks=False)
                        found.append(Cached(entry.path, status.st_size, status.st_mtime))
        return sorted(found, key=lambda file: file.last_use)

    def clear(self) -> int:
        """Drop everything that is not being read; return the bytes freed.

        Raises:
            StorageError: The folder has no cache.
        """
        return sum(self._cut(file.path, 0) for file in self.entries())

    def _path(self, token: str, url: str, identity: str) -> str:
        named = f"{url}\0{identity}".encode(errors="surrogateescape")
        digest = hashlib.sha256(named).hexdigest()[:32]
        name = _UNSAFE.sub("_", storage.file_name(redact_url(url, query="")))[-100:]
        name = f"{digest}-{name}"
        return os.path.join(self.folder, f"{_sign(token, name)}-{name}")

    def _find_owner(self) -> Owner | None:
        owner = find_owner(self.folder)
        return owner if owner and owner.kind == _KIND else None

    def _enter(self) -> str | None:
        """Return the token of the folder, which is made if it is missing; ``None`` without one."""
        try:
            if owner := self._find_owner():
                return owner.token
            for folder in (os.path.dirname(self.folder), self.folder):
                os.makedirs(folder, mode=0o700, exist_ok=True)
            owner = take_folder(self.folder, _KIND)
            with suppress(FileExistsError), open(os.path.join(self.folder, _TAG), "xb") as file:
                file.write(_TAG_TEXT)
            return owner.token
        except (OSError, StorageError) as error:
            self._warn(error)
            return None

    def _warn(self, error: Exception) -> None:
        why = getattr(error, "strerror", None) or str(error)
        _warn_once(f"cannot use the cache {self.folder}, continuing without it: {why}")

    @contextmanager
    def _tolerate(self) -> Iterator[None]:
        """Warn of an error of the disk, which ends the caching, not the read."""
        try:
            yield
        except Cancelled:
            raise
        except OSError as error:
            self._warn(error)

    @contextmanager
    def _hold(self, path: str, **how: Any) -> Iterator[int | None]:
        """Hold the lock of a file; yield ``None`` for a file that is missing or cannot be used."""
        with ExitStack() as stack:
            handle = None
            with self._tolerate():
                locked = stack.enter_context(hold_lock(path, mode=0o600, **how))
                if locked is not None:
                    _check_own(locked, self.folder)
                    handle = locked
            yield handle

    def _append(self, handle: int, path: str, view: memoryview, cancel: Cancel) -> None:
        """Append missing bytes to a file, or remove an empty one if there is no room."""
        room_path = os.path.join(self.folder, "room")
        # One process writes at a time, because files are counted under the same lock.
        with self._tolerate(), self._hold(room_path, cancel=cancel) as room:
            held, stop = os.fstat(handle).st_size, len(view)
            if stop > self.max_bytes:
                _warn_once(
                    f"prefixes larger than all of the cache {self.folder}, {self.max_bytes} bytes, "
                    "are read without being kept: give it more cache_bytes"
                )
            elif room is not None and self._take_room(room, stop - held):
                while held < stop:
                    held += os.pwrite(handle, view[held:], held)
            if not held:
                os.unlink(path)

    def _take_room(self, room: int, size: int) -> bool:
        """Reserve bytes before a write; return whether they fit."""
        data = os.pread(room, _ROOM_BYTES, 0)
        total = int.from_bytes(data, "little")
        is_known = len(data) == _ROOM_BYTES
        if is_known:
            total -= self._evict(total + size - self.max_bytes)
        if not is_known or total + size > self.max_bytes:
            if self._cuts * _PAUSE < self._listed and time.monotonic() < self._full_until:
                return False
            total = self._count()
            total -= self._evict(total + size - self.max_bytes)
        fits = total + size <= self.max_bytes
        os.pwrite(room, (total + size * fits).to_bytes(_ROOM_BYTES, "little"), 0)
        return fits

    def _count(self) -> int:
        """List what to evict; return the bytes of all files."""
        begun = time.monotonic()
        files = self.entries()
        now = time.time()
        oldest = max(self.since, now - _FORGOTTEN_SECONDS)
        idle = [file for file in files if not oldest <= file.last_use <= now]
        # High scans first, even ones this job no longer reads, then whole files.
        self._victims = deque(_Victim(file, is_idle=True, whole=False) for file in idle)
        stops = self._read_stops.copy()
        for file in files:
            if stops.get(file.path, file.num_bytes) < file.num_bytes:
                self._victims.append(_Victim(file, is_idle=False, whole=False))
        self._victims.extend(_Victim(file, is_idle=True, whole=True) for file in idle)
        self._listed, self._cuts = len(files), 0
        listed = time.monotonic()
        self._full_until = listed + min(_PAUSE * (listed - begun), _LONGEST_PAUSE)
        return sum(file.num_bytes for file in files)

    def _evict(self, size: float) -> int:
        """Evict files until ``size`` bytes are freed, or none is left; return the bytes freed."""
        freed = 0
        while freed < size and self._victims:
            file, is_idle, whole = self._victims.popleft()
            if whole:
                freed += self._cut(file.path, 0, file.last_use)
                continue
            stops = [stop for stop in _stops(file.path)[1:] if stop < file.num_bytes]
            if not is_idle:
                # Reading a head or an index does not count as reading at a lower scan.
                stops = [stop for stop in stops if stop == self._read_stops.get(file.path)]
            if stops:
                # The highest scan that is low enough.
                enough = [stop for stop in stops if file.num_bytes - stop >= size - freed]
                stop = max(enough, default=stops[0])
                freed += self._cut(file.path, stop, file.last_use if is_idle else math.inf)
                if stop > stops[0]:
                    lower = file._replace(num_bytes=stop)
                    self._victims.appendleft(_Victim(lower, is_idle, whole))
        return freed

    def _cut(self, path: str, stop: int, last_use: float = math.inf) -> int:
        """Truncate or unlink a file unless it is in use, or was since; return the bytes freed."""
        with suppress(OSError), self._hold(path, create=False, wait=False) as handle:
            if handle is None:
                return 0
            status = os.fstat(handle)
            if status.st_mtime > last_use:
                return 0
            if not stop:
                os.unlink(path)
            elif status.st_size > stop:
                os.truncate(handle, stop)  # the path may be another file's by now
                os.utime(handle, ns=(status.st_atime_ns, status.st_mtime_ns))  # not a use
            self._cuts += status.st_size > stop
            return max(status.st_size - stop, 0)
        return 0


def _sign(token: str, name: str) -> str:
    """Return what the name of a file begins with, if a cache with this token has written it."""
    signed = hmac.digest(token.encode(), name.encode(errors="surrogateescape"), "sha256")
    return signed.hex()[:_SIGNATURE_DIGITS]


@functools.cache
def _warn_once(message: str) -> None:
    """Log what is wrong with a cache once, not at every shard."""
    log.warning("%s", message)


def _check_own(handle: int, folder: str) -> None:
    """Raise an error if another user could have written a file, or put it in place of another."""
    status = os.fstat(handle)
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        raise PermissionError("another user could have written a file in it")
    for above in (found := Path(folder).resolve(), *found.parents):
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise PermissionError(f"anybody can write to {above}")


def _read(handle: int | None, view: memoryview, start: int) -> int:
    """Fill ``view`` from ``start`` on as far as a file goes; return the number of bytes filled."""
    if handle is None:
        return start
    with suppress(OSError, TruncatedShard):
        stop = min(os.fstat(handle).st_size, len(view))
        if stop > start:
            storage.read_local(handle, start, view[start:stop])
            start = stop
            os.utime(handle)  # fails in a read-only cache
    return start


def _stops(path: str) -> tuple[int, ...]:
    """Return the prefix stops of the shard in a file."""
    with suppress(OSError, PCRError), open(path, "rb") as file:
        return read_head(os.pread(file.fileno(), HEAD_STOP, 0)).stops
    return ()
