"""Which bytes of a plain tar are read, and what of it is in memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import storage
from ..checksum import crc32c
from ..errors import StorageError, TruncatedShard
from ..format.shard_index import ShardIndex
from ..storage.retry import Cancel, Cancelled

I64 = NDArray[np.int64]
# Members closer to each other than this are read in one range: a request takes longer.
GAP_BYTES = 256 << 10
# Where more than this fraction of a part of a tar would be read, all of it is.
WHOLE_FRACTION = 0.5
_MOST_UNPACKED = 1 << 20


class Extents(NamedTuple):
    """Ranges of a tar, ascending, which lie in memory one after the other behind its index.

    Attributes:
        starts: (E,) where each begins in the tar.
        stops: (E,) where each ends.
        places: (E,) where each begins in memory.
        is_whole: Whether they are all of a part of the tar.
    """

    starts: I64
    stops: I64
    places: I64
    is_whole: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of all ranges."""
        return int((self.stops - self.starts).sum())

    @property
    def identity(self) -> str:
        """What a cache knows ranges of a tar by; empty for all of a part of it."""
        both = np.concatenate([self.starts, self.stops])
        return "" if self.is_whole else f"-{crc32c(both):08x}"

    def place(self, starts: I64, stops: I64) -> I64:
        """Return where members are in memory, -1 for those that were not read."""
        if not len(self.starts):
            return np.full(len(starts), -1)
        of = np.searchsorted(self.starts, starts, side="right") - 1
        held = (of >= 0) & (stops <= self.stops[of])
        return np.where(held, starts - self.starts[of] + self.places[of], -1)

    def parts(self, view: memoryview, start: int) -> list[storage.Part]:
        """Return what to read where, from a place in memory on.

        Args:
            view: The memory from ``start`` on.
            start: The first place to fill.
        """
        found = []
        columns = (self.starts.tolist(), self.stops.tolist(), self.places.tolist())
        for first, stop, place in zip(*columns, strict=True):
            skip = max(start - place, 0)
            if first + skip < stop:
                at = place + skip - start
                found.append(storage.Part(first + skip, view[at : at + stop - first - skip]))
        return found


def find_extents(index: ShardIndex, rows: I64 | None) -> Extents:
    """Return the ranges of a tar that some samples need.

    Args:
        index: Its index.
        rows: (n,) positions of samples; ``None`` for all.
    """
    tar = index.tar
    assert tar is not None
    begin = index.head.index_stop
    wanted = tar.are_present
    for name in index.schema.columns:  # the index has their values
        own = index.member_rows(name)
        wanted[own.start : own.stop] = False
    if rows is not None:
        chosen = np.zeros(index.num_samples, np.bool_)
        chosen[rows] = True
        owners = np.repeat(np.arange(index.num_samples), index.unit_counts.sum(axis=1))
        others = (len(wanted) - index.num_units) // index.num_samples
        wanted &= np.concatenate([chosen[owners], np.tile(chosen, others)])
    starts, stops = tar.starts[wanted], tar.stops[wanted]
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], stops[order]
    # Members may overlap in a tar that was made to be odd.
    reached = np.maximum.accumulate(stops)
    is_first = np.append(True, starts[1:] > reached[:-1] + GAP_BYTES)[: len(starts)]
    firsts = starts[is_first]
    ends = reached[np.append(is_first[1:], True)[: len(starts)]]
    total = int((ends - firsts).sum())
    is_whole = rows is None or total > WHOLE_FRACTION * (tar.end - tar.begin)
    if is_whole:
        firsts, ends = np.array([tar.begin]), np.array([tar.end])
    places = begin + np.cumsum(np.append(0, ends - firsts))[:-1]
    return Extents(firsts, ends, places, is_whole)


def whole_shard(index: ShardIndex) -> Extents:
    """Return the place of a part of a tar that follows its index in the same file."""
    assert index.tar is not None
    begin, end = np.array([index.tar.begin]), np.array([index.tar.end])
    return Extents(begin, end, np.array([index.head.index_stop]), is_whole=True)


def check_end(url: str, index: ShardIndex, extents: Extents) -> None:
    """Raise TruncatedShard if a local tar ends before the ranges do."""
    if index.tar is not None and not index.tar.is_packed and len(extents.stops):
        storage.check_end(url, int(extents.starts[0]), int(extents.stops[-1]))


def read_extents(
    url: str,
    index: ShardIndex,
    extents: Extents,
    start: int,
    view: memoryview,
    *,
    options: storage.Access,
    cancel: Cancel,
) -> None:
    """Fill memory from ``start`` on with the ranges of a tar.

    Raises:
        TruncatedShard: The tar ends before.
        StorageError: It cannot be read, or it is not the one that was indexed. Where the index has
            checksums, these tell, not the version of the file.
    """
    tar = index.tar
    assert tar is not None
    version = "" if tar.is_checked else tar.version
    parts = extents.parts(view, start)
    try:
        if tar.is_packed:
            _unpack(url, parts, options, cancel)
            storage.check_version(url, version, options=options)
        else:
            storage.read_parts(url, parts, version=version, options=options, cancel=cancel)
    except storage.OtherVersion as error:
        message = (
            f"the tar is not the version that was indexed: {error}; run `pcrshard index` again, by "
            "the URL that the tar is read by (--checksums: an index for any copy of the tar)"
        )
        raise StorageError(message, url=url) from None


def _unpack(url: str, parts: list[storage.Part], options: storage.Access, cancel: Cancel) -> None:
    """Fill memory with ascending ranges of a compressed tar, which is read from its beginning."""
    at = 0
    with storage.open_unpacked(url, options=options) as stream:
        for part in parts:
            done = at - part.start
            while done < len(part.view):
                if cancel is not None and cancel.is_set():
                    raise Cancelled("the read was canceled")
                if done < 0:
                    count = len(stream.read(min(-done, _MOST_UNPACKED)))
                else:
                    count = stream.readinto(part.view[done : done + _MOST_UNPACKED])
                if not count:
                    raise TruncatedShard(
                        f"expected bytes up to {part.stop} of the unpacked tar, it has "
                        f"{part.start + done}",
                        url=url,
                    )
                done += count
            at = part.stop
