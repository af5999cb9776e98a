"""The format in code: the index of a shard (SPEC.md section 2).

Bytes in, bytes out; no I/O. Everything is checked here, once, before it is used: the head before its numbers are trusted, the
checksums before anything is parsed, every length before anything of that length is made.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from ..checksum import crc32c
from ..errors import CorruptIndex, NotAShard, TruncatedShard, UnsupportedVersion
from .names import MAX_KEY_BYTES, are_legal_keys, valid_field, valid_key
from .scan import Scan, check_scan
from .scan_script import parse_scan

VERSION = 1
MAGIC = b"\x89PCR\r\n\x1a\n"
BLOCK = 512
HEAD_STOP = 2 * BLOCK
MAX_GROUPS = 32
MAX_SAMPLES = 1 << 24
MAX_SCHEMA_BYTES = 1 << 16
MAX_STREAMS = 16
MAX_FIELDS = 256
MAX_PIECE_BYTES = 0xFFFFFFFE

_HEAD = struct.Struct("<8sIIIIIIQ")
_ABSENT = 0xFFFFFFFF
Buffer = bytes | bytearray | memoryview
U32 = npt.NDArray[np.uint32]


def round512(size: int) -> int:
    """Round a size in bytes up to tar's block of 512."""
    return -(-size // BLOCK) * BLOCK


class Head(NamedTuple):
    """The first 512 bytes of the index: what must be known before the rest is read.

    ``prefix_stops`` has an absolute stop for each of scans 1..N and then for ``"full"``.
    """

    num_samples: int
    schema_bytes: int
    body_bytes: int
    body_crc32c: int
    prefix_stops: tuple[int, ...]

    @property
    def num_groups(self) -> int:
        """Scan groups N."""
        return len(self.prefix_stops) - 1

    @property
    def index_stop(self) -> int:
        """Where the index member ends, padding included."""
        return round512(HEAD_STOP + self.body_bytes)

    def prefix_stop(self, scan: Scan) -> int:
        """End of the prefix that holds scans 1..scan; see :func:`check_scan` for errors."""
        return self.prefix_stops[check_scan(scan, self.num_groups) - 1]

    def encode(self) -> bytes:
        """The 512 bytes of SPEC 2.1."""
        fixed = (
            VERSION,
            self.num_samples,
            self.num_groups,
            self.schema_bytes,
            self.body_crc32c,
            self.body_bytes,
        )
        stops = struct.pack(f"<{len(self.prefix_stops)}Q", *self.prefix_stops)
        head = bytearray((_HEAD.pack(MAGIC, 0, *fixed) + stops).ljust(BLOCK, b"\0"))
        head[8:12] = struct.pack("<I", crc32c(head))
        return bytes(head)


def decode_head(block: Buffer, *, url: str | None = None) -> Head:
    """Parse and check the head (SPEC 2.1).

    Args:
        block: The 512 bytes ``[512, 1024)`` of the shard.
        url: Named in errors.

    Raises:
        NotAShard, UnsupportedVersion, CorruptIndex, TruncatedShard
    """
    block = bytes(block[:BLOCK])
    if block[:8] != MAGIC[: len(block)]:
        raise NotAShard(
            "expected a PCR shard, its magic is not there; make one with `pcrshard encode`", url=url
        )
    if len(block) < BLOCK:
        raise TruncatedShard(
            f"expected {HEAD_STOP} bytes of head, got {BLOCK + len(block)}", url=url
        )
    _, crc, version, num_samples, num_groups, schema_bytes, body_crc, body_bytes = (
        _HEAD.unpack_from(block)
    )
    require(crc == crc32c(block[:8] + bytes(4) + block[12:]), "head checksum does not match", url)
    if version != VERSION:
        raise UnsupportedVersion(
            f"expected format version {VERSION}, got {version}; a newer pcrshard reads it", url=url
        )
    limits = ("num_samples", num_samples, MAX_SAMPLES), ("num_groups", num_groups, MAX_GROUPS)
    for name, number, most in (*limits, ("schema_bytes", schema_bytes, MAX_SCHEMA_BYTES)):
        if not 1 <= number <= most:
            raise CorruptIndex(f"{name} {number} is not in 1..{most}", url=url)
    stops = struct.unpack_from(f"<{num_groups + 1}Q", block, _HEAD.size)
    require(not block[_HEAD.size + 8 * len(stops) :].strip(b"\0"), "head padding is not zero", url)
    head = Head(num_samples, schema_bytes, body_bytes, body_crc, stops)
    if not schema_bytes <= body_bytes or head.index_stop > stops[0]:
        raise CorruptIndex(f"body_bytes {body_bytes} do not fit", url=url)
    require(
        rising(stops) and stops[-1] < 1 << 63, "prefix stops are not rising multiples of 512", url
    )
    return head


def rising(stops: Sequence[int]) -> bool:
    """Whether stops are multiples of tar's block that never fall."""
    return math.gcd(*stops) % BLOCK == 0 and list(stops) == sorted(stops)


def require(condition: object, message: str, url: str | None = None) -> None:
    """Raise :class:`CorruptIndex` unless the condition holds."""
    if not condition:
        raise CorruptIndex(message, url=url)


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


@functools.lru_cache(maxsize=64)
def decode_schema(data: bytes) -> Schema:
    """Parse and check the schema (SPEC 2.2); cached, because all shards of a dataset have the same."""
    try:
        raw = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=1024,
            max_bin_len=0,
            max_ext_len=0,
            max_array_len=MAX_FIELDS,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise CorruptIndex(f"schema is not msgpack within limits: {error}") from error
    names = [field.name for field in dataclasses.fields(Schema)]
    require(isinstance(raw, dict) and list(raw) == names, f"expected schema keys {names}")
    strings = [raw["script"], raw["layout"], *_list(raw["groups"])]
    strings += [*_list(raw["fields"]), *_list(raw["preview_fields"])]
    pairs = [tuple(_list(pair)) for pair in _list(raw["streams"])]
    require(all(len(pair) == 2 for pair in pairs), "expected pairs in streams")
    strings += [text for pair in pairs for text in pair]
    require(all(type(text) is str for text in strings), "expected strings in the schema")
    require(type(raw["base"]) is int, "expected base to be an integer")
    lists = {name: tuple(raw[name]) for name in ("groups", "fields", "preview_fields")}
    schema = Schema(
        raw["script"], layout=raw["layout"], base=raw["base"], streams=tuple(pairs), **lists
    )
    check_schema(schema)
    return schema


def _list(value: Any) -> list[Any]:
    require(isinstance(value, list), f"expected a list in the schema, got {type(value).__name__}")
    return list(value)


def check_schema(schema: Schema) -> None:
    """Check names and numbers of a schema (SPEC 2.2); raises :class:`CorruptIndex`."""
    preview = schema.layout == "preview"
    require(preview or schema.layout == "compact", f"unknown layout {schema.layout!r}")
    require(
        1 <= schema.base <= len(schema.groups) if preview else schema.base == 0,
        "base does not fit layout",
    )
    require(1 <= len(schema.streams) <= MAX_STREAMS, "expected 1 to 16 streams")
    codecs = {codec for _, codec in schema.streams}
    require(codecs == {"jpeg"}, f"unknown codecs {sorted(codecs - {'jpeg'})}")
    require(len(schema.fields) <= MAX_FIELDS, "expected at most 256 fields")
    names = [*(field for field, _ in schema.streams), *schema.fields]
    require(len(set(names)) == len(names), "streams and fields are not distinct")
    require(all(map(valid_field, names)), "a field name is not legal")
    subset = set(schema.preview_fields) <= set(schema.fields) and (
        preview or not schema.preview_fields
    )
    require(
        subset and len(set(schema.preview_fields)) == len(schema.preview_fields),
        "preview_fields do not fit",
    )
    try:
        for group in schema.groups:
            list(map(parse_scan, group.split(";")))
    except ValueError as error:
        raise CorruptIndex(f"scan script: {error}") from error


@dataclasses.dataclass(frozen=True, eq=False)
class ShardIndex:
    """Where everything in a shard is; S samples, M streams, N scan groups.

    Attributes:
        head: Sizes, checksums and prefix stops.
        schema: Names: script, layout, streams and fields.
        sizes: (N + 1, S, M) uint32, bytes of each piece; the last row is the tail.
        crcs: (N + 1, S, M) uint32, CRC-32C of pieces 1..k concatenated; the last row is that of the tail alone.
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
    dims: npt.NDArray[np.uint16]
    orientation: npt.NDArray[np.uint8]
    base_offsets: npt.NDArray[np.uint64]
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

    def starts(self, scan: Scan) -> npt.NDArray[np.int64]:
        """Absolute start of each piece of groups 1..scan: (rows, S, M); ``"full"`` adds the tail as the last row."""
        rows, base = check_scan(scan, self.num_groups), self.schema.base
        sizes = self.sizes[:rows].reshape(rows, -1).astype(np.int64)
        starts = sizes.cumsum(axis=1) - sizes
        starts += self.group_starts[:rows, None]
        if base:
            first = sizes[:base]
            starts[:base] = (
                self.base_offsets.astype(np.int64).ravel() + first.cumsum(axis=0) - first
            )
        return starts.reshape(rows, *self.sizes.shape[1:])

    @property
    def group_starts(self) -> npt.NDArray[np.int64]:
        """(N + 1,) where the data of each group member start, after its 512-byte header; the last is the tails'."""
        return np.array((self.head.index_stop, *self.head.prefix_stops[:-1]), np.int64) + BLOCK


def encode_body(schema: Schema, index: ShardIndex) -> bytes:
    """Schema and columns (SPEC 2.2, 2.3); ``index.head`` is not used."""
    columns: list[npt.NDArray[Any]] = [index.sizes, index.crcs, index.dims, index.orientation]
    if schema.layout == "preview":
        columns.append(index.base_offsets)
    parts = [
        schema.encode(),
        *(np.ascontiguousarray(c).astype(c.dtype.newbyteorder("<")).tobytes() for c in columns),
    ]
    parts += _encode_bytes([key.encode() for key in index.keys])
    for name in schema.fields:
        parts += _encode_bytes(index.fields[name])
    return b"".join(parts)


def _encode_bytes(values: Sequence[bytes | None]) -> tuple[bytes, bytes]:
    sizes = np.array([_ABSENT if value is None else len(value) for value in values], "<u4")
    return sizes.tobytes(), b"".join(value for value in values if value is not None)


def decode_index(head: Head, body: Buffer, *, url: str | None = None) -> ShardIndex:
    """Parse and check the body of the index.

    Args:
        head: The checked head.
        body: ``[1024, 1024 + body_bytes)`` of the shard; copied, so that the caller may reuse its buffer.
        url: Named in errors.

    Raises:
        CorruptIndex, TruncatedShard
    """
    if len(body) < head.body_bytes:
        raise TruncatedShard(f"expected {head.body_bytes} bytes of index, got {len(body)}", url=url)
    body = bytes(body[: head.body_bytes])
    require(crc32c(body) == head.body_crc32c, "index checksum does not match", url)
    try:
        schema = decode_schema(body[: head.schema_bytes])
    except CorruptIndex as error:
        raise CorruptIndex(str(error), url=url) from error
    require(len(schema.groups) == head.num_groups, "script and num_groups differ", url)
    columns = _Columns(body, head.schema_bytes, url)
    shape = (head.num_samples, len(schema.streams))
    pieces = (head.num_groups + 1, *shape)
    offsets_shape = shape if schema.layout == "preview" else (0, shape[1])
    index = ShardIndex(
        head,
        schema,
        sizes=columns.array("<u4", pieces),
        crcs=columns.array("<u4", pieces),
        dims=columns.array("<u2", (*shape, 2)),
        orientation=columns.array("<u1", shape),
        base_offsets=columns.array("<u8", offsets_shape),
        keys=_decode_keys(columns.byte_strings(head.num_samples), url),
        fields={name: columns.byte_strings(head.num_samples) for name in schema.fields},
    )
    require(columns.at_end(), "bytes are left after the last column", url)
    _check_pieces(index, url)
    return index


class _Columns:
    """A cursor over the raw columns; it refuses a length before it takes it."""

    def __init__(self, body: bytes, start: int, url: str | None) -> None:
        self.body, self.pos, self.url = body, start, url

    def take(self, size: int) -> int:
        """Go on by ``size`` bytes; returns where they begin."""
        start = self.pos
        require(size <= len(self.body) - start, "a column is longer than the index", self.url)
        self.pos = start + size
        return start

    def array(self, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        start = self.take(math.prod(shape) * np.dtype(dtype).itemsize)
        return np.ndarray(shape, dtype, self.body, start)

    def byte_strings(self, count: int) -> tuple[bytes | None, ...]:
        stored = self.array("<u4", (count,)).tolist()
        sizes = [0 if size == _ABSENT else size for size in stored] if _ABSENT in stored else stored
        start = self.take(sum(sizes))
        values = tuple(map(io.BytesIO(memoryview(self.body)[start : self.pos]).read, sizes))
        if sizes is stored:
            return values
        return tuple(
            None if size == _ABSENT else value for value, size in zip(values, stored, strict=True)
        )

    def at_end(self) -> bool:
        return self.pos == len(self.body)


def _decode_keys(values: Sequence[bytes | None], url: str | None) -> tuple[str, ...]:
    # All at once, because one by one is most of what an index costs; a NUL more than those between keys is in a key.
    try:
        joined = b"\0".join([value or b"" for value in values]).decode()
        keys = tuple(joined.split("\0"))
        if (
            len(keys) != len(values)
            or not are_legal_keys(joined)
            or max(map(len, keys)) > MAX_KEY_BYTES // 4
        ):
            keys = tuple([(value or b"").decode() for value in values])
            bad = next((key for key in keys if not valid_key(key)), None)
            require(bad is None, f"key {bad!r} is not legal", url)
    except UnicodeDecodeError as error:
        raise CorruptIndex(f"a key is not UTF-8: {error}", url=url) from error
    require(len(set(keys)) == len(keys), "keys are not distinct", url)
    return keys


def _check_pieces(index: ShardIndex, url: str | None) -> None:
    """The rules of SPEC sections 2.3 and 3 that tie sizes, offsets and prefix stops together."""
    # count_nonzero, because any() and all() go through Python: measured, a twentieth of what a small shard costs.
    head, schema, dims, count = index.head, index.schema, index.dims, np.count_nonzero
    empty = index.sizes == 0
    missing = empty[0]
    complete = not count(missing)
    require(not count(index.crcs[-1] * empty[-1]), "an empty tail has a checksum", url)
    if count(empty[:-1]):  # only with gray, CMYK or missing images
        require(complete or empty[:, missing].all(), "a stream has pieces but no first piece", url)
        changed = index.crcs[:-1].copy()
        changed[1:] ^= index.crcs[:-2]
        require(not count(changed * empty[:-1]), "an empty piece changes the checksum", url)
    whole = count(dims) == dims.size if complete else (dims.all(axis=2) != missing).all()
    require(whole, "dims and pieces differ", url)
    require(not count(index.orientation > 8), "an orientation is above 8", url)
    if schema.layout == "preview":
        _check_base(index, ~missing, url)
    totals = np.add.reduce(index.sizes.reshape(len(empty), -1), axis=1, dtype=np.int64).tolist()
    starts = (head.index_stop, *head.prefix_stops)
    for row, (start, total, stop) in enumerate(
        zip(starts, totals, head.prefix_stops, strict=False)
    ):
        if row >= schema.base and round512(start + BLOCK + total) != stop:
            raise CorruptIndex(
                f"group {row + 1} ends at {round512(start + BLOCK + total)}, not {stop}", url=url
            )


def _check_base(index: ShardIndex, present: npt.NDArray[np.bool_], url: str | None) -> None:
    """Base members are in order, apart by a header at least, and end where the base groups end."""
    head, base = index.head, index.schema.base
    require(len(set(head.prefix_stops[:base])) == 1, "prefix stops of the base groups differ", url)
    require(not index.base_offsets[~present].any(), "a missing stream has an offset", url)
    require(
        (index.base_offsets < head.prefix_stops[0]).all(),
        "a base offset is behind the base members",
        url,
    )
    starts = index.base_offsets[present].astype(np.int64)
    stops = starts + index.sizes[:base].sum(axis=0, dtype=np.int64)[present] + 2
    ends = -(-stops // BLOCK) * BLOCK
    floor = np.concatenate(([head.index_stop], ends[:-1])) + BLOCK
    require((starts % BLOCK == 0).all() and (starts >= floor).all(), "base members overlap", url)
    require(
        len(ends) > 0 and int(ends[-1]) == head.prefix_stops[0], "base members end elsewhere", url
    )
