"""A cache of shard prefixes on local disk, which grows by scan groups and shrinks by them.

    FOLDER/entries/<url>/<identity>/00000000000000-00000000065536-1a2b3c4d
    FOLDER/entries/<url>/<identity>/entry.json      a checksum, and JSON
    FOLDER/locks/{use,fetch}-00 ... -ff, usage

An extent is one file: start, stop and CRC-32C of its bytes are its name, and it is renamed into place, so that it is there whole or not at
all, whatever dies when. What a file says of itself is checked at each read; a file that lies is removed and fetched again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .. import memory
from ..checksum import crc32c
from ..errors import StorageError, redact

log = logging.getLogger(__name__)
Fetch = Callable[[int, memoryview], None]
_EXTENT = re.compile(r"(\d{14})-(\d{14})-([0-9a-f]{8})")
_ENTRY = "entry.json"
_NUM_LOCKS = 256
_POLL_SECONDS = 0.05
_NEVER = threading.Event()


class Extent(NamedTuple):
    """The bytes ``[start, stop)`` of a shard in a file of their own."""

    path: str
    start: int
    stop: int
    crc: int


class Cached(NamedTuple):
    """What the cache holds of a shard; ``stops`` are the prefix stops of the shard, ``last_use`` seconds since the epoch."""

    url: str
    num_bytes: int
    stops: tuple[int, ...]
    last_use: float

    @property
    def scan(self) -> int:
        """The highest scan that is there, 0 for none."""
        return sum(stop <= self.num_bytes for stop in self.stops[:-1])


class PrefixCache:
    """Prefixes of shards on local disk, shared by the processes of a node.

    Under pressure it drops the groups of high scans before whole shards, the least recently used first, and never what a reader has open.

    Args:
        folder: Made when it is not there. Local disk: it relies on ``flock`` and on atomic renames.
        max_bytes: What the extents may take; ``None`` for no bound.

    Attributes:
        hit_bytes: What this object served from disk.
        fetched_bytes: What it fetched.
    """

    def __init__(self, folder: str, max_bytes: int | None = None) -> None:
        self.folder, self.max_bytes = os.path.abspath(folder), max_bytes
        self.hit_bytes = self.fetched_bytes = 0

    def __repr__(self) -> str:
        return f"PrefixCache({self.folder!r}, {self.max_bytes})"

    @contextlib.contextmanager
    def open_prefix(
        self,
        url: str,
        identity: str,
        stops: Sequence[int],
        stop: int,
        fetch: Fetch,
        cancel: threading.Event | None = None,
    ) -> Iterator[memoryview]:
        """The bytes ``[0, stop)`` of a shard: what is on disk, and the rest by one call of ``fetch``.

        Args:
            url: The shard, credentials included.
            identity: Of its content; another one drops what is held under this URL.
            stops: The prefix stops of all scans, where extents end.
            stop: The end of the prefix.
            fetch: Called with the first missing byte and the memory to fill.
            cancel: Ends the wait for another process that fetches the same shard.

        Yields:
            The bytes, in memory that is used again after the ``with`` block.
        """
        entry = self._entry(url, identity)
        with memory.borrow(stop) as view:
            # Until it is in memory; then the files may go.
            with self._lock(_stripe("use", entry), fcntl.LOCK_SH, cancel):
                done = self._read(entry, view)
                if done < stop:
                    with self._lock(_stripe("fetch", entry), fcntl.LOCK_EX, cancel):
                        # Another process may have fetched it meanwhile.
                        done = self._read(entry, view, done)
                        if done < stop:
                            fetch(done, view[done:])
                            self.fetched_bytes += stop - done
                            self._store(entry, url, stops, view, done, cancel)
                self.hit_bytes += done
            yield view

    def forget(self, url: str, identity: str) -> None:
        """Drop what is held of a shard; who has it open keeps what is in memory."""
        entry = self._entry(url, identity)
        for path in [
            *(extent.path for extent in reversed(_extents(entry))),
            os.path.join(entry, _ENTRY),
        ]:
            _unlink(path)

    def known_stops(self, url: str, identity: str) -> tuple[int, ...] | None:
        """The prefix stops of a shard of which something is held."""
        return _read_entry(self._entry(url, identity))[1] or None

    def entries(self) -> list[Cached]:
        """What is held, least recently used first."""
        found = []
        for folder in self._folders():
            url, stops = _read_entry(folder)
            extents = _extents(folder)
            if extents:
                found.append(Cached(url, _held(extents), stops, max(map(_last_use, extents))))
        return sorted(found, key=lambda cached: cached.last_use)

    def clear(self) -> int:
        """Drop everything that no reader has open; returns the bytes freed."""
        with self._lock("usage", fcntl.LOCK_EX):
            freed = self._evict(lambda _: True)
            self._sweep()
        return freed

    def _entry(self, url: str, identity: str) -> str:
        names = (hashlib.sha256(text.encode()).hexdigest()[:32] for text in (url, identity))
        return os.path.join(self.folder, "entries", *names)

    def _folders(self) -> list[str]:
        root = os.path.join(self.folder, "entries")
        return [
            folder.path
            for url in _scandir(root)
            if url.is_dir()
            for folder in _scandir(url.path)
            if folder.is_dir()
        ]

    @contextlib.contextmanager
    def _lock(self, name: str, mode: int, cancel: threading.Event | None = None) -> Iterator[bool]:
        """Hold a lock file; with ``LOCK_NB`` yields whether it could be had, else waits, by polling, so that it can be cancelled.

        Where none can be made, because the folder is read-only or full, the cache only reads, which needs no lock.
        """
        folder = os.path.join(self.folder, "locks")
        try:
            os.makedirs(folder, exist_ok=True)
            handle = os.open(
                os.path.join(folder, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666
            )
        except OSError as error:
            log.warning("cannot lock the cache %s, going on without: %s", self.folder, error)
            handle = None
        if handle is None:
            yield not mode & fcntl.LOCK_NB
            return
        try:
            while not (held := _try_lock(handle, mode)) and not mode & fcntl.LOCK_NB:
                if (cancel or _NEVER).wait(_POLL_SECONDS):
                    raise StorageError("the wait for the cache was cancelled")
            yield held
        finally:
            # Closing is not enough: a process forked meanwhile, say a worker, has the same lock.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def _read(self, entry: str, view: memoryview, done: int = 0) -> int:
        """Fill ``view`` from byte ``done`` on with sound extents; where the first missing byte is."""
        used = []
        for extent in _extents(entry):
            if extent.start == done and extent.stop <= len(view):
                if not _read_extent(extent, view[extent.start : extent.stop]):
                    log.warning("a cached file was damaged and is fetched again: %s", extent.path)
                    _unlink(extent.path)
                    break
                used.append(extent.path)
                done = extent.stop
        now = time.time_ns()
        for path in used:
            with contextlib.suppress(OSError):
                os.utime(path, ns=(now, now))
        return done

    def _store(
        self,
        entry: str,
        url: str,
        stops: Sequence[int],
        view: memoryview,
        start: int,
        cancel: threading.Event | None,
    ) -> None:
        """Keep ``view[start:]`` as extents that end at prefix stops; a full disk costs the caching, not the read."""
        bounds = [start, *sorted({stop for stop in stops if start < stop < len(view)}), len(view)]
        try:
            self._drop_other_versions(entry)
            # One writer at a time, because what is counted must be there when another counts.
            with self._lock("usage", fcntl.LOCK_EX, cancel):
                if not self._make_room(len(view) - start, (entry, len(view))):
                    return
                os.makedirs(entry, exist_ok=True)
                # One time for all, by the clock of _read: the file system's is coarser, and extents of a shard are dropped from the top.
                now = time.time_ns()
                _write(os.path.join(entry, _ENTRY), _encode_entry(redact(url), stops), now)
                for a, b in itertools.pairwise(bounds):
                    _write(
                        os.path.join(entry, f"{a:014d}-{b:014d}-{crc32c(view[a:b]):08x}"),
                        view[a:b],
                        now,
                    )
        except StorageError:
            raise
        except OSError as error:
            log.warning("cannot write to the cache %s, going on without: %s", self.folder, error)

    def _drop_other_versions(self, entry: str) -> None:
        for folder in _scandir(os.path.dirname(entry)):
            if folder.path != entry:
                for extent in reversed(_extents(folder.path)):
                    _unlink(extent.path)

    def _make_room(self, size: int, own: tuple[str, int]) -> bool:
        """Count ``size`` bytes before they are written, and evict when they would be too many; whether they may be written."""
        limit = self.max_bytes
        if limit is None:
            return True
        counter = os.path.join(self.folder, "locks", "usage-bytes")
        # Counted first and written then: a crash leaves the count too high, which the look at the files corrects.
        total = _read_number(counter)
        if total is None or total + size > limit:
            self._sweep()
            total = sum(
                extent.stop - extent.start
                for folder in self._folders()
                for extent in _extents(folder)
            )
            excess = total + size - limit
            total -= self._evict(lambda freed: freed < excess, own) if size <= limit else 0
        fits = total + size <= limit
        _write(counter, str(total + size * fits).encode(), time.time_ns())
        return fits

    def _evict(self, go_on: Callable[[int], bool], own: tuple[str, int] = ("", 0)) -> int:
        """Drop extents while ``go_on(freed)``: tails before first groups, least recently used first, highest first within a shard.

        What another reader has locked stays; ``own`` is an entry that the caller has locked, and the byte from which on it has no use for it.
        """
        found = [(*pair, folder) for folder in self._folders() for pair in _by_use(folder)]
        found.sort(key=lambda item: (item[0].start == 0, item[1], -item[0].start))
        freed, busy = 0, set()
        for extent, _, folder in found:
            if not go_on(freed):
                break
            if folder in busy:
                continue
            with self._lock(_stripe("use", folder), fcntl.LOCK_EX | fcntl.LOCK_NB) as free:
                if free or (folder == own[0] and extent.start >= own[1]):
                    freed += (extent.stop - extent.start) * _unlink(extent.path)
                else:
                    busy.add(folder)
        return freed

    def _sweep(self) -> None:
        """Remove what killed processes left, and entries of which nothing is held; only with the ``usage`` lock, which every writer has."""
        for folder in [os.path.join(self.folder, "locks"), *self._folders()]:
            for file in _scandir(folder):
                if file.name.endswith(".tmp"):
                    _unlink(file.path)
            if not _extents(folder) and os.path.basename(folder) != "locks":
                _unlink(os.path.join(folder, _ENTRY))
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
                    os.rmdir(os.path.dirname(folder))


def _stripe(name: str, entry: str) -> str:
    """One of a fixed number of lock files, so that an entry's folder may go while others wait for it."""
    url, identity = entry.split(os.sep)[-2:]
    return f"{name}-{(int(url, 16) ^ int(identity, 16)) % _NUM_LOCKS:02x}"


