"""The table at the start of a scan group: its pieces and their shared headers (SPEC 3.1).

Bytes in, bytes out; no I/O. A table is checked once, when it is decoded: its checksum first, and
every length before anything of that length is made.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import zstd
from ..checksum import crc32c
from ..errors import CorruptIndex, FormatError
from ..jpeg.markers import EOI
from ..lazy import lazy
from ..memory import Buffer
from .columns import ABSENT
from .shard_head import BLOCK, require, round512
from .shard_index import COMPRESSION_LEVEL, I64, U32, ShardIndex, State, TablePlace

# Bounds a piece's header, so that a table of a few bytes cannot claim gigabytes or minutes of
# decoding: an image's claims grow with its bytes.
MAX_HEADER_BYTES = 512
U16 = npt.NDArray[np.uint16]


class LateValues(NamedTuple):
    """Sizes and CRC-32C of a deferred field's values, (S,) uint32 each, and the row of them."""

    row: int
    sizes: U32
    crcs: U32

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all values."""
        return int(self.sizes[self.sizes != ABSENT].sum(dtype=np.int64))


@dataclasses.dataclass(frozen=True, eq=False)
class GroupTable:
    """The tables of a range of scan groups; R groups, U units, S samples.

    Attributes:
        rows: The groups, counted from 0; N is the tail.
        sizes: (R, U) uint32, bytes of each piece, header and all.
        crcs: (R, U) uint32, CRC-32C of the unit's pieces up to this one; for the tail, of it alone.
        header_sizes: (R, U) uint16, length of the shared header at the start of each piece.
        headers: The headers of all pieces, in order.
        offsets: (U,) uint64, start of each base member's data in the preview layout, 0 for a
            missing unit; empty in the compact layout.
        late: Values of deferred fields by name, in the order of the shard.
    """

    rows: range
    sizes: U32
    crcs: U32
    header_sizes: U16
    headers: bytes
    offsets: npt.NDArray[np.uint64]
    late: dict[str, LateValues]

    @lazy
    def own_bytes(self) -> I64:
        """(R, U) int64 number of bytes of each piece without its shared header."""
        return self.sizes.astype(np.int64) - self.header_sizes

    @lazy
    def row_bytes(self) -> list[int]:
        """Number of bytes of all pieces of each group, without their shared headers."""
        sums: list[int] = (_row_sums(self.sizes) - _row_sums(self.header_sizes)).tolist()
        return sums

    def late_bytes(self, row: int) -> int:
        """Return the number of bytes of all deferred values in the group of a row."""
        return sum(values.num_bytes for values in self.late.values() if values.row == row)

    @lazy
    def encoded(self) -> bytes:
        """The bytes of SPEC 3.1."""
        packed = zstd.compress(self.headers, COMPRESSION_LEVEL) if self.headers else b""
        columns: list[npt.NDArray[Any]] = [self.sizes, self.crcs, self.offsets]
        for values in self.late.values():
            columns += [values.sizes, values.crcs]
        columns.append(self.header_sizes)
        encoded = [column.tobytes() for column in columns]
        return b"".join([len(packed).to_bytes(4, "little"), *encoded, packed])


def group_starts(index: ShardIndex, rows: range) -> list[int]:
    """Return the absolute start of each group's pieces; 0 for base groups, which are members."""
    base = index.schema.base
    ends = index.head.stops
    sizes = index.head.table_bytes
    return [0 if row < base else ends[row] + BLOCK + sizes[row] for row in rows]


def late_starts(index: ShardIndex, table: GroupTable) -> dict[str, int]:
    """Return the absolute start of each deferred field's values, which are contiguous."""
    starts = group_starts(index, table.rows)
    places = zip(table.rows, starts, table.row_bytes, strict=True)
    ends = {row: start + size for row, start, size in places}
    base = index.schema.base
    if table.rows.start < base:
        # The values of the base groups are at the end of their members.
        ends[base - 1] = index.head.prefix_stops[0] - round512(table.late_bytes(base - 1))
    found = {}
    for name, values in table.late.items():
        found[name] = ends[values.row]
        ends[values.row] += values.num_bytes
    return found


