"""Streams that lie in pieces in memory: where the pieces are, their checksums, their bytes.

A table of pieces is a (streams, pieces) array of :data:`PIECE`; a piece may be empty. Addresses are
valid as long as the buffers that they point into.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._core import ffi, lib

PIECE = np.dtype([("data", np.uintp), ("size", np.uintp)])
Table = NDArray[np.void]


def crc32c(data: Any, value: int = 0) -> int:
    """Return the CRC-32C (Castagnoli, RFC 3720 appendix B.4) of a contiguous bytes-like object.

    Args:
        data: The bytes.
        value: CRC-32C of the bytes before them.
    """
    view = ffi.from_buffer(data)
    return int(lib.pcr_crc32c(value, view, len(view)))


def address(data: Any) -> int:
    """Return the address of a contiguous buffer."""
    return int(ffi.cast("uintptr_t", ffi.from_buffer(data)))


def empty_table(streams: int, pieces: int) -> Table:
    """Return a table of empty pieces, (streams, pieces)."""
    return np.zeros((streams, pieces), PIECE)


def piece_table(images: Sequence[Sequence[Any]]) -> Table:
    """Where images are in memory; their pieces must outlive the table.

    Args:
        images: The pieces of each image, bytes-like objects in order.

    Returns:
        (images, P) of address and size, P being the largest number of pieces, at least 1;
        others are empty.
    """
    table = empty_table(len(images), max([1, *map(len, images)]))
    for row, pieces in enumerate(images):
        for column, piece in enumerate(pieces):
            table[row, column] = address(piece), memoryview(piece).nbytes
    return table


def place_pieces(
    sizes: NDArray[np.uint32],
    header_sizes: NDArray[np.uint16],
    starts: Sequence[int],
    base: int,
    offsets: NDArray[np.uint64],
    headers: bytes,
    buffer: NDArray[np.uint8],
) -> Table | None:
    """Find the pieces of U units, which lie in R rows in a buffer.

    Args:
        sizes: (R, U) uint32, contiguous: bytes of each piece, with its header.
        header_sizes: (R, U) uint16, contiguous: how many of them are its header.
        starts: R positions in the buffer, where the pieces of each row begin.
        base: How many of the first rows lie unit by unit instead.
        offsets: (U,) uint64, where the first rows of each unit begin; empty without any.
        headers: The headers of all pieces, in order.
        buffer: (bytes,) uint8; it and ``headers`` must outlive the table.

    Returns:
        (U, 2 R) address and size of the header and the own bytes of each piece, in order; ``None``
        if a piece is not in the buffer.
    """
    rows, units = sizes.shape
    table = np.empty((units, 2 * rows), PIECE)
    # What the struct points to lives as long as these names.
    first = ffi.new("uint64_t[]", starts)
    own = ffi.from_buffer("uint64_t[]", offsets)
    shared = ffi.from_buffer("uint8_t[]", headers)
    view = ffi.from_buffer("uint8_t[]", buffer)
    fields = (rows, units, base, first, own, shared, len(headers), view, len(buffer))
    inside = lib.pcr_place_pieces(
        ffi.new("pcr_place *", fields),
        ffi.from_buffer("uint32_t[]", sizes),
        ffi.from_buffer("uint16_t[]", header_sizes),
        ffi.from_buffer("pcr_piece[]", table),
    )
    return table if inside else None


def find_damaged(table: Table, crcs: NDArray[np.uint32]) -> list[int]:
    """Return which streams do not have their CRC-32C; they are compared without the GIL.

    Args:
        table: (streams, pieces) where they are, contiguous.
        crcs: (streams,) uint32, contiguous. A stream without bytes is sound, whatever it says.
    """
    flags = ffi.new("uint8_t[]", len(table))
    pieces = ffi.from_buffer("pcr_piece[]", table)
    expected = ffi.from_buffer("uint32_t[]", crcs)
    if lib.pcr_check_pieces(pieces, table.shape[1], len(table), expected, flags):
        return [stream for stream, flag in enumerate(flags) if flag]
    return []


def join(table: Table) -> NDArray[np.uint8]:
    """Return the bytes of all pieces of a table, one after the other, as (bytes,) uint8."""
    pieces = np.ascontiguousarray(table)
    out = np.empty(int(pieces["size"].sum()), np.uint8)
    lib.pcr_join_pieces(
        ffi.from_buffer("pcr_piece[]", pieces), pieces.size, ffi.from_buffer("uint8_t[]", out)
    )
    return out


def atomic_add(numbers: Any, place: int, amount: int) -> None:
    """Add to one of the int64 of a buffer that threads and processes share."""
    lib.pcr_atomic_add(ffi.from_buffer("int64_t[]", numbers) + place, amount)
