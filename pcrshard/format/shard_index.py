"""The format in code: the index of a shard (SPEC.md section 2).

Bytes in, bytes out; no I/O. Everything is checked here, once, before it is used: the checksum
before anything is parsed, every length before anything of that length is made.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from ..checksum import crc32c
from ..errors import CorruptIndex, FormatError, TruncatedShard
from ..jpeg.markers import EOI
from .names import MAX_KEY_BYTES, are_distinct, are_legal_keys, valid_field, valid_key
from .scan import Scan, check_scan
from .scan_script import MAX_GROUPS, parse_group
from .shard_head import (
    BLOCK,
    HEAD_STOP,
    MAGIC,
    Buffer,
    Head,
    decode_head,
    name_file,
    require,
    round512,
)

# Some of these are defined elsewhere; who reads an index finds all that it needs here.
__all__ = [
    "BLOCK",
    "HEAD_STOP",
    "MAGIC",
    "MAX_GROUPS",
    "MAX_PIECE_BYTES",
    "U32",
    "Buffer",
    "Head",
    "Schema",
    "ShardIndex",
    "check_schema",
    "decode_head",
    "decode_index",
    "encode_body",
    "round512",
]

MAX_STREAMS = 16
MAX_FIELDS = 256
MAX_PIECE_BYTES = 0xFFFFFFFE

_ABSENT = 0xFFFFFFFF
U32 = NDArray[np.uint32]
I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]
Values = Sequence[bytes | None]


@dataclasses.dataclass(frozen=True)
class Schema:
    """The msgpack part of the index (SPEC 2.2)."""

    script: str
    groups: tuple[str, ...]
    layout: str = "compact"
    base: int = 0
    streams: tuple[tuple[str, str], ...] = (("jpg", "jpeg"),)
    fields: tuple[str, ...] = ()
    preview_fields: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """The schema as canonical msgpack."""
        return bytes(msgpack.packb(dataclasses.asdict(self)))


_SCHEMA_KEYS = [field.name for field in dataclasses.fields(Schema)]


@lru_cache(maxsize=64)
def decode_schema(data: bytes) -> Schema:
    """Parse and check the schema (SPEC 2.2).

    Cached, because all shards of a dataset have the same.
    """
    try:
        raw = msgpack.unpackb(
            data,
            raw=False,
            use_list=False,
            strict_map_key=True,
            max_str_len=1024,
            max_bin_len=0,
            max_ext_len=0,
            max_array_len=MAX_FIELDS,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise CorruptIndex(f"schema is not msgpack within limits: {error}") from error
    known = isinstance(raw, dict) and list(raw) == _SCHEMA_KEYS
    require(known, f"expected schema keys {_SCHEMA_KEYS}")

    schema = Schema(**raw)
    _check_types(schema)
    check_schema(schema)
    return schema


def _check_types(schema: Schema) -> None:
    require(type(schema.base) is int, "expected base to be an integer")
    require(type(schema.streams) is tuple, "expected streams to be a list")
    lists = (schema.groups, schema.fields, schema.preview_fields, *schema.streams)
    for strings in ((schema.script, schema.layout), *lists):
        legal = type(strings) is tuple and all(type(text) is str for text in strings)
        require(legal, f"expected strings in the schema, got {strings!r}")
    require(all(len(pair) == 2 for pair in schema.streams), "expected pairs in streams")


def check_schema(schema: Schema) -> None:
    """Check names and numbers of a schema (SPEC 2.2); raises :class:`CorruptIndex`."""
    bases = {"compact": range(1), "preview": range(1, len(schema.groups) + 1)}
    require(schema.layout in bases, f"unknown layout {schema.layout!r}")
    require(schema.base in bases[schema.layout], "base does not fit layout")
    require(1 <= len(schema.streams) <= MAX_STREAMS, "expected 1 to 16 streams")
    _check_fields(schema)
    try:
        for group in schema.groups:
            parse_group(group)
    except ValueError as error:
        raise CorruptIndex(f"scan script: {error}") from error


def _check_fields(schema: Schema) -> None:
    codecs = {codec for _, codec in schema.streams}
    require(codecs == {"jpeg"}, f"unknown codecs {sorted(codecs - {'jpeg'})}")

    require(len(schema.fields) <= MAX_FIELDS, "expected at most 256 fields")
    names = [*(field for field, _ in schema.streams), *schema.fields]
    require(are_distinct(names), "streams and fields are not distinct")
    require(all(map(valid_field, names)), "a field name is not legal")
    shown = schema.preview_fields
    fits = set(shown) <= set(schema.fields) and are_distinct(shown)
    require(fits and (not shown or schema.layout == "preview"), "preview_fields do not fit")


@dataclasses.dataclass(frozen=True, eq=False)
class ShardIndex:
    """Where everything in a shard is; S samples, M streams, N scan groups.

    Attributes:
        head: Sizes, checksums and prefix stops.
        schema: Names: script, layout, streams and fields.
        sizes: (N + 1, S, M) uint32, bytes of each piece; the last row is the tail.
        crcs: (N + 1, S, M) uint32, CRC-32C of pieces 1..k concatenated; the last row is that of the
            tail alone.
        dims: (S, M, 2) uint16, image height and width in pixels.
        orientation: (S, M) uint8, EXIF orientation 1-8, 0 if none.
        base_offsets: (S, M) uint64, where base members' data start; empty in the compact layout.
        keys: S sample keys.
        fields: For each other field, S raw values or ``None``.
    """

    head: Head
    schema: Schema
    sizes: U32
    crcs: U32
    dims: NDArray[np.uint16]
    orientation: NDArray[np.uint8]
    base_offsets: NDArray[np.uint64]
    keys: tuple[str, ...]
    fields: dict[str, tuple[bytes | None, ...]]

    @property
    def num_samples(self) -> int:
        """Samples in the shard."""
        return self.head.num_samples

    @property
    def num_groups(self) -> int:
        """Scan groups N."""
        return self.head.num_groups

    def starts(self, scan: Scan) -> I64:
        """Absolute start of each piece of groups 1..scan: (rows, S, M).

        ``"full"`` adds the tail as the last row.
        """
        rows = check_scan(scan, self.num_groups)
        sizes = self.sizes[:rows].reshape(rows, -1).astype(np.int64)
        starts = sizes.cumsum(axis=1) - sizes
        starts += self.group_starts[:rows, None]
        if base := self.schema.base:
            first = sizes[:base]
            offsets = self.base_offsets.astype(np.int64).ravel()
            starts[:base] = offsets + first.cumsum(axis=0) - first
        return starts.reshape(rows, *self.sizes.shape[1:])

    @property
    def group_starts(self) -> I64:
        """(N + 1,) where the data of each group start, after its tar header; the tail is last."""
        return np.array((self.head.index_stop, *self.head.prefix_stops[:-1]), np.int64) + BLOCK


def encode_body(schema: Schema, index: ShardIndex) -> bytes:
    """Schema and columns (SPEC 2.2, 2.3); ``index.head`` is not used."""
    # The compact layout has no base offsets, and so no bytes of them.
    columns = (index.sizes, index.crcs, index.dims, index.orientation, index.base_offsets)
    parts = [schema.encode()]
    parts += [column.astype(column.dtype.newbyteorder("<")).tobytes() for column in columns]
    parts += _encode_bytes([key.encode() for key in index.keys])
    for name in schema.fields:
        parts += _encode_bytes(index.fields[name])
    return b"".join(parts)


def _encode_bytes(values: Values) -> tuple[bytes, bytes]:
    sizes = [_ABSENT if value is None else len(value) for value in values]
    return np.array(sizes, "<u4").tobytes(), b"".join(filter(None, values))


def decode_index(
    head: Head,
    body: Buffer,
    *,
    url: str | None = None,
) -> ShardIndex:
    """Parse and check the body of the index.

    Args:
        head: The checked head.
        body: ``[1024, 1024 + body_bytes)`` of the shard; copied, so that the caller may reuse its
            buffer.
        url: Named in errors.

    Raises:
        CorruptIndex: The checksum does not match, or a rule of SPEC.md is broken.
        TruncatedShard: There are fewer bytes than the head says.
    """
    try:
        return _decode_body(head, body)
    except FormatError as error:
        raise name_file(error, url) from error


def _decode_body(head: Head, body: Buffer) -> ShardIndex:
    if len(body) < head.body_bytes:
        raise TruncatedShard(f"expected {head.body_bytes} bytes of index, got {len(body)}")
    body = bytes(body[: head.body_bytes])
    require(crc32c(body) == head.body_crc32c, "index checksum does not match")
    schema = decode_schema(body[: head.schema_bytes])
    require(len(schema.groups) == head.num_groups, "script and num_groups differ")

    index = _decode_columns(head, schema, body)
    _check_pieces(index)
    return index


def _decode_columns(
    head: Head,
    schema: Schema,
    body: bytes,
) -> ShardIndex:
    columns = _Columns(body, head.schema_bytes)
    count = head.num_samples
    streams = len(schema.streams)
    pieces = (head.num_groups + 1, count, streams)
    index = ShardIndex(
        head,
        schema,
        sizes=columns.array("<u4", *pieces),
        crcs=columns.array("<u4", *pieces),
        dims=columns.array("<u2", count, streams, 2),
        orientation=columns.array("<u1", count, streams),
        base_offsets=columns.array("<u8", count if schema.base else 0, streams),
        keys=_decode_keys(columns.byte_strings(count)),
        fields={name: columns.byte_strings(count) for name in schema.fields},
    )
    require(columns.pos == len(body), "bytes are left after the last column")
    return index


class _Columns:
    """A cursor over the raw columns; it refuses a length before it takes it."""

    def __init__(self, body: bytes, start: int) -> None:
        self.body = body
        self.pos = start

    def take(self, size: int) -> int:
        """Go on by ``size`` bytes; returns where they begin."""
        start = self.pos
        require(size <= len(self.body) - start, "a column is longer than the index")
        self.pos = start + size
        return start

    def array(self, dtype: str, *shape: int) -> NDArray[Any]:
        start = self.take(math.prod(shape) * np.dtype(dtype).itemsize)
        return np.ndarray(shape, dtype, self.body, start)

    def byte_strings(self, count: int) -> tuple[bytes | None, ...]:
        sizes = self.array("<u4", count).tolist()
        # Every key is there and most fields are, so nothing is looked at twice without need.
        if _ABSENT not in sizes:
            return self._read(sizes)
        values = self._read([0 if size == _ABSENT else size for size in sizes])
        pairs = zip(values, sizes, strict=True)
        return tuple(None if size == _ABSENT else value for value, size in pairs)

    def _read(self, sizes: list[int]) -> tuple[bytes, ...]:
        start = self.take(sum(sizes))
        return tuple(map(io.BytesIO(memoryview(self.body)[start : self.pos]).read, sizes))


def _decode_keys(values: Values) -> tuple[str, ...]:
    # All at once, because one by one is most of what an index costs; a NUL more than those between
    # keys is in a key.
    try:
        joined = b"\0".join([value or b"" for value in values]).decode()
        keys = tuple(joined.split("\0"))
        legal = len(keys) == len(values) and are_legal_keys(joined)
        if not legal or max(map(len, keys)) > MAX_KEY_BYTES // 4:
            keys = tuple([(value or b"").decode() for value in values])
            for key in keys:
                require(valid_key(key), f"key {key!r} is not legal")
    except UnicodeDecodeError as error:
        raise CorruptIndex(f"a key is not UTF-8: {error}") from error
    require(are_distinct(keys), "keys are not distinct")
    return keys


def _check_pieces(index: ShardIndex) -> None:
    """The rules of SPEC sections 2.3 and 3 that tie sizes, offsets and prefix stops together."""
    # count_nonzero, because any() and all() go through Python: measured, a twentieth of what a
    # small shard costs.
    count = np.count_nonzero
    empty = index.sizes == 0
    missing = empty[0]
    require(not count(index.crcs[-1] * empty[-1]), "an empty tail has a checksum")
    if count(empty[:-1]):  # only with gray, CMYK or missing images
        _check_empty(index, empty)
    if count(missing):
        whole = ((index.dims != 0).all(axis=2) != missing).all()
    else:
        whole = count(index.dims) == index.dims.size
    require(whole, "dims and pieces differ")
    require(not count(index.orientation > 8), "an orientation is above 8")
    if index.schema.base:
        _check_base(index, ~missing)
    _check_stops(index)


def _check_empty(index: ShardIndex, empty: Bools) -> None:
    """A stream that the sample lacks has no piece; an empty piece leaves the checksum as it was."""
    require(empty[:, empty[0]].all(), "a stream has pieces but no first piece")
    changed = index.crcs[:-1].copy()
    changed[1:] ^= index.crcs[:-2]
    unsound = np.count_nonzero(changed * empty[:-1])
    require(not unsound, "an empty piece changes the checksum")


def _check_stops(index: ShardIndex) -> None:
    """Each group ends where its pieces, put one after the other, end."""
    rows = len(index.sizes)
    totals = np.add.reduce(index.sizes.reshape(rows, -1), axis=1, dtype=np.int64).tolist()
    stops = index.head.prefix_stops
    starts = (index.head.index_stop, *stops)
    for row in range(index.schema.base, rows):
        stop = round512(starts[row] + BLOCK + totals[row])
        if stop != stops[row]:
            raise CorruptIndex(f"group {row + 1} ends at {stop}, not {stops[row]}")


def _check_base(index: ShardIndex, present: Bools) -> None:
    """Base members are in order, apart by a header at least, and end where the base groups end."""
    base = index.schema.base
    stop = index.head.prefix_stops[0]
    require(stop == index.head.prefix_stops[base - 1], "prefix stops of the base groups differ")
    require(not index.base_offsets[~present].any(), "a missing stream has an offset")
    offsets = index.base_offsets[present]
    require((offsets < stop).all(), "a base offset is after the base members")

    sizes = index.sizes[:base].sum(axis=0, dtype=np.int64)[present]
    ends = _check_apart(offsets.astype(np.int64), sizes + len(EOI), index.head.index_stop)
    require(ends[-1:].tolist() == [stop], "base members end elsewhere")


def _check_apart(starts: I64, sizes: I64, first: int) -> I64:
    """Members begin on a block, each a header after the end of the one before; where they end."""
    ends = -(-(starts + sizes) // BLOCK) * BLOCK
    floor = np.concatenate(([first], ends[:-1])) + BLOCK
    apart = (starts % BLOCK == 0).all() and (starts >= floor).all()
    require(apart, "base members overlap")
    return ends