def decode_tables(
    index: ShardIndex,
    places: Sequence[TablePlace],
    prefix: Buffer,
    *,
    url: str | None = None,
) -> GroupTable:
    """Parse and check the tables of consecutive groups, as one table.

    Args:
        index: The shard's index.
        places: Locations of the tables.
        prefix: The bytes of the shard up to the tables' ends; copied.
        url: Named in errors.

    Raises:
        CorruptIndex: A checksum does not match, or a rule of SPEC.md is broken.
    """
    try:
        table = _decode(index, places, prefix)
        _check_pieces(index, table)
        _check_stops(index, places, table)
    except (FormatError, ValueError) as error:
        if len(places) > 1:  # find the damaged one
            for place in places:
                decode_tables(index, [place], prefix, url=url)
        row = places[-1].rows[-1]
        name = "the tail" if row == index.num_groups else f"group {row + 1}"
        raise CorruptIndex(f"the table of {name}: {error}", url=url) from error
    return table


@functools.lru_cache(maxsize=64)
def _layout(rows: int, units: int, offsets: int, late: int, samples: int) -> np.dtype[Any]:
    """Return the parts of a table before its headers (SPEC 3.1)."""
    return np.dtype(
        [
            ("headers_bytes", "<u4"),
            ("sizes", "<u4", (rows, units)),
            ("crcs", "<u4", (rows, units)),
            ("offsets", "<u8", (offsets,)),
            ("late", "<u4", (late, 2, samples)),
            ("header_sizes", "<u2", (rows, units)),
        ]
    )


def _decode(
    index: ShardIndex,
    places: Sequence[TablePlace],
    prefix: Buffer,
) -> GroupTable:
    """Return the tables as one after checking their checksums and lengths."""
    units = index.num_units
    late: list[tuple[int, str]] = []
    headers: list[bytes] = []
    # Neighbors of equal layout share an array: one for each table takes half as long again.
    runs: list[tuple[np.dtype[Any], list[bytes]]] = []
    for rows, start, end in places:
        part = bytes(prefix[start:end])
        row = rows[-1]
        names = index.late_fields(row)
        late += [(row, name) for name in names]
        offsets = units if row < index.schema.base else 0
        layout = _layout(len(rows), units, offsets, len(names), index.num_samples)
        stop = layout.itemsize
        require(len(part) >= stop, f"expected {stop} bytes or more")
        require(crc32c(part) == index.head.table_crcs[row], "checksum does not match")
        headers_bytes = int.from_bytes(part[:4], "little")
        require(len(part) == stop + headers_bytes, "its parts end elsewhere")
        if not runs or runs[-1][0] is not layout:
            runs.append((layout, []))
        runs[-1][1].append(part[:stop])
        headers.append(part[stop:])
    arrays = [np.frombuffer(b"".join(columns), layout) for layout, columns in runs]

    def column(name: str, *shape: int) -> npt.NDArray[Any]:
        found = [array[name].ravel() for array in arrays]
        return (found[0] if len(found) == 1 else np.concatenate(found)).reshape(shape)

    rows = range(places[0].rows.start, places[-1].rows.stop)
    header_sizes = column("header_sizes", len(rows), units)
    values = column("late", len(late), 2, index.num_samples)
    return GroupTable(
        rows,
        column("sizes", len(rows), units),
        column("crcs", len(rows), units),
        header_sizes,
        _unpack_headers(header_sizes, headers),
        arrays[0]["offsets"][0],
        {name: LateValues(row, *pair) for (row, name), pair in zip(late, values, strict=True)},
    )


