"""The index of a shard (SPEC.md section 2).

Bytes in, bytes out; no I/O. Everything is checked here, once, before use: the checksum before
parsing, and every length before allocating.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import zstd
from ..checksum import crc32c
from ..errors import CorruptIndex, FormatError, naming
from ..lazy import lazy
from ..memory import Buffer
from .columns import Columns, encode_byte_strings
from .names import MAX_KEY_BYTES, are_distinct, are_legal_keys, valid_key
from .plain_tar import PLAIN, PlainTar, check_plain_tar, decode_plain_tar
from .schema import Schema, decode_schema
from .shard_head import BLOCK, MAX_EXPANSION, Head, require

# Higher levels take twice the time and save 2 % of the bytes.
COMPRESSION_LEVEL = 12
MAX_LISTED = 64
MAX_PIECE_BYTES = 0xFFFFFFFE
MAX_PROFILES = 0xFFFF
# What an ICC profile may take in a JPEG (ICC.1 annex B.4).
MAX_PROFILE_BYTES = 255 * 65519


class State(enum.IntEnum):
    """How a shard holds a unit."""

    MISSING = 0
    LAYERED = 1  # divided into scans
    WHOLE = 2  # a file kept whole
    UNDECODABLE = 3  # a file kept whole that no decoder could decode


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
        schema: The schema of the dataset.
        counts: (S, number of lists) uint8, images in each list.
        states: (U,) uint8, how each unit is held: a :class:`State`.
        dims: (U, 2) uint16, image height and width in pixels; those of a file kept whole are
            upright; 0, 0 if missing or unknown.
        orientation: (U,) uint8, orientation 1-8 of the stored pixels as EXIF numbers them; 0 if
            none, and for a file kept whole.
        profile_numbers: (U,) uint16, number of each unit's ICC profile, from 1; 0 if none, and for
            a file kept whole.
        keys: S sample keys.
        profiles: The distinct ICC profiles of the shard; number 1 comes first.
        fields: For each field that is not deferred, S raw values or ``None``.
        tar: Where the members lie, if the shard is a plain tar.
    """

    head: Head
    schema: Schema
    counts: NDArray[np.uint8]
    states: NDArray[np.uint8]
    dims: NDArray[np.uint16]
    orientation: NDArray[np.uint8]
    profile_numbers: NDArray[np.uint16]
    keys: tuple[str, ...]
    profiles: tuple[bytes, ...]
    fields: dict[str, tuple[bytes | None, ...]]
    tar: PlainTar | None = None

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
        return len(self.states)

    @property
    def upright_dims(self) -> NDArray[np.uint16]:
        """(U, 2) uint16, height and width in pixels of each unit's upright picture."""
        # Orientations 5 to 8 swap height and width.
        return np.where(self.orientation[:, None] >= 5, self.dims[:, ::-1], self.dims)

    @lazy
    def unit_counts(self) -> I64:
        """(S, M) units of each sample in each stream."""
        units = np.ones((self.num_samples, len(self.schema.streams)), np.int64)
        units[:, self._are_lists] = self.counts
        return units

    def member_rows(self, field: str) -> range:
        """Return which members of a plain tar have a field's values, one for each sample."""
        names = [each.name for each in self.schema.fields if not each.is_image]
        start = self.num_units + names.index(field) * self.num_samples
        return range(start, start + self.num_samples)

    @property
    def _are_lists(self) -> list[bool]:
        """For each image field whether it has a list of images per sample."""
        return [name in self.schema.lists for name in self.schema.streams]

    @lazy
    def described(self) -> dict[int, tuple[int, bytes]]:
        """Orientation and ICC profile of the units that have one; an orientation of 1 is none."""
        found = np.flatnonzero((self.orientation > 1) | (self.profile_numbers > 0)).tolist()
        return {unit: (int(self.orientation[unit]), self.profile(unit)) for unit in found}

    @lazy
    def whole(self) -> frozenset[int]:
        """The units that are files kept whole."""
        return frozenset(np.flatnonzero(self.states >= State.WHOLE).tolist())

    @lazy
    def missing(self) -> frozenset[int]:
        """The units that samples lack."""
        return frozenset(np.flatnonzero(self.states == State.MISSING).tolist())

    def profile(self, unit: int) -> bytes:
        """Return the ICC profile of an image that is divided into scans; empty if none."""
        number = self.profile_numbers[unit]
        return self.profiles[number - 1] if number else b""

    @lazy
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
            # The base groups have one table together, a plain tar has none.
            if row < base - 1 or self.schema.layout == PLAIN:
                continue
            start = ends[0 if row < base else row] + BLOCK
            rows = range(base) if row < base else range(row, row + 1)
            yield TablePlace(rows, start, start + self.head.table_bytes[row])


