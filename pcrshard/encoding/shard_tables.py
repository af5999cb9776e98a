"""The index and the tables of a shard, built from encoded samples; file offsets come later."""

from __future__ import annotations

import collections
import itertools
import json
import numbers
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..checksum import crc32c
from ..errors import EncodeError
from ..format.columns import ABSENT
from ..format.group_table import GroupTable, LateValues
from ..format.schema import Schema
from ..format.shard_head import Head
from ..format.shard_index import MAX_PIECE_BYTES, U32, ShardIndex
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
Unit = EncodedImage | None
Units = Sequence[Unit]


def field_bytes(name: str, value: object) -> bytes:
    """Return the bytes of a field that is not a JPEG.

    Raises:
        EncodeError: The value has another type or is too large.
    """
    if isinstance(value, BYTES):
        _check_size(name, len(value))
        return bytes(value)
    try:
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, numbers.Integral):
            return str(int(value)).encode()
        if isinstance(value, list | dict | float) and _is_json(name):
            return json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise EncodeError(f"cannot store field {name!r}: {error}") from error
    raise EncodeError(f"expected bytes, str or int in field {name!r}, got {type(value).__name__}")


def _is_json(name: str) -> bool:
    return name.rpartition(".")[2] in ("json", "jsn")


def _check_size(name: str, size: int) -> None:
    if size > MAX_PIECE_BYTES:
        raise EncodeError(f"expected at most {MAX_PIECE_BYTES} bytes in field {name!r}, got {size}")


def list_units(samples: Samples, schema: Schema) -> Units:
    """Return the images of a shard, in order; ``None`` for a stream that a sample lacks."""
    return [unit for sample in samples for unit in _sample_units(sample, schema)]


def _sample_units(sample: EncodedSample, schema: Schema) -> Iterator[Unit]:
    for field, _ in schema.streams:
        if field in schema.lists:
            yield from sample.lists.get(field, ())
        else:
            yield sample.images.get(field)


def make_index(samples: Samples, schema: Schema) -> ShardIndex:
    """Return the index of samples, with a placeholder head.

    Raises:
        EncodeError: Two samples have the same key.
    """
    keys = tuple(sample.key for sample in samples)
    _check_distinct(keys)
    units = list_units(samples, schema)
    dims = [(unit.height, unit.width) if unit else (0, 0) for unit in units]
    orientations = [unit.orientation if unit else 0 for unit in units]
    nothing = (0,) * (len(schema.groups) + 1)
    return ShardIndex(
        Head(len(samples), 0, 0, 0, nothing, nothing, 0),
        schema,
        counts=_list_lengths(samples, schema.lists),
        dims=np.array(dims, "<u2").reshape(-1, 2),
        orientation=np.array(orientations, "<u1"),
        keys=keys,
        fields={name: _list_values(samples, name) for name in schema.fields},
    )


def _check_distinct(keys: Sequence[str]) -> None:
    key, count = collections.Counter(keys).most_common(1)[0]
    if count > 1:
        raise EncodeError(f"expected distinct keys in a shard, got {key!r} more than once")


def _list_values(samples: Samples, name: str) -> tuple[bytes | None, ...]:
    return tuple(sample.fields.get(name) for sample in samples)


def _list_lengths(samples: Samples, lists: Sequence[str]) -> npt.NDArray[np.uint8]:
    lengths = [[len(sample.lists.get(field, ())) for field in lists] for sample in samples]
    return np.array(lengths, "<u1").reshape(len(samples), len(lists))


def make_tables(samples: Samples, index: ShardIndex) -> list[GroupTable]:
    """Return the tables of all groups and the tail, without offsets."""
    units = list_units(samples, index.schema)
    crcs = _list_crcs(units, index.num_groups)
    return [
        _make_table(samples, index, units, rows, crcs[rows.start : rows.stop])
        for rows in _table_rows(index)
    ]


def _table_rows(index: ShardIndex) -> list[range]:
    """Return the groups of each table: all base groups, then each other group and the tail."""
    base = index.schema.base
    others = [range(row, row + 1) for row in range(base, index.num_groups + 1)]
    return [range(base), *others] if base else others


def _list_crcs(units: Units, num_groups: int) -> U32:
    """Return running checksums of the groups, then of the tails; (N + 1, images) uint32."""
    running = [_running_crcs(unit, num_groups) for unit in units]
    return np.array(running, "<u4").reshape(-1, num_groups + 1).T


def _make_table(
    samples: Samples,
    index: ShardIndex,
    units: Units,
    rows: range,
    crcs: U32,
) -> GroupTable:
    shape = (len(rows), len(units))
    is_base = rows.stop <= index.schema.base
    sizes = [[len(unit.pieces[row]) if unit else 0 for unit in units] for row in rows]
    # Base images stay whole in the file, because other readers show them directly.
    header_sizes = [[0] * len(units) if is_base else _shared_bytes(units, row) for row in rows]
    last = rows[-1]
    return GroupTable(
        rows,
        np.array(sizes, "<u4").reshape(shape),
        crcs,
        np.array(header_sizes, "<u2").reshape(shape),
        _join_headers(units, rows, header_sizes),
        np.zeros(len(units) if is_base else 0, "<u8"),
        {name: (last, _late_values(samples, name)) for name in index.late_fields(last)},
    )


def _shared_bytes(units: Units, row: int) -> list[int]:
    return [unit.shared_bytes(row) if unit else 0 for unit in units]


def _join_headers(
    units: Units,
    rows: range,
    header_sizes: Sequence[Sequence[int]],
) -> bytes:
    """Return the concatenated headers of all pieces."""
    headers = [
        unit.pieces[row][:size]
        for row, row_sizes in zip(rows, header_sizes, strict=True)
        for unit, size in zip(units, row_sizes, strict=True)
        if unit
    ]
    return b"".join(headers)


def _running_crcs(unit: Unit, num_groups: int) -> list[int]:
    """Return the CRC-32C of each prefix of the scan groups, then that of the tail alone."""
    if unit is None:
        return [0] * (num_groups + 1)
    *groups, tail = unit.pieces
    crcs = itertools.accumulate(groups, lambda crc, piece: crc32c(piece, crc), initial=0)
    return [*crcs, crc32c(tail)][1:]


def _late_values(samples: Samples, name: str) -> LateValues:
    values = [sample.fields.get(name) for sample in samples]
    sizes = [ABSENT if value is None else len(value) for value in values]
    crcs = [0 if value is None else crc32c(value) for value in values]
    return LateValues(np.array(sizes, "<u4"), np.array(crcs, "<u4"))
