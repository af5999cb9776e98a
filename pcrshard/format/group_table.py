"""The table at the start of a scan group: its pieces and their shared headers (SPEC 3.1).

Bytes in, bytes out; no I/O. A table is checked once, when it is decoded: its checksum first, and
every length before anything of that length is made.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import zstd
from ..checksum import crc32c
from ..errors import CorruptIndex, FormatError
from ..jpeg.markers import EOI
from .columns import ABSENT, Columns, encode_array
from .shard_head import BLOCK, Buffer, name_file, require, round512
from .shard_index import COMPRESSION_LEVEL, I64, U32, ShardIndex, TablePlace

# Bounds a piece's header, so that a table of a few bytes cannot claim gigabytes or minutes of
# decoding: an image's claims grow with its bytes.
MAX_HEADER_BYTES = 512
U16 = npt.NDArray[np.uint16]
_U16 = np.dtype("<u2")
_U32 = np.dtype("<u4")
_NO_OFFSETS = np.zeros(0, np.uint64)
# Size, checksum and header size of a unit.
_UNIT_BYTES = 4 + 4 + 2
# Checksum of the table, size of the compressed headers.
_START = struct.Struct("<II")


class LateValues(NamedTuple):
    """Sizes and CRC-32C of a deferred field's values, (S,) uint32 each."""

    sizes: U32
    crcs: U32

    @property
    def stored(self) -> U32:
        """Return the stored bytes of each value, 0 if the sample lacks the field."""
        return np.where(self.sizes == ABSENT, np.uint32(0), self.sizes)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all values."""
        return int(self.stored.sum(dtype=np.int64))


# By name, with the row of the values.
LateFields = dict[str, tuple[int, LateValues]]


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
        late: Values of deferred fields, in the order of the shard, each with its row.
    """

    rows: range
    sizes: U32
    crcs: U32
    header_sizes: U16
    headers: bytes
    offsets: npt.NDArray[np.uint64]
    late: LateFields

    @functools.cached_property
    def own_bytes(self) -> I64:
        """Return the (R, U) bytes of pieces without their shared headers."""
        return self.sizes.astype(np.int64) - self.header_sizes

    def late_bytes(self, row: int) -> int:
        """Return the bytes of all deferred values in the group of a row."""
        return sum(values.num_bytes for at, values in self.late.values() if at == row)

    @functools.cached_property
    def encoded(self) -> bytes:
        """Return the bytes of SPEC 3.1."""
        packed = zstd.compress(self.headers, COMPRESSION_LEVEL) if self.headers else b""
        columns: list[npt.NDArray[Any]] = [self.sizes, self.crcs, self.offsets]
        for _, values in self.late.values():
            columns += values
        columns.append(self.header_sizes)
        encoded = [encode_array(column) for column in columns]
        body = b"".join([len(packed).to_bytes(4, "little"), *encoded, packed])
        return crc32c(body).to_bytes(4, "little") + body


def join_tables(tables: Sequence[GroupTable]) -> GroupTable:
    """Join tables of consecutive groups; the first may be that of the base groups."""
    first = tables[0]
    if len(tables) == 1:
        return first
    return GroupTable(
        range(first.rows.start, tables[-1].rows.stop),
        np.concatenate([table.sizes for table in tables]),
        np.concatenate([table.crcs for table in tables]),
        np.concatenate([table.header_sizes for table in tables]),
        b"".join([table.headers for table in tables]),
        first.offsets,
        {name: late for table in tables for name, late in table.late.items()},
    )


def decode_tables(
    index: ShardIndex,
    places: Sequence[TablePlace],
    parts: Sequence[Buffer],
    *,
    url: str | None = None,
) -> GroupTable:
    """Parse and check the tables of consecutive groups, as one table.

    Args:
        index: The shard's index.
        places: Locations of the tables.
        parts: Bytes of each table; copied.
        url: Named in errors.

    Raises:
        CorruptIndex: As in :func:`decode_table`.
    """
    is_plain = not index.schema.late and places[0].rows[-1] >= index.schema.base
    if is_plain:
        # Ten tables one by one cost three times as much; on failure, that finds the damaged one.
        with suppress(FormatError):
            return _decode_together(index, places, [bytes(part) for part in parts])
    pairs = zip(places, parts, strict=True)
    return join_tables([decode_table(index, place, part, url=url) for place, part in pairs])


