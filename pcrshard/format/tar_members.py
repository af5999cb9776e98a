"""The tar members of a shard, derived from its index (SPEC.md sections 1, 3 and 5).

Pure functions. The writer follows this plan, and ``verify`` uses it to check every byte that no
checksum covers.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..checksum import crc32c
from ..errors import EncodeError
from ..jpeg.markers import EOI
from .group_table import GroupTable
from .names import numbered
from .plain_tar import PLAIN
from .schema import Schema
from .shard_head import HEAD_STOP, Head, round512
from .shard_index import ShardIndex, State, encode_body

MAX_MEMBER_BYTES = 1 << 33


class Member(NamedTuple):
    """One tar member: a table, pieces and deferred values, then literal bytes.

    Attributes:
        name: Member name.
        row: The group, counted from 0; N is the tail.
        size: Bytes of the content.
        table: The table at the start, if any.
        pieces: Own bytes of pieces, as (row, unit).
        late: Names of deferred fields, whose values follow.
        literal: Last bytes.
    """

    name: str
    row: int
    size: int
    table: bytes = b""
    pieces: tuple[tuple[int, int], ...] = ()
    late: tuple[str, ...] = ()
    literal: bytes = b""

    def header(self) -> bytes:
        """Return the tar header: 512 bytes, or more if the name needs a pax header."""
        return tar_header(self.name, self.size)


def tar_header(name: str, size: int) -> bytes:
    """Return a deterministic POSIX header of a regular file."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def index_name(schema: Schema, stem: str) -> str:
    """Return the name of the index member; ``stem`` is the shard's name without ``.tar``."""
    return "__pcr_index__" if schema.layout in ("preview", PLAIN) else f"{stem}.pcr"


def plan_members(
    index: ShardIndex,
    tables: Sequence[GroupTable],
    stem: str,
) -> Iterator[Member]:
    """Return all members after the index, in order; ``stem`` as in :func:`index_name`."""
    preview = index.schema.layout == "preview"
    for table in tables:
        row = table.rows[-1]
        group = "tail" if row == index.num_groups else f"scan{row + 1:02d}"
        name = f"__pcr_{group}__" if preview else f"{stem}.{group}"
        late = index.late_fields(row)
        if row < index.schema.base:
            yield Member(name, row, len(table.encoded), table.encoded)
            yield from _base_members(index, table)
            if late_bytes := table.late_bytes(row):
                yield Member("__pcr_late__", row, late_bytes, late=late)
            continue
        size = len(table.encoded) + int(table.own_bytes.sum()) + table.late_bytes(row)
        pieces = tuple((row, unit) for unit in np.flatnonzero(table.own_bytes).tolist())
        yield Member(name, row, size, table.encoded, pieces, late)


def _base_members(index: ShardIndex, table: GroupTable) -> Iterator[Member]:
    """Yield each sample's preview fields and base images together, so that readers group them."""
    row = table.rows[-1]
    totals = table.sizes.sum(axis=0, dtype=np.int64).tolist()
    unit = 0
    for s, key in enumerate(index.keys):
        for name in index.schema.preview_fields:
            value = index.fields[name][s]
            if value is not None:
                yield Member(f"{key}.{name}", row, len(value), literal=value)

        for field in _image_names(index, s):
            state = index.states[unit]
            if state != State.MISSING:
                # An empty file has an empty piece: its place is in the table.
                pieces = tuple((r, unit) for r in range(len(table.rows)))
                end = EOI if state == State.LAYERED else b""
                size = totals[unit] + len(end)
                yield Member(f"{key}.{field}", row, size, pieces=pieces, literal=end)
            unit += 1


def _image_names(index: ShardIndex, row: int) -> Iterator[str]:
    """Return the field name of each unit of a sample; those of a list are numbered."""
    counts = index.unit_counts[row].tolist()
    for field, count in zip(index.schema.streams, counts, strict=True):
        names = [numbered(field, place) for place in range(count)]
        yield from names if field in index.schema.lists else [field]


def lay_out(
    index: ShardIndex,
    tables: Sequence[GroupTable],
    stem: str,
) -> tuple[ShardIndex, tuple[GroupTable, ...], bytes]:
    """Fill in offsets, checksums and prefix stops of an otherwise complete index.

    Returns:
        The finished index and tables, and the index's bytes, head included.

    Raises:
        EncodeError: A group is too large for a plain tar header.
    """
    body, columns_bytes = encode_body(index)
    base = index.schema.base
    stops = [0] * (index.num_groups + 1)
    offsets = np.zeros(index.num_units, "<u8")
    pos = round512(HEAD_STOP + len(body))
    # Offsets do not change the length of a table.
    for member in plan_members(index, tables, stem):
        if member.size >= MAX_MEMBER_BYTES:
            raise EncodeError(
                f"{member.name} of {member.size} bytes is larger than 8 GiB; "
                "use fewer samples per shard"
            )
        start = pos + len(member.header())
        pos = round512(start + member.size)
        stops[member.row] = pos
        if member.pieces and member.row < base:
            offsets[member.pieces[0][1]] = start
    stops[:base] = stops[base - 1 : base] * base
    first, *others = tables
    if len(first.offsets):
        first = replace(first, offsets=offsets)
    laid_out = (first, *others)
    # 0 for a group without its own table.
    sizes = [0] * (index.num_groups + 1)
    crcs = sizes.copy()
    for table in laid_out:
        sizes[table.rows[-1]] = len(table.encoded)
        crcs[table.rows[-1]] = crc32c(table.encoded)
    head = Head(
        len(index.keys),
        len(index.schema.encode()),
        len(body),
        crc32c(body),
        columns_bytes,
        tuple(stops),
        tuple(sizes),
        tuple(crcs),
    )
    return replace(index, head=head), laid_out, head.encode() + body


def lay_out_plain_tar(index: ShardIndex) -> tuple[ShardIndex, bytes]:
    """Fill in the head of an otherwise complete index of a plain tar.

    Returns:
        The finished index, and the content of its member, head included.
    """
    assert index.tar is not None
    body, columns_bytes = encode_body(index)
    stop = round512(HEAD_STOP + len(body)) + round512(index.tar.end - index.tar.begin)
    head = Head(
        len(index.keys),
        len(index.schema.encode()),
        len(body),
        crc32c(body),
        columns_bytes,
        (stop,),
        (0,),
        (0,),
    )
    return replace(index, head=head), head.encode() + body
