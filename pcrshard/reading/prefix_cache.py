"""A cache of shard prefixes on local disk, which grows by scan groups and shrinks by them.

    FOLDER/entries/<url>/<identity>/00000000000000-00000000065536-1a2b3c4d
    FOLDER/entries/<url>/<identity>/entry.json      a checksum, and JSON
    FOLDER/locks/{use,fetch}-<url>-<identity>, usage
    FOLDER/CACHEDIR.TAG

An extent is one file: start, stop and CRC-32C of its bytes are its name, and it is renamed into
place, so that it is there whole or not at all, whatever dies when. What a file says of itself is
checked at each read; a file that lies is removed and fetched again. That is against accidents: who
could write to the folder could also write a checksum, so it must be the user's own.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from .. import memory
from ..checksum import crc32c
from ..redaction import get_logger, redact_url
from ..storage.retry import Cancel, Cancelled
from . import cache_folder, cache_locks, cache_room
from .cache_extents import (
    ENTRY,
    drop_extents,
    drop_other_versions,
    encode_entry,
    held_bytes,
    last_use,
    list_extents,
    read_entry,
    read_extent,
    unlink,
    write_file,
)

log = get_logger(__name__)
Fetch = Callable[[int, memoryview], None]


def is_cache(folder: str) -> bool:
    """Whether a folder is that of a :class:`PrefixCache` which has kept something at some time."""
    return all(os.path.isdir(os.path.join(folder, name)) for name in ("entries", "locks"))


class Cached(NamedTuple):
    """What the cache holds of a shard; ``last_use`` is in seconds since 1970.

    ``stops`` are the prefix stops of the shard, that of scan 0 first.
    """

    url: str
    num_bytes: int
    stops: tuple[int, ...]
    last_use: float

    @property
    def scan(self) -> int:
        """The highest scan that is there, 0 for none."""
        return sum(stop <= self.num_bytes for stop in self.stops[1:-1])


class PrefixCache:
    """Prefixes of shards on local disk, shared by the processes of a node.

    Under pressure it drops the groups of high scans before whole shards, the least recently used
    first, and never what a reader has open.

    Args:
        folder: Made when it is not there. Local disk: it relies on ``flock`` and on atomic renames.
            One that belongs to another user, or that anybody can write to, is not used.
        max_bytes: What the extents may take; ``None`` for no bound.
        since: When the job began, in seconds since 1970; by default now: what was used since then
            is not dropped for something else, which is not kept then. Each epoch has an order of
            its own, in which the least recently used shards would often be those that come next:
            half of the shards on disk then save half of the bytes, not a sixth. With ``math.inf``
            those least recently used go.

    Attributes:
        hit_bytes: What this object served from disk.
        fetched_bytes: What it fetched.
    """

    def __init__(
        self,
        folder: str,
        max_bytes: int | None = None,
        since: float | None = None,
    ) -> None:
        self.folder = os.path.abspath(folder)
        self.max_bytes = max_bytes
        self.since = time.time() if since is None else since
        self.hit_bytes = 0
        self.fetched_bytes = 0

    def __repr__(self) -> str:
        return f"PrefixCache({self.folder!r}, {self.max_bytes})"

    @contextmanager
    def open_prefix(
        self,
        url: str,
        identity: str,
        stops: Sequence[int],
        stop: int,
        fetch: Fetch,
        cancel: Cancel = None,
    ) -> Iterator[memoryview]:
        """The bytes ``[0, stop)`` of a shard: what is on disk, and the rest by one ``fetch``.

        Args:
            url: The shard, credentials included.
            identity: What tells its content from another; a new one drops what is held.
            stops: The prefix stops of all scans, where extents end.
            stop: The end of the prefix.
            fetch: Called with the first missing byte and the memory to fill.
            cancel: Ends the wait for another process that fetches the same shard.

        Yields:
            The bytes, in memory that is used again after the ``with`` block.
        """
        entry = self._entry(url, identity)
        with memory.borrow(stop) as view:
            if not cache_folder.prepare(self.folder):
                fetch(0, view)
                self.fetched_bytes += stop
                yield view
                return
            # Held until everything is in memory; after that the files may go.
            with cache_locks.hold_entry("use", entry, shared=True, cancel=cancel):
                done = self._read(entry, view)
                if done < stop:
                    with cache_locks.hold_entry("fetch", entry, cancel=cancel):
                        # Another process may have fetched it meanwhile.
                        done = self._read(entry, view, done)
                        if done < stop:
                            fetch(done, view[done:])
                            self.fetched_bytes += stop - done
                            described = encode_entry(entry, redact_url(url), stops)
                            bounds = _bounds(done, stops[1:], stop)
                            self._store(entry, described, bounds, view, cancel)
                self.hit_bytes += done
            yield view

    def forget(self, url: str, identity: str) -> None:
        """Drop what is held of a shard; who has it open keeps what is in memory."""
        if cache_folder.prepare(self.folder):
            entry = self._entry(url, identity)
            drop_extents(entry)
            unlink(os.path.join(entry, ENTRY))

    def known_stops(self, url: str, identity: str) -> tuple[int, ...] | None:
        """The prefix stops of a shard of which something is held."""
        if not cache_folder.prepare(self.folder):
            return None
        return read_entry(self._entry(url, identity))[1] or None

    def entries(self) -> list[Cached]:
        """What is held, least recently used first."""
        found = filter(None, map(_cached, cache_room.entry_folders(self.folder)))
        return sorted(found, key=lambda cached: cached.last_use)

    def clear(self) -> int:
        """Drop everything that no reader has open; returns the bytes freed.

        Raises:
            StorageError: The folder is no cache, or not this user's.
        """
        cache_folder.check_marked(self.folder)
        with cache_locks.hold(self.folder, "usage"):
            freed = cache_room.evict(self.folder, lambda _: True)
            cache_room.sweep(self.folder)
            cache_room.forget_count(self.folder)
        return freed

    def _entry(self, url: str, identity: str) -> str:
        names = (hashlib.sha256(text.encode()).hexdigest()[:32] for text in (url, identity))
        return os.path.join(self.folder, "entries", *names)

    def _read(
        self,
        entry: str,
        view: memoryview,
        done: int = 0,
    ) -> int:
        """Fill ``view`` from byte ``done`` on with sound extents.

        Returns:
            Where the first missing byte is.
        """
        used = []
        for extent in list_extents(entry):
            if extent.start == done and extent.stop <= len(view):
                if not read_extent(extent, view[extent.start : extent.stop]):
                    log.warning("a cached file was damaged and is fetched again: %s", extent.path)
                    unlink(extent.path)
                    break
                used.append(extent.path)
                done = extent.stop
        now = time.time_ns()
        for path in used:
            with suppress(OSError):
                os.utime(path, ns=(now, now))
        return done

    def _store(
        self,
        entry: str,
        described: bytes,
        bounds: list[int],
        view: memoryview,
        cancel: Cancel,
    ) -> None:
        """Keep the bytes between the bounds as extents.

        A full disk costs the caching, not the read.
        """
        try:
            # One writer at a time, because what is counted must be there when another counts.
            with cache_locks.hold(self.folder, "usage", cancel=cancel):
                for other in drop_other_versions(entry):
                    cache_locks.drop(other)
                size = len(view) - bounds[0]
                if not self._make_room(size, (entry, len(view))):
                    return
                os.makedirs(entry, exist_ok=True)
                # One time for all, by the clock of _read: the file system's is coarser, and
                # extents of a shard are dropped from the top.
                now = time.time_ns()
                write_file(os.path.join(entry, ENTRY), described, now)
                for start, stop in itertools.pairwise(bounds):
                    part = view[start:stop]
                    name = f"{start:014d}-{stop:014d}-{crc32c(part):08x}"
                    write_file(os.path.join(entry, name), part, now)
        except Cancelled:
            raise
        except OSError as error:
            cache_folder.warn_going_on(self.folder, "write to", error)

    def _make_room(self, size: int, own: cache_room.Own) -> bool:
        limit = self.max_bytes
        return limit is None or cache_room.make_room(self.folder, limit, size, own, self.since)


def _cached(folder: str) -> Cached | None:
    extents = list_extents(folder)
    if not extents:
        return None
    url, stops = read_entry(folder)
    latest = max(map(last_use, extents))
    return Cached(url, held_bytes(extents), stops, latest)


def _bounds(
    start: int,
    stops: Sequence[int],
    stop: int,
) -> list[int]:
    """Where extents of ``[start, stop)`` begin and end: at prefix stops."""
    return [start, *sorted({bound for bound in stops if start < bound < stop}), stop]