def _decode_together(
    index: ShardIndex,
    places: Sequence[TablePlace],
    parts: Sequence[bytes],
) -> GroupTable:
    """Decode tables without deferred fields, which all have the same columns."""
    units = index.num_units
    stop = _START.size + units * _UNIT_BYTES
    columns = b"".join([_checked_columns(part, stop) for part in parts])
    rows = np.frombuffer(columns, np.uint8).reshape(len(parts), stop)[:, _START.size :]
    header_sizes = np.ascontiguousarray(rows[:, 8 * units :]).view(_U16)
    table = GroupTable(
        range(places[0].rows.start, places[-1].rows.stop),
        np.ascontiguousarray(rows[:, : 4 * units]).view(_U32),
        np.ascontiguousarray(rows[:, 4 * units : 8 * units]).view(_U32),
        header_sizes,
        _join_headers(header_sizes, [part[stop:] for part in parts]),
        _NO_OFFSETS,
        late={},
    )
    _check_pieces(index, table)
    _check_plain_stops(index, places, table)
    return table


def _checked_columns(part: bytes, fixed_bytes: int) -> bytes:
    """Return the columns of a table after checking checksum and length."""
    require(len(part) >= fixed_bytes, "a table is too short")
    crc, packed_bytes = _START.unpack_from(part)
    require(crc == crc32c(memoryview(part)[4:]), "checksum does not match")
    require(len(part) == fixed_bytes + packed_bytes, "bytes are left after the headers")
    return part[:fixed_bytes]


def _check_plain_stops(
    index: ShardIndex,
    places: Sequence[TablePlace],
    table: GroupTable,
) -> None:
    """Check that each group ends where its table and pieces end."""
    own_bytes = np.add.reduce(table.sizes, 1, np.int64) - _header_bytes(table.header_sizes)
    ends = index.head.prefix_stops[table.rows.start : table.rows.stop]
    for place, size, stop in zip(places, own_bytes.tolist(), ends, strict=True):
        require(round512(place.stop + size) == stop, "a group ends elsewhere")


def decode_table(
    index: ShardIndex,
    place: TablePlace,
    data: Buffer,
    *,
    url: str | None = None,
) -> GroupTable:
    """Parse and check the table of a scan group, or of the base groups.

    Args:
        index: The shard's index.
        place: Location of the table.
        data: Bytes of the table; copied.
        url: Named in errors.

    Raises:
        CorruptIndex: The checksum does not match, or a rule of SPEC.md is broken.
    """
    try:
        table = _decode(index, place.rows, bytes(data))
        _check_pieces(index, table)
        _check_stops(index, table, place.stop)
    except FormatError as error:
        row = place.rows[-1]
        name = "the tail" if row == index.num_groups else f"group {row + 1}"
        raise name_file(CorruptIndex(f"the table of {name}: {error}"), url) from error
    return table


def _decode(
    index: ShardIndex,
    rows: range,
    data: bytes,
) -> GroupTable:
    require(len(data) >= _START.size, "expected a table of at least 8 bytes")
    crc, packed_bytes = _START.unpack_from(data)
    require(crc == crc32c(memoryview(data)[4:]), "checksum does not match")
    columns = Columns(data, _START.size)
    units = index.num_units
    shape = (len(rows), units)
    row = rows[-1]
    is_base = row == index.schema.base - 1
    sizes = columns.array("<u4", *shape)
    crcs = columns.array("<u4", *shape)
    offsets = columns.array("<u8", units if is_base else 0)
    late = _late_values(columns, index, row)
    header_sizes = columns.array("<u2", *shape)
    packed = data[columns.take(packed_bytes) :]
    require(columns.pos == len(data), "bytes are left after the headers")
    headers = _decode_headers(header_sizes, packed)
    return GroupTable(
        rows,
        sizes,
        crcs,
        header_sizes,
        headers,
        offsets,
        late,
    )


def _late_values(
    columns: Columns,
    index: ShardIndex,
    row: int,
) -> LateFields:
    names = index.late_fields(row)
    return {name: (row, _read_late(columns, index.num_samples)) for name in names}


def _read_late(columns: Columns, count: int) -> LateValues:
    sizes = columns.array("<u4", count)
    crcs = columns.array("<u4", count)
    return LateValues(sizes, crcs)


def _decode_headers(header_sizes: U16, packed: bytes) -> bytes:
    return _join_headers(header_sizes.reshape(1, -1), [packed])


def _join_headers(header_sizes: U16, packed: Sequence[bytes]) -> bytes:
    """Join the headers of tables after checking their lengths; one row of sizes per table."""
    legal = np.count_nonzero(header_sizes > MAX_HEADER_BYTES) == 0
    require(legal, f"expected headers of at most {MAX_HEADER_BYTES} bytes")
    num_bytes = _header_bytes(header_sizes).tolist()
    return b"".join(map(_unpack_headers, packed, num_bytes))


