"""``pcr.columns``: labels, sizes and flags of all samples of a dataset (SPEC 6.1).

Bytes in, bytes out; no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..checksum import crc32c
from ..memory import Buffer
from .dataset_index import Column, ShardTable
from .shard_head import require
from .shard_index import ShardIndex, State

COLUMNS = "pcr.columns"
MAX_LABEL_DIGITS = 9
# Flags: an image is a file kept whole; no decoder could decode one when it was encoded.
WHOLE, UNDECODABLE = np.uint8(1), np.uint8(2)
# The type and shape of what each column has of a sample.
_TYPES = {"labels": np.dtype("<i4"), "sizes": np.dtype(("<u2", 2)), "flags": np.dtype("u1")}


class SampleColumns(NamedTuple):
    """Numbers of each of S samples.

    Attributes:
        labels: (S,) int32: ``cls`` if that is a label, one to nine decimal digits, else -1.
        sizes: (S, 2) uint16, height and width of the first image in pixels, upright; 0, 0 if
            unknown.
        flags: (S,) uint8: ``WHOLE`` and ``UNDECODABLE``.
    """

    labels: NDArray[np.int32]
    sizes: NDArray[np.uint16]
    flags: NDArray[np.uint8]

    @classmethod
    def of(cls, index: ShardIndex) -> SampleColumns:
        """Return the columns of a shard."""
        count = index.num_samples
        labels = np.full(count, -1, "<i4")
        if "cls" in index.fields:
            found = map(label_of, index.fields["cls"])
            labels[:] = [-1 if label is None else label for label in found]
        # The sample of each unit.
        owners = np.repeat(np.arange(count), index.unit_counts.sum(axis=1))
        sizes = np.zeros((count, 2), "<u2")
        known = np.flatnonzero(index.dims[:, 0])[::-1]
        # Of several, the last assignment counts: that of the first image.
        sizes[owners[known]] = index.upright_dims[known]
        flags = np.zeros(count, "u1")
        for state, flag in ((State.WHOLE, WHOLE), (State.UNDECODABLE, UNDECODABLE)):
            flags[owners[index.states >= state]] |= flag
        return cls(labels, sizes, flags)

    @classmethod
    def join(cls, parts: Sequence[SampleColumns]) -> SampleColumns:
        """Return the columns of several shards, one after the other."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))


def label_of(value: bytes | None) -> int | None:
    """Return the label that a field ``cls`` is; ``None`` if it is none."""
    text = (value or b"").strip()
    return int(text) if text.isdigit() and len(text) <= MAX_LABEL_DIGITS else None


def encode_columns(
    table: ShardTable, columns: SampleColumns
) -> tuple[tuple[bytes, ...], tuple[Column, ...]]:
    """Return the bytes of each column, and what ``pcr.json`` says of them.

    Args:
        table: All shards of the dataset.
        columns: The numbers of their samples, in the same order.
    """
    data = tuple(column.tobytes() for column in columns)
    entries = tuple(
        Column(name, _TYPES[name].itemsize, crc32c(own, _start(table)))
        for name, own in zip(SampleColumns._fields, data, strict=True)
    )
    return data, entries


def decode_column(column: Column, table: ShardTable, data: Buffer) -> NDArray[Any]:
    """Return a column of all samples, in the types of :class:`SampleColumns`.

    Raises:
        CorruptIndex: It is damaged, or of other shards.
    """
    own = crc32c(data, _start(table)) == column.crc32c
    require(own, f"the column {column.name} is not that of these shards")
    return np.frombuffer(data, _TYPES.get(column.name, np.dtype(("u1", (column.width,)))))


def _start(table: ShardTable) -> int:
    """Return what checksums of columns start from, so that they hold for these shards only."""
    return crc32c(table.rows[:, 1].astype("<u4"))
