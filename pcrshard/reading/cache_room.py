"""Room in a prefix cache: how much is taken, and what goes for something else."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from . import cache_folder, cache_locks
from .cache_extents import (
    ENTRY,
    Use,
    by_last_use,
    list_extents,
    list_folder,
    unlink,
    write_file,
)

# An entry's folder, and the byte from which on nobody has a use for it.
Own = tuple[str, int]
_NOBODY = ("", 0)
# What nobody has used for so long may go, even if it was used since the job began: who used it may
# have ended then.
_FORGOTTEN_SECONDS = 24 * 3600.0
# Where nothing could go, the next look at all files is so many times the time of one later.
_PAUSE = 20
# Where something goes, so much more of the limit goes with it, so that not each shard needs a look.
_SPARE = 1 / 64
_LONGEST_PAUSE = 60.0


class _Count(NamedTuple):
    """Bytes of all extents; when nothing was found that may go, by whom, and how long that holds.

    Attributes:
        total: The bytes.
        looked: When.
        pause: For how many seconds nobody needs to look again.
        since: When the job began that looked; who came later may drop more.
    """

    total: int
    looked: float = 0.0
    pause: float = 0.0
    since: float = 0.0

    def says_full(self, since: float) -> bool:
        until = self.looked + min(self.pause, _LONGEST_PAUSE)
        return since <= self.since and self.looked <= time.time() < until


def make_room(
    folder: str,
    limit: int,
    size: int,
    own: Own,
    since: float,
) -> bool:
    """Count bytes before they are written, and evict when they would be too many.

    Only with the ``usage`` lock, which every writer holds.

    Args:
        folder: The cache's.
        limit: What the extents may take.
        size: The bytes.
        own: For which entry they are.
        since: What was used since then stays.

    Returns:
        Whether they may be written.
    """
    if size > limit:
        cache_folder.warn_once(
            folder,
            f"prefixes larger than all of the cache {folder}, {limit} bytes, are read without "
            "being kept: give it more cache_bytes",
        )
        return False
    counter = _counter(folder)
    # Counted first and written then: a crash leaves the count too high, which the look at the
    # files corrects.
    count = _read_count(counter)
    if count is None or count.total + size > limit:
        if count is not None and count.says_full(since):
            return False
        count = _look(folder, limit, size, own, since)
    fits = count.total + size <= limit
    taken = count._replace(total=count.total + size * fits)
    write_file(counter, " ".join(map(str, taken)).encode(), time.time_ns())
    return fits


def _look(
    folder: str,
    limit: int,
    size: int,
    own: Own,
    since: float,
) -> _Count:
    """Count all files, and drop what may go for so many bytes."""
    begun = time.time()
    sweep(folder)
    extents = itertools.chain(*map(list_extents, entry_folders(folder)))
    total = sum(extent.num_bytes for extent in extents)
    excess = total + size - limit
    if excess > 0:
        # The order of plain last use is kept to the byte.
        wanted = excess + limit * _SPARE if math.isfinite(since) else excess
        total -= evict(folder, lambda freed: freed < wanted, own, since)
    now = time.time()
    fits = total + size <= limit
    return _Count(total) if fits else _Count(total, now, _PAUSE * (now - begun), since)


def forget_count(folder: str) -> None:
    """Have the next writer look at all files."""
    unlink(_counter(folder))


def _counter(folder: str) -> str:
    return os.path.join(folder, "locks", "usage-bytes")


def _read_count(path: str) -> _Count | None:
    try:
        with open(path, "rb") as file:
            total, *times = file.read(100).split()
            count = _Count(int(total), *map(float, times))
    except (OSError, ValueError, TypeError):
        return None
    return count if count.total >= 0 else None


def entry_folders(folder: str) -> Iterator[str]:
    """The folder of each version of each shard."""
    for url in list_folder(os.path.join(folder, "entries")):
        if url.is_dir():
            yield from (found.path for found in list_folder(url.path) if found.is_dir())


def evict(
    folder: str,
    go_on: Callable[[int], bool],
    own: Own = _NOBODY,
    until: float = math.inf,
) -> int:
    """Drop extents while ``go_on(freed)``; returns the bytes freed.

    Tails go before first groups, least recently used first, highest first within a shard.

    Args:
        folder: The cache's.
        go_on: Asked before each.
        own: An entry that the caller has locked, and the byte from which on it has no use for it.
            What another reader has locked stays.
        until: What was used at this time or later stays: see :func:`_may_go`.
    """
    freed = 0
    busy = set()
    for use, entry in _by_worth(folder, until):
        if not go_on(freed):
            break
        if entry in busy:
            continue
        with cache_locks.hold_entry("use", entry, wait=False) as free:
            if free or (entry == own[0] and use.extent.start >= own[1]):
                freed += use.extent.num_bytes * unlink(use.extent.path)
            else:
                busy.add(entry)
    return freed


def _by_worth(folder: str, until: float) -> list[tuple[Use, str]]:
    """Extents that may go, and their entries' folders; those first that go first."""
    found = [(use, entry) for entry in entry_folders(folder) for use in by_last_use(entry)]
    now = time.time()
    found = [item for item in found if _may_go(item[0], until, now)]
    found.sort(key=lambda item: (item[0].extent.start == 0, item[0].last, -item[0].extent.start))
    return found


def _may_go(use: Use, until: float, now: float) -> bool:
    """Whether an extent is dropped for something else, though it was used at a time or later.

    So it is where the last reader of its shard did without it, as after a change to a lower scan;
    where nobody has used it for a day; or where the clock was set back since.
    """
    least = max(until, now - _FORGOTTEN_SECONDS)
    return use.is_idle or not least <= use.last <= now


def sweep(folder: str) -> None:
    """Remove what killed processes left, and entries of which nothing is held.

    Only with the ``usage`` lock, which every writer holds.
    """
    for found in [os.path.join(folder, "locks"), *entry_folders(folder)]:
        for file in list_folder(found):
            if file.name.endswith(".tmp"):
                unlink(file.path)
        if not list_extents(found) and os.path.basename(found) != "locks":
            unlink(os.path.join(found, ENTRY))
            with suppress(OSError):
                os.rmdir(found)
                os.rmdir(os.path.dirname(found))
    cache_locks.sweep(folder)
