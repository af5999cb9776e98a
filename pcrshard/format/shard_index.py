"""The index of a shard (SPEC.md section 2).

Bytes in, bytes out; no I/O. Everything is checked here, once, before use: the checksum before
parsing, and every length before allocating.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import zstd
from ..checksum import crc32c
from ..errors import CorruptIndex, FormatError, naming
from ..memory import Buffer
from .columns import Columns, encode_byte_strings
from .names import MAX_KEY_BYTES, are_distinct, are_legal_keys, valid_key
from .schema import IMAGE_LIST, Schema, decode_schema
from .shard_head import BLOCK, MAX_EXPANSION, Head, require

# Higher levels take twice the time and save 2 % of the bytes.
COMPRESSION_LEVEL = 12
MAX_LISTED = 64
MAX_PIECE_BYTES = 0xFFFFFFFE

U32 = NDArray[np.uint32]
I64 = NDArray[np.int64]


class TablePlace(NamedTuple):
    """Location of a table of scan groups: its rows and its half-open range of bytes."""

    rows: range
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, eq=False)
class ShardIndex:
    """The index of a shard with S samples, U units and N scan groups.

    The images of a shard, by sample, then by stream, then by place in a list, are its **units**.

    Attributes:
        head: Sizes, checksums and prefix stops.
        schema: Names: script, layout, streams and fields.
        counts: (S, number of lists) uint8, images in each list.
        dims: (U, 2) uint16, image height and width in pixels; 0, 0 for a stream that a sample
            lacks.
        orientation: (U,) uint8, EXIF orientation 1-8, 0 if none.
        keys: S sample keys.
        fields: For each field that is not deferred, S raw values or ``None``.
    """

    head: Head
    schema: Schema
    counts: NDArray[np.uint8]
    dims: NDArray[np.uint16]
    orientation: NDArray[np.uint8]
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

    @property
    def num_units(self) -> int:
        """Number of units, including missing images."""
        return len(self.orientation)

    @functools.cached_property
    def unit_counts(self) -> I64:
        """(S, M) units of each sample in each stream."""
        units = np.ones((self.num_samples, len(self.schema.streams)), np.int64)
        units[:, self._are_lists] = self.counts
        return units

    @property
    def _are_lists(self) -> list[bool]:
        """For each stream whether it has a list of images per sample."""
        return [codec == IMAGE_LIST for _, codec in self.schema.streams]

    @functools.cached_property
    def first_units(self) -> list[int]:
        """The first unit of each sample in each stream, followed by the number of units."""
        return [0, *self.unit_counts.cumsum().tolist()]

    def late_fields(self, row: int) -> tuple[str, ...]:
        """Return the deferred fields in the group of a row, N for the tail.

        The values of all base groups of the preview layout are in the last one.
        """
        first = 0 if row == self.schema.base - 1 else row
        return tuple(name for name, scan in self.schema.late if first < scan <= row + 1)

    def table_places(self, first: int, stop: int) -> Iterator[TablePlace]:
        """Return the tables of rows ``[first, stop)``, N for the tail."""
        base = self.schema.base
        ends = self.head.stops
        for row in range(first, stop):
            if row < base - 1:  # the base groups have one table together
                continue
            start = ends[0 if row < base else row] + BLOCK
            rows = range(base) if row < base else range(row, row + 1)
            yield TablePlace(rows, start, start + self.head.table_bytes[row])


def encode_body(index: ShardIndex) -> tuple[bytes, int]:
    """Return schema and columns (SPEC 2.2, 2.3), and the columns' size before compression.

    ``index.head`` is not used.
    """
    # Arrays are little-endian, here and in tables.
    parts = [column.tobytes() for column in (index.counts, index.dims, index.orientation)]
    parts.append(encode_byte_strings([key.encode() for key in index.keys]))
    parts += [encode_byte_strings(index.fields[name]) for name in index.schema.fields]
    columns = b"".join(parts)
    packed = zstd.compress(columns, COMPRESSION_LEVEL)
    smaller = len(packed) < len(columns) <= MAX_EXPANSION * len(packed)
    return index.schema.encode() + (packed if smaller else columns), len(columns)


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
    """
    with naming(url):
        body = bytes(body)
        require(crc32c(body) == head.body_crc32c, "index checksum does not match")
        schema = decode_schema(body[: head.schema_bytes])
        require(len(schema.groups) == head.num_groups, "script and num_groups differ")

        stored = body[head.schema_bytes :]
        if len(stored) != head.columns_bytes:
            try:
                stored = zstd.decompress(stored, head.columns_bytes)
            except FormatError as error:
                raise CorruptIndex(f"columns: {error}") from error
        index = _decode_columns(head, schema, stored)
        _check_columns(index)
        for rows, _, stop in index.table_places(0, head.num_groups + 1):
            row = rows[-1]
            fits = stop <= head.prefix_stops[row]
            require(fits, f"the table of group {row + 1} ends after it, at {stop}")
        if base := schema.base:
            alike = len({*head.prefix_stops[:base]}) == 1 and not any(head.table_bytes[: base - 1])
            require(alike, "prefix stops or tables of the base groups differ")
    return index


def _decode_columns(head: Head, schema: Schema, body: bytes) -> ShardIndex:
    columns = Columns(body)
    count = head.num_samples
    counts = columns.array("<u1", count, len(schema.lists))
    listed = int(counts.sum(dtype=np.int64)) if schema.lists else 0
    units = listed + count * (len(schema.streams) - len(schema.lists))
    index = ShardIndex(
        head,
        schema,
        counts,
        dims=columns.array("<u2", units, 2),
        orientation=columns.array("<u1", units),
        keys=_decode_keys(columns.byte_strings(count)),
        fields={name: columns.byte_strings(count) for name in schema.fields},
    )
    require(not columns.read(1), "bytes are left after the last column")
    return index


def _decode_keys(values: Sequence[bytes | None]) -> tuple[str, ...]:
    # All at once: one by one would be most of an index's cost. Any NUL beyond the separators is in
    # a key.
    stored = [value for value in values if value is not None]
    require(len(stored) == len(values), "a key is absent")
    require(max(map(len, stored)) <= MAX_KEY_BYTES, f"a key has more than {MAX_KEY_BYTES} bytes")
    try:
        joined = b"\0".join(stored).decode()
        keys = tuple(joined.split("\0"))
        if len(keys) != len(values) or not are_legal_keys(joined):
            illegal = next(key for key in map(bytes.decode, stored) if not valid_key(key))
            raise CorruptIndex(f"key {illegal!r} is not legal")
    except UnicodeDecodeError as error:
        raise CorruptIndex(f"a key is not UTF-8: {error}") from error
    require(are_distinct(keys), "keys are not distinct")
    return keys


def _check_columns(index: ShardIndex) -> None:
    """Check the rules of SPEC section 2.3 for images."""
    # count_nonzero, because any() and all() go through Python: a twentieth of a small shard's cost.
    count = np.count_nonzero
    listed = not count(index.counts > MAX_LISTED)
    require(listed, f"expected at most {MAX_LISTED} images in a list")
    require(not count(index.orientation > 8), "an orientation is above 8")
    if count(index.dims) != index.dims.size:
        # Only images of streams are missing, and then both sides are 0.
        both = (index.dims != 0).all(axis=1)
        require((both == (index.dims != 0).any(axis=1)).all(), "a height or a width is 0")
        in_list = np.repeat(np.tile(index._are_lists, index.num_samples), index.unit_counts.ravel())
        require(not (in_list & ~both).any(), "an image of a list is missing")
