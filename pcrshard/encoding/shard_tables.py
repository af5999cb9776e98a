"""The index and the tables of a shard, built from encoded samples; file offsets come later."""

from __future__ import annotations

import collections
import itertools
import json
import numbers
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..checksum import crc32c
from ..errors import EncodeError
from ..format.columns import ABSENT
from ..format.group_table import GroupTable, LateValues
from ..format.schema import IMAGE_LIST, Schema
from ..format.shard_head import Head
from ..format.shard_index import MAX_PIECE_BYTES, ShardIndex
from .encode_jpeg import EncodedImage


class EncodedSample(NamedTuple):
    """A sample that is ready to be written.

    Attributes:
        key: Its key.
        images: Its JPEG fields.
        fields: Its other fields; one named like a JPEG field is a passthrough file.
        lists: Its lists of JPEGs.
    """

    key: str
    images: dict[str, EncodedImage]
    fields: dict[str, bytes]
    lists: dict[str, list[EncodedImage]]


BYTES = bytes | bytearray | memoryview
Samples = Sequence[EncodedSample]
Units = Sequence[EncodedImage]


def field_bytes(name: str, value: object) -> bytes:
    """Return the bytes of a field that is not a JPEG.

    Raises:
        EncodeError: The value has another type or is too large.
    """
    if isinstance(value, BYTES):
        if len(value) > MAX_PIECE_BYTES:
            raise EncodeError(
                f"expected at most {MAX_PIECE_BYTES} bytes in field {name!r}, got {len(value)}"
            )
        return bytes(value)
    try:
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, numbers.Integral):
            return str(int(value)).encode()
        if isinstance(value, list | dict | float) and name.endswith(("json", "jsn")):
            return json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise EncodeError(f"cannot store field {name!r}: {error}") from error
    raise EncodeError(f"expected bytes, str or int in field {name!r}, got {type(value).__name__}")


def list_units(samples: Samples, schema: Schema) -> Units:
    """Return the images of a shard in order, an empty one for each stream that a sample lacks."""
    num_pieces = len(schema.groups) + 1
    missing = EncodedImage((b"",) * num_pieces, (0,) * num_pieces, 0, 0, 0)
    units: list[EncodedImage] = []
    for sample in samples:
        for field, codec in schema.streams:
            if codec == IMAGE_LIST:
                units += sample.lists.get(field, ())
            else:
                units.append(sample.images.get(field, missing))
    return units


def make_index(samples: Samples, units: Units, schema: Schema) -> ShardIndex:
    """Return the index of samples, with a placeholder head.

    Raises:
        EncodeError: Two samples have the same key.
    """
    keys = tuple(sample.key for sample in samples)
    key, count = collections.Counter(keys).most_common(1)[0]
    if count > 1:
        raise EncodeError(f"expected distinct keys in a shard, got {key!r} more than once")
    lengths = [[len(sample.lists.get(field, ())) for field in schema.lists] for sample in samples]
    nothing = (0,) * (len(schema.groups) + 1)
    return ShardIndex(
        Head(len(samples), 0, 0, 0, nothing, nothing, 0),
        schema,
        counts=np.array(lengths, "<u1").reshape(len(samples), len(schema.lists)),
        dims=np.array([(unit.height, unit.width) for unit in units], "<u2").reshape(-1, 2),
        orientation=np.array([unit.orientation for unit in units], "<u1"),
        keys=keys,
        fields={
            name: tuple(sample.fields.get(name) for sample in samples) for name in schema.fields
        },
    )


def make_tables(samples: Samples, units: Units, index: ShardIndex) -> list[GroupTable]:
    """Return the tables of all groups and the tail, without offsets."""
    num_pieces = index.num_groups + 1
    base = index.schema.base

    def by_group(values: list[Sequence[int]], dtype: str) -> np.ndarray:
        return np.array(values, dtype).reshape(-1, num_pieces).T

    sizes = by_group([[len(piece) for piece in unit.pieces] for unit in units], "<u4")
    crcs = by_group([_running_crcs(unit) for unit in units], "<u4")
    header_sizes = by_group([unit.header_sizes for unit in units], "<u2")
    # Base images stay whole in the file, because other readers show them directly.
    header_sizes[:base] = 0
    tables = []
    for rows, _, _ in index.table_places(0, num_pieces):
        last = rows[-1]
        own = slice(rows.start, rows.stop)
        headers = [
            unit.pieces[row][:size]
            for row in rows
            for unit, size in zip(units, header_sizes[row].tolist(), strict=True)
        ]
        table = GroupTable(
            rows,
            sizes[own],
            crcs[own],
            header_sizes[own],
            b"".join(headers),
            np.zeros(len(units) if last < base else 0, "<u8"),
            {name: (last, _late_values(samples, name)) for name in index.late_fields(last)},
        )
        tables.append(table)
    return tables


def _running_crcs(unit: EncodedImage) -> list[int]:
    """Return the CRC-32C of each prefix of the scan groups, then that of the tail alone."""
    *groups, tail = unit.pieces
    crcs = itertools.accumulate(groups, lambda crc, piece: crc32c(piece, crc), initial=0)
    return [*crcs, crc32c(tail)][1:]


def _late_values(samples: Samples, name: str) -> LateValues:
    values = [sample.fields.get(name) for sample in samples]
    sizes = [ABSENT if value is None else len(value) for value in values]
    crcs = [crc32c(value or b"") for value in values]
    return LateValues(np.array(sizes, "<u4"), np.array(crcs, "<u4"))