def _try_lock(handle: int, mode: int) -> bool:
    try:
        fcntl.flock(handle, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _extents(folder: str) -> list[Extent]:
    """The extents of an entry by their start; what has another name is not ours, or was not finished."""
    found = [
        (file.path, _EXTENT.fullmatch(file.name))
        for file in _scandir(folder)
        if file.is_file(follow_symlinks=False)
    ]
    extents = [
        Extent(path, int(match[1]), int(match[2]), int(match[3], 16))
        for path, match in found
        if match
    ]
    return sorted(
        (extent for extent in extents if extent.start < extent.stop), key=lambda extent: extent[1:]
    )


def _by_use(folder: str) -> Iterator[tuple[Extent, float]]:
    """Extents and when they were last used; who uses one uses all before it, so that a shard loses its last ones first."""
    latest = 0.0
    for extent in reversed(_extents(folder)):
        latest = max(latest, _last_use(extent))
        yield extent, latest


def _held(extents: Sequence[Extent]) -> int:
    """Where the first missing byte is."""
    done = 0
    for extent in extents:
        done = extent.stop if extent.start == done else done
    return done


def _read_extent(extent: Extent, view: memoryview) -> bool:
    """Whether the file filled ``view`` with the bytes that its name promises."""
    try:
        with open(extent.path, "rb", buffering=0) as file:
            done = 0
            while count := file.readinto(view[done:]):
                done += count
            return done == len(view) and not file.read(1) and crc32c(view) == extent.crc
    except OSError:
        return False


def _encode_entry(url: str, stops: Sequence[int]) -> bytes:
    raw = json.dumps({"url": url, "stops": list(stops)})
    return f"{crc32c(raw.encode()):08x} {raw}".encode()


def _read_entry(folder: str) -> tuple[str, tuple[int, ...]]:
    try:
        with open(os.path.join(folder, _ENTRY), "rb") as file:
            data = file.read()
        raw = json.loads(data[9:])
        if data == _encode_entry(raw["url"], raw["stops"]):
            return raw["url"], tuple(raw["stops"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return "?", ()


def _read_number(path: str) -> int | None:
    try:
        with open(path, "rb") as file:
            number = int(file.read(20))
            return number if number >= 0 else None
    except (OSError, ValueError):
        return None


def _last_use(extent: Extent) -> float:
    try:
        return os.stat(extent.path).st_mtime
    except OSError:
        return 0.0


def _scandir(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


def _write(path: str, data: bytes | memoryview, now: int) -> None:
    """Write a file that appears whole or not at all. Not synced: what a power cut leaves of it is found by its checksum."""
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        os.utime(temporary, ns=(now, now))
        os.replace(temporary, path)
    except BaseException:
        _unlink(temporary)
        raise


def _unlink(path: str) -> bool:
    """Remove a file; whether it is gone."""
    try:
        os.unlink(path)
    except OSError as error:
        return error.errno == errno.ENOENT
    return True
