"""The members of a shard, derived from its index (SPEC.md sections 1, 3 and 5).

Pure. The writer follows this plan to write a shard, and ``verify`` to check every byte that no checksum covers.
"""

from __future__ import annotations

import dataclasses
import tarfile
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..checksum import crc32c
from ..errors import EncodeError
from ..jpeg.markers import EOI
from .shard_index import BLOCK, HEAD_STOP, Head, Schema, ShardIndex, encode_body, round512

TRAILER = bytes(2 * BLOCK)
MAX_MEMBER_BYTES = 1 << 33


class Member(NamedTuple):
    """One member of group ``row + 1``: pieces as (row, sample, stream), then literal bytes."""

    name: str
    row: int
    size: int
    pieces: tuple[tuple[int, int, int], ...]
    literal: bytes

    def header(self) -> bytes:
        """The tar header: 512 bytes, more if the name needs a pax header."""
        return tar_header(self.name, self.size)


def tar_header(name: str, size: int) -> bytes:
    """A deterministic POSIX header of a regular file."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def index_name(schema: Schema, stem: str) -> str:
    """Name of the index member; ``stem`` is the shard's name without ``.tar``."""
    return "__pcr_index__" if schema.layout == "preview" else f"{stem}.pcr"


def plan_members(index: ShardIndex, stem: str) -> Iterator[Member]:
    """All members after the index, in order."""
    for row in range(index.num_groups + 1):
        if row < index.schema.base:
            if row == 0:
                yield from _base_members(index)
            continue
        tail = row == index.num_groups
        if index.schema.layout == "preview":
            name = "__pcr_tail__" if tail else f"__pcr_scan{row + 1:02d}__"
        else:
            name = f"{stem}.tail" if tail else f"{stem}.scan{row + 1:02d}"
        sizes = index.sizes[row]
        pieces = tuple((row, int(s), int(m)) for s, m in np.argwhere(sizes))
        yield Member(name, row, int(sizes.sum(dtype=np.int64)), pieces, b"")


def _base_members(index: ShardIndex) -> Iterator[Member]:
    """Each sample's preview fields and base images, next to each other so that any reader groups them."""
    base, schema = index.schema.base, index.schema
    totals = index.sizes[:base].sum(axis=0, dtype=np.int64)
    for s, key in enumerate(index.keys):
        for name in schema.preview_fields:
            value = index.fields[name][s]
            if value is not None:
                yield Member(f"{key}.{name}", base - 1, len(value), (), value)
        for m, (field, _) in enumerate(schema.streams):
            if index.sizes[0, s, m]:
                pieces = tuple((row, s, m) for row in range(base) if index.sizes[row, s, m])
                yield Member(f"{key}.{field}", base - 1, int(totals[s, m]) + len(EOI), pieces, EOI)


def lay_out(index: ShardIndex, stem: str) -> tuple[ShardIndex, bytes]:
    """Fill in offsets, checksums and prefix stops of an index whose other columns are ready.

    Returns:
        The finished index, and its bytes, head included.

    Raises:
        EncodeError: A group is larger than a plain tar header can say.
    """
    # Offsets do not change the length of the index, so it is known before they are.
    pos = round512(HEAD_STOP + len(encode_body(index.schema, index)))
    stops = [0] * (index.num_groups + 1)
    offsets = np.zeros_like(index.base_offsets)
    for member in plan_members(index, stem):
        if member.size >= MAX_MEMBER_BYTES:
            raise EncodeError(
                f"{member.name} of {member.size} bytes is larger than 8 GiB; use fewer samples per shard"
            )
        start = pos + len(member.header())
        pos = round512(start + member.size)
        stops[member.row] = pos
        if member.pieces and member.row < index.schema.base:
            offsets[member.pieces[0][1:]] = start
    stops[: index.schema.base] = [stops[index.schema.base - 1]] * index.schema.base
    index = dataclasses.replace(index, base_offsets=offsets)
    body = encode_body(index.schema, index)
    head = Head(len(index.keys), len(index.schema.encode()), len(body), crc32c(body), tuple(stops))
    return dataclasses.replace(index, head=head), head.encode() + body