def _header_bytes(header_sizes: U16) -> I64:
    """Return the bytes of the headers in each row."""
    num_bytes: I64 = np.add.reduce(header_sizes, 1, np.int64)
    return num_bytes


def _unpack_headers(packed: bytes, num_bytes: int) -> bytes:
    if num_bytes == 0:
        require(not packed, "bytes of headers, but no header")
        return b""
    return zstd.decompress(packed, num_bytes)


def _check_pieces(index: ShardIndex, table: GroupTable) -> None:
    """Check the rules of SPEC section 3.1 that tie a table to the index."""
    count = np.count_nonzero
    require(not count(table.header_sizes > table.sizes), "a header is longer than its piece")
    if table.rows[-1] == index.num_groups:
        _check_tail(table)
    # Usually every image exists and has pieces in every group.
    if not index.is_complete or count(table.sizes) != table.sizes.size:
        _check_empty(index, table)
    for name, (_, values) in table.late.items():
        _check_late(index, name, values)


def _check_empty(index: ShardIndex, table: GroupTable) -> None:
    """Check that missing images have no pieces and all others have a first one."""
    empty = table.sizes == 0
    missing = index.dims[:, 0] == 0
    if table.rows.start == 0:
        whole = np.count_nonzero(missing != empty[0]) == 0
        require(whole, "dims and pieces differ")
    require(empty[:, missing].all(), "an image that is not there has pieces")


def _check_tail(table: GroupTable) -> None:
    is_empty = table.sizes == 0
    require(not np.count_nonzero(table.crcs * is_empty), "an empty tail has a checksum")
    require(not np.count_nonzero(table.header_sizes), "a tail has a header")


def _check_late(
    index: ShardIndex,
    name: str,
    values: LateValues,
) -> None:
    absent = values.sizes == ABSENT
    require(not np.count_nonzero(values.crcs * absent), f"an absent {name} has a checksum")
    streams = [field for field, _ in index.schema.streams]
    if name not in streams:
        return
    units = _stream_units(index, streams.index(name))
    both = (index.dims[units, 0] != 0) & ~absent
    require(not both.any(), f"a sample has two of {name}")


def _stream_units(index: ShardIndex, stream: int) -> I64:
    """Return the (S,) first unit of each sample in a stream."""
    before = index.unit_counts[:, :stream].sum(axis=1)
    units: I64 = np.array(index.first_units[:-1]) + before
    return units


def _check_stops(
    index: ShardIndex,
    table: GroupTable,
    start: int,
) -> None:
    """Check that each group ends where its table, pieces and deferred values end."""
    row = table.rows[-1]
    late = table.late_bytes(row)
    expected = index.head.prefix_stops[row]
    if row < index.schema.base:
        end = _check_base(index, table)
        # Values of the base groups are a member of their own, if there are any; before it may be
        # preview fields of samples without images.
        stop = round512(end + BLOCK + late) if late else end
        require(stop <= expected, f"it ends at {stop}, after {expected}")
        return
    pieces = int(table.own_bytes.sum(dtype=np.int64))
    stop = round512(start + pieces + late)
    require(stop == expected, f"it ends at {stop}, not {expected}")


def _check_base(index: ShardIndex, table: GroupTable) -> int:
    """Check that base members are in order and do not overlap; return where the last one ends."""
    require(not np.count_nonzero(table.header_sizes), "a base member has a shared header")
    missing = table.sizes[0] == 0
    require(not table.offsets[missing].any(), "a missing image has an offset")
    offsets = table.offsets[~missing]
    stop = index.head.prefix_stops[table.rows[-1]]
    require((offsets < stop).all(), "a base offset is after the base members")
    totals = table.sizes.sum(axis=0, dtype=np.int64)
    sizes = totals[~missing] + len(EOI)
    place = next(index.table_places(0, table.rows.stop))
    return _check_apart(offsets.astype(np.int64), sizes, round512(place.stop))


def _check_apart(
    starts: I64,
    sizes: I64,
    first: int,
) -> int:
    """Check that members start on blocks, at least a header apart; return the last end."""
    ends = -(-(starts + sizes) // BLOCK) * BLOCK
    floor = np.concatenate(([first], ends[:-1])) + BLOCK
    on_blocks = (starts % BLOCK == 0).all()
    apart = (starts >= floor[: len(starts)]).all()
    require(on_blocks and apart, "base members overlap")
    return int(ends[-1]) if len(ends) else first
