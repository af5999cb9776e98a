"""Door to scattered reads: a range of a file, or of memory, into many ``bytes`` objects.

Each object is joined, ended and compared with its checksum in the same pass. The compiled module
``pcrshard.native._scatter`` does this without the GIL; where it was not built, slices of one buffer
do the same more slowly.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..checksum import crc32c

try:
    from pcrshard.native import _scatter
except ImportError:  # built without a compiler, or where there is no preadv
    _scatter = None  # type: ignore[assignment]

# It takes the arrays of an index as they are.
available: bool = _scatter is not None and sys.byteorder == "little"


class Place(NamedTuple):
    """A piece: whose it is, its own bytes in the range, and the header that goes before them."""

    item: int
    offset: int
    size: int
    header: memoryview


class Groups(NamedTuple):
    """Where the pieces of I items are: in R groups, each of which has a piece of every item.

    Attributes:
        sizes: (R, I) uint32, contiguous. Bytes of the pieces with their headers; 0 for none.
        starts: (R,) int64. Absolute start of each group.
        base: Number of groups at the beginning that lie item by item instead: all base pieces of
            one item, then those of the next.
        offsets: (I,) uint64. Absolute start of each item's base pieces.
        header_sizes: (R, I) uint16, contiguous. How many bytes of each piece are not in the range,
            but its header; by default none.
        headers: The headers, in the order of the pieces.
    """

    sizes: NDArray[np.uint32]
    starts: NDArray[np.int64]
    base: int = 0
    offsets: NDArray[np.uint64] | None = None
    header_sizes: NDArray[np.uint16] | None = None
    headers: bytes = b""


class Items(NamedTuple):
    """The items of a range; ``values`` has ``None`` for an item without pieces.

    ``damaged`` has the positions of the items that do not have their checksum.
    """

    values: list[bytes | None]
    damaged: list[int]


def read(
    source: int | memoryview,
    start: int,
    stop: int,
    groups: Groups,
    *,
    ending: bytes = b"",
    num_ended: int | None = None,
    crcs: NDArray[np.uint32] | None = None,
    seeds: NDArray[np.uint32] | None = None,
    ahead: bytes | bytearray = b"",
) -> Items:
    """Read the pieces of ``[start, stop)`` once, and put each into its object.

    Args:
        source: Descriptor of a file that can be sought in, or exactly these bytes in memory.
        start: Absolute first byte.
        stop: Absolute byte after the last one.
        groups: The pieces; in the order of the file, apart, and inside the range. What lies
            before a group is not read from a file.
        ending: Bytes to put after each item.
        num_ended: How many items, from the first on, have the ending; by default all.
        crcs: (I,) uint32, contiguous. CRC-32C of each item without its ending; by default nothing
            is checked.
        seeds: (I,) uint32, contiguous. CRC-32C of what each item continues; by default nothing.
        ahead: The first bytes of a file, which were read already.

    Returns:
        The items, and which of them are damaged.

    Raises:
        ValueError: The pieces are not as described.
        EOFError: The file ends before ``stop``.
        OSError: It cannot be read.
    """
    count = groups.sizes.shape[1]
    num_ended = count if num_ended is None else num_ended
    if available:
        rest = (ending, crcs, seeds, ahead)
        return Items(*_scatter.read(source, start, stop, count, num_ended, *groups, *rest))
    joined = [b"".join(pieces) for pieces in _slices(source, start, stop, groups)]
    damaged = [] if crcs is None else _damaged(joined, crcs, seeds)
    endings = [ending] * num_ended + [b""] * (count - num_ended)
    pairs = zip(joined, endings, strict=True)
    return Items([value + end if value else None for value, end in pairs], damaged)


def rows(
    names: tuple[str, ...],
    columns: tuple[Sequence[Any], ...],
    count: int,
) -> list[dict[str, Any]]:
    """The first rows of a table as dicts; 0.1 microseconds for a row of three columns.

    Args:
        names: Names of the columns.
        columns: Lists or tuples of at least ``count`` values.
        count: Number of rows.
    """
    if available:
        return _scatter.rows(names, columns, count)
    table = itertools.islice(zip(*columns, strict=False), count)
    return [dict(zip(names, values, strict=True)) for values in table]


def _slices(
    source: int | memoryview,
    start: int,
    stop: int,
    groups: Groups,
) -> list[list[memoryview]]:
    """The pieces of each item, by slices of one buffer."""
    view = memoryview(_read_file(source, start, stop)) if isinstance(source, int) else source
    pieces: list[list[memoryview]] = [[] for _ in range(groups.sizes.shape[1])]
    header_bytes = 0
    for item, offset, size, header in _layout(groups):
        if not (size or header):
            continue
        if not start <= offset <= offset + size <= stop:
            raise ValueError("expected pieces in order, apart and inside the range")
        pieces[item] += [header, view[offset - start : offset - start + size]]
        header_bytes += len(header)
    if header_bytes != len(groups.headers):
        raise ValueError("expected pieces with their headers")
    return pieces


def _layout(groups: Groups) -> Iterator[Place]:
    """Each piece, in the order of the file."""
    yield from _base_layout(groups)
    headers = memoryview(groups.headers)
    header_sizes = groups.header_sizes
    if header_sizes is None:
        header_sizes = np.zeros(groups.sizes.shape, np.uint16)
    own_sizes = groups.sizes - header_sizes
    for row in range(groups.base, len(groups.sizes)):
        lengths = header_sizes[row].tolist()
        own = own_sizes[row].tolist()
        offsets = itertools.accumulate(own, initial=int(groups.starts[row]))
        for item, (offset, size, length) in enumerate(zip(offsets, own, lengths, strict=False)):
            yield Place(item, offset, size, headers[:length])
            headers = headers[length:]


def _base_layout(groups: Groups) -> Iterator[Place]:
    """The pieces of the first groups, which lie item by item and have no headers apart."""
    if not groups.base or groups.offsets is None:
        return
    columns = groups.sizes[: groups.base].T.tolist()
    for item, (start, column) in enumerate(zip(groups.offsets.tolist(), columns, strict=True)):
        offsets = itertools.accumulate(column, initial=start)
        for offset, size in zip(offsets, column, strict=False):
            yield Place(item, offset, size, memoryview(b""))


def _read_file(
    handle: int,
    start: int,
    stop: int,
) -> bytes:
    data = bytearray()
    while len(data) < stop - start:
        part = os.pread(handle, stop - start - len(data), start + len(data))
        if not part:
            raise EOFError(f"the file ends at {start + len(data)}")
        data += part
    return bytes(data)


def _damaged(
    values: list[bytes],
    crcs: NDArray[np.uint32],
    seeds: NDArray[np.uint32] | None,
) -> list[int]:
    before = np.zeros_like(crcs) if seeds is None else seeds
    rows = zip(values, before.tolist(), crcs.tolist(), strict=True)
    return [i for i, (value, seed, crc) in enumerate(rows) if value and crc32c(value, seed) != crc]