def _unpack_headers(header_sizes: U16, packed: Sequence[bytes]) -> bytes:
    """Join the headers of tables after checking their lengths."""
    is_too_long = np.count_nonzero(header_sizes > MAX_HEADER_BYTES)
    require(not is_too_long, f"expected headers of at most {MAX_HEADER_BYTES} bytes")
    # Only the first table may be of several rows, those of the base groups, without headers.
    row_bytes = _row_sums(header_sizes).tolist()
    joined = []
    for data, num_bytes in zip(packed, row_bytes[-len(packed) :], strict=True):
        require(num_bytes or not data, "bytes of headers, but no header")
        joined.append(zstd.decompress(data, num_bytes) if num_bytes else b"")
    return b"".join(joined)


def _row_sums(array: npt.NDArray[Any]) -> I64:
    sums: I64 = np.add.reduce(array, 1, np.int64)
    return sums


def _check_pieces(index: ShardIndex, table: GroupTable) -> None:
    """Check the rules of SPEC section 3.1 that tie a table to the index."""
    is_longer = np.count_nonzero(table.header_sizes > table.sizes)
    require(not is_longer, "a header is longer than its piece")
    states = index.states
    # Usually every image is divided into scans and has pieces in every group.
    if np.count_nonzero(table.sizes) != table.sizes.size or np.count_nonzero(states != 1):
        empty = table.sizes == 0
        if table.rows[-1] == index.num_groups:
            require(not table.crcs[-1][empty[-1]].any(), "an empty tail has a checksum")
        if table.rows.start == 0:
            require(not empty[0, states == State.LAYERED].any(), "an image has no first piece")
        require(empty[:, states == State.MISSING].all(), "an image that is not there has pieces")
        whole = states >= State.WHOLE
        later = table.sizes[int(table.rows.start == 0) :, whole]
        headers = table.header_sizes[:, whole]
        require(not later.any() and not headers.any(), "a file kept whole has a later piece")
    if table.rows[-1] == index.num_groups:
        require(not table.header_sizes[-1].any(), "a tail has a header")
    for name, values in table.late.items():
        absent = values.sizes == ABSENT
        require(not values.crcs[absent].any(), f"an absent {name} has a checksum")


def _check_stops(
    index: ShardIndex,
    places: Sequence[TablePlace],
    table: GroupTable,
) -> None:
    """Check that each group ends where its table, pieces and deferred values end."""
    for rows, _, start in places:
        row = rows[-1]
        late = table.late_bytes(row)
        expected = index.head.prefix_stops[row]
        if row < index.schema.base:
            end = _check_base(index, table, start)
            # Values of the base groups are a member of their own, if there are any; before it may
            # be preview fields of samples without images.
            stop = round512(end + BLOCK + late) if late else end
            require(stop <= expected, f"it ends at {stop}, after {expected}")
        else:
            stop = round512(start + table.row_bytes[row - table.rows.start] + late)
            require(stop == expected, "it ends elsewhere")


def _check_base(index: ShardIndex, table: GroupTable, start: int) -> int:
    """Check that base members are in order and do not overlap; return where the last one ends."""
    base = index.schema.base
    require(not table.header_sizes[:base].any(), "a base member has a shared header")
    missing = index.states == State.MISSING
    require(not table.offsets[missing].any(), "a missing image has an offset")
    offsets = table.offsets[~missing]
    require((offsets < index.head.prefix_stops[base - 1]).all(), "a base offset is after its group")
    # Members start on blocks, at least a header apart.
    starts = offsets.astype(np.int64)
    sizes = table.sizes[:base].sum(axis=0, dtype=np.int64)
    sizes = (sizes + len(EOI) * (index.states == State.LAYERED))[~missing]
    ends = np.append(round512(start), -(-(starts + sizes) // BLOCK) * BLOCK)
    on_blocks = (starts % BLOCK == 0).all()
    require(on_blocks and (starts >= ends[:-1] + BLOCK).all(), "base members overlap")
    return int(ends[-1])
