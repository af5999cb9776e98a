"""The members of a shard, derived from its index (SPEC.md sections 1, 3 and 5).

Pure. The writer follows this plan to write a shard, and ``verify`` to check every byte that no
checksum covers.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..checksum import crc32c
from ..errors import EncodeError
from ..jpeg.markers import EOI
from .shard_head import BLOCK, HEAD_STOP, Head, round512
from .shard_index import Schema, ShardIndex, encode_body

TRAILER = bytes(2 * BLOCK)
MAX_MEMBER_BYTES = 1 << 33


class Member(NamedTuple):
    """One member of group ``row + 1``: pieces as (row, sample, stream), then literal bytes."""

    name: str
    row: int
    size: int
    pieces: tuple[tuple[int, int, int], ...]
    literal: bytes = b""

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
    """All members after the index, in order; ``stem`` is as in :func:`index_name`."""
    preview = index.schema.layout == "preview"
    if preview:
        yield from _base_members(index)
    for row in range(index.schema.base, index.num_groups + 1):
        group = "tail" if row == index.num_groups else f"scan{row + 1:02d}"
        name = f"__pcr_{group}__" if preview else f"{stem}.{group}"
        sizes = index.sizes[row]
        pieces = tuple((row, s, m) for s, m in np.argwhere(sizes).tolist())
        yield Member(name, row, int(sizes.sum(dtype=np.int64)), pieces)


def _base_members(index: ShardIndex) -> Iterator[Member]:
    """Each sample's preview fields and base images, together so that any reader groups them."""
    base = index.schema.base
    sizes = index.sizes[:base]
    totals = sizes.sum(axis=0, dtype=np.int64).tolist()
    for s, key in enumerate(index.keys):
        for name in index.schema.preview_fields:
            value = index.fields[name][s]
            if value is not None:
                yield Member(f"{key}.{name}", base - 1, len(value), (), value)

        for m, (field, _) in enumerate(index.schema.streams):
            # A stream that the sample lacks has no first piece.
            if sizes[0, s, m]:
                pieces = tuple((row, s, m) for row in np.flatnonzero(sizes[:, s, m]).tolist())
                yield Member(f"{key}.{field}", base - 1, totals[s][m] + len(EOI), pieces, EOI)


def lay_out(index: ShardIndex, stem: str) -> tuple[ShardIndex, bytes]:
    """Fill in offsets, checksums and prefix stops of an index whose other columns are ready.

    Returns:
        The finished index, and its bytes, head included.

    Raises:
        EncodeError: A group is larger than a plain tar header can say.
    """
    # Offsets do not change the length of the index, so it is known before they are.
    index_stop = round512(HEAD_STOP + len(encode_body(index.schema, index)))
    stops, offsets = _place_members(index, stem, index_stop)
    index = replace(index, base_offsets=offsets)
    body = encode_body(index.schema, index)
    head = Head(len(index.keys), len(index.schema.encode()), len(body), crc32c(body), stops)
    return replace(index, head=head), head.encode() + body


def _place_members(
    index: ShardIndex,
    stem: str,
    pos: int,
) -> tuple[tuple[int, ...], NDArray[np.uint64]]:
    """Prefix stops and base offsets of members that begin at ``pos``."""
    base = index.schema.base
    stops = [0] * (index.num_groups + 1)
    offsets = np.zeros_like(index.base_offsets)
    for member in plan_members(index, stem):
        if member.size >= MAX_MEMBER_BYTES:
            raise EncodeError(
                f"{member.name} of {member.size} bytes is larger than 8 GiB; "
                "use fewer samples per shard"
            )
        start = pos + len(member.header())
        pos = round512(start + member.size)
        stops[member.row] = pos
        if member.pieces and member.row < base:
            offsets[member.pieces[0][1:]] = start
    return (*[stops[base - 1]] * base, *stops[base:]), offsets