def encode_body(index: ShardIndex) -> tuple[bytes, int]:
    """Return schema and columns (SPEC 2.2, 2.3), and the columns' size before compression.

    ``index.head`` is not used.
    """
    # Arrays are little-endian, here and in tables.
    arrays = (index.counts, index.states, index.dims, index.orientation, index.profile_numbers)
    parts = [column.tobytes() for column in arrays]
    parts.append(encode_byte_strings([key.encode() for key in index.keys]))
    parts.append(encode_byte_strings(index.profiles))
    parts += [encode_byte_strings(index.fields[name]) for name in index.schema.columns]
    if index.tar is not None:
        parts.append(index.tar.encode())
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
        require(schema.num_groups == head.num_groups, "schema and num_groups differ")

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
    states = columns.array("<u1", units)
    dims = columns.array("<u2", units, 2)
    orientation = columns.array("<u1", units)
    numbers = columns.array("<u2", units)
    index = ShardIndex(
        head,
        schema,
        counts,
        states,
        dims,
        orientation,
        numbers,
        keys=_decode_keys(columns.byte_strings(count)),
        profiles=_check_profiles(columns.byte_strings(int(numbers.max(initial=0)))),
        fields={name: columns.byte_strings(count) for name in schema.columns},
    )
    if schema.layout == PLAIN:
        others = sum(not field.is_image for field in schema.fields)
        tar = decode_plain_tar(columns, units + others * count)
        index = dataclasses.replace(index, tar=tar)
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


def _check_profiles(profiles: Sequence[bytes | None]) -> tuple[bytes, ...]:
    found = tuple(profile for profile in profiles if profile)
    require(len(found) == len(profiles), "an ICC profile is empty")
    require(are_distinct(found), "ICC profiles are not distinct")
    fits = max(map(len, found), default=0) <= MAX_PROFILE_BYTES
    require(fits, f"an ICC profile has more than {MAX_PROFILE_BYTES} bytes")
    return found


def _check_columns(index: ShardIndex) -> None:
    """Check the rules of SPEC section 2.3 for images."""
    # count_nonzero, because any() and all() go through Python: a twentieth of a small shard's cost.
    count = np.count_nonzero
    states, dims = index.states, index.dims
    listed = not count(index.counts > MAX_LISTED)
    require(listed, f"expected at most {MAX_LISTED} images in a list")
    require(not count(index.orientation > 8), "an orientation is above 8")
    # Usually every image exists and is divided into scans.
    if count(states == State.LAYERED) != states.size:
        require(not count(states > State.UNDECODABLE), "a state is above 3")
        layered = states == State.LAYERED
        described = (index.orientation != 0) | (index.profile_numbers != 0)
        plain = not count(described & ~layered)
        require(plain, "an image without scans has an orientation or a profile")
        is_known = dims[:, 0] != 0
        of_none = (states == State.MISSING) | (states == State.UNDECODABLE)
        require(not count(is_known & of_none), "an image that no decoder showed has dims")
        require(not count(layered & ~is_known), "a height or a width is 0")
        in_list = np.repeat(np.tile(index._are_lists, index.num_samples), index.unit_counts.ravel())
        require(not count(in_list & (states == State.MISSING)), "an image of a list is missing")
        require(not count((dims == 0).any(axis=1) & is_known), "a height or a width is 0")
        require(not count((dims != 0).any(axis=1) & ~is_known), "a height or a width is 0")
    else:
        require(count(dims) == dims.size, "a height or a width is 0")
    if index.tar is not None:
        check_plain_tar(index, index.tar)
