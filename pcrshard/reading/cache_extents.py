"""The files of a prefix cache: each holds a run of a shard's bytes, and says so in its name."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from .. import storage
from ..checksum import crc32c
from ..memory import Buffer

ENTRY = "entry.json"
_MAX_ENTRY_BYTES = 1 << 16
_EXTENT = re.compile(r"(\d{14})-(\d{14})-([0-9a-f]{8})")


class Extent(NamedTuple):
    """The bytes ``[start, stop)`` of a shard in a file of their own."""

    path: str
    start: int
    stop: int
    crc: int

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds."""
        return self.stop - self.start


def list_extents(folder: str) -> list[Extent]:
    """The extents of an entry by their start.

    What has another name is not ours, or was not finished.
    """
    extents = map(_as_extent, list_folder(folder))
    return sorted(filter(None, extents), key=lambda extent: extent[1:])


def _as_extent(file: os.DirEntry[str]) -> Extent | None:
    match = _EXTENT.fullmatch(file.name)
    if match is None or not file.is_file(follow_symlinks=False):
        return None
    extent = Extent(file.path, int(match[1]), int(match[2]), int(match[3], 16))
    return extent if extent.start < extent.stop else None


def drop_extents(folder: str) -> None:
    """Remove the extents of an entry, the last one first."""
    for extent in reversed(list_extents(folder)):
        unlink(extent.path)


def drop_other_versions(folder: str) -> list[str]:
    """Remove all other contents of a shard; the folders that they were in."""
    others = [other.path for other in list_folder(os.path.dirname(folder)) if other.path != folder]
    for other in others:
        drop_extents(other)
        unlink(os.path.join(other, ENTRY))
        with suppress(OSError):
            os.rmdir(other)
    return others


class Use(NamedTuple):
    """When an extent was last used, and whether the shard was read without it since then."""

    extent: Extent
    last: float
    is_idle: bool


def by_last_use(folder: str) -> Iterator[Use]:
    """Extents, the last one first, and when they were last used.

    Who uses one uses all before it, so that a shard loses its last ones first.
    """
    extents = list_extents(folder)
    first = last_use(extents[0]) if extents else 0.0
    latest = 0.0
    for extent in reversed(extents):
        latest = max(latest, last_use(extent))
        yield Use(extent, latest, latest < first)


def held_bytes(extents: Sequence[Extent]) -> int:
    """Where the first missing byte is."""
    done = 0
    for extent in extents:
        done = extent.stop if extent.start == done else done
    return done


def read_extent(extent: Extent, view: memoryview) -> bool:
    """Whether the file filled ``view`` with the bytes that its name promises."""
    try:
        with open(extent.path, "rb", buffering=0, opener=_open_here) as file:
            done = 0
            while count := file.readinto(view[done:]):
                done += count
            return done == len(view) and not file.read(1) and crc32c(view) == extent.crc
    except OSError:
        return False


def _open_here(path: str, flags: int) -> int:
    """Not what a link leads to."""
    return os.open(path, flags | os.O_NOFOLLOW)


def last_use(extent: Extent) -> float:
    """When the extent was last used, in seconds since 1970; 0 if it is gone."""
    try:
        return os.stat(extent.path).st_mtime
    except OSError:
        return 0.0


def list_folder(folder: str) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing if it is gone."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


def unlink(path: str) -> bool:
    """Remove a file; whether it is gone."""
    try:
        os.unlink(path)
    except OSError as error:
        return error.errno == errno.ENOENT
    return True


def encode_entry(
    folder: str,
    url: str,
    stops: Sequence[int],
) -> bytes:
    """What is known of a shard.

    The checksum is over the folder's name too, so that it is not believed elsewhere.
    """
    raw = json.dumps({"url": url, "stops": list(stops)})
    place = "/".join(folder.split(os.sep)[-2:])
    return f"{crc32c(f'{place} {raw}'.encode()):08x} {raw}".encode()


def read_entry(folder: str) -> tuple[str, tuple[int, ...]]:
    """URL and prefix stops of the shard of an entry's folder; ``("?", ())`` if they are lost."""
    try:
        with open(os.path.join(folder, ENTRY), "rb") as file:
            data = file.read(_MAX_ENTRY_BYTES)
        raw = json.loads(data[9:])
        if data == encode_entry(folder, raw["url"], raw["stops"]):
            return raw["url"], tuple(raw["stops"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return "?", ()


def write_file(
    path: str,
    data: Buffer,
    now: int,
) -> None:
    """Write a file of this time that appears whole or not at all.

    It is not synced: what a power cut leaves of it is found by its checksum.
    """
    with storage.atomic_write(path, durable=False) as file:
        file.write(data)
        file.flush()
        os.utime(file.fileno(), ns=(now, now))
