"""Streams in pieces in memory: locate pieces, verify checksums, join bytes.

A table of pieces is a (streams, pieces) array of :data:`PIECE`; a piece may be empty. Addresses are
valid while the buffers that they point into are alive.
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
    """Return the addresses of images in memory; their pieces must outlive the table.

    Args:
        images: The pieces of each image, bytes-like objects in order.

    Returns: (images, P) addresses and sizes; P is the largest number of pieces, at least 1, and
        missing pieces are empty.
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
    """Locate the pieces of U units, stored as R rows in a buffer.

    Args:
        sizes: (R, U) uint32, contiguous: bytes of each piece, including its header.
        header_sizes: (R, U) uint16, contiguous: bytes of each piece's header.
        starts: R positions in the buffer at which the pieces of each row begin.
        base: Number of leading rows that are stored unit by unit instead.
        offsets: (U,) uint64 start of each unit in these leading rows; empty if there are none.
        headers: The headers of all pieces, in order.
        buffer: (bytes,) uint8; it and ``headers`` must outlive the table.

    Returns: (U, 2 R) addresses and sizes of the header and the remaining bytes of each piece, in
        order; ``None`` if a piece is outside the buffer.

    Raises:
        ValueError: The shapes are inconsistent.
    """
    rows, units = sizes.shape
    if (header_sizes.shape, len(starts)) != ((rows, units), rows) or not (
        0 <= base <= rows and len(offsets) >= (units if base else 0)
    ):
        raise ValueError(
            f"expected header sizes and starts of {rows} rows of {units} units, got "
            f"{header_sizes.shape}, {len(starts)} starts, {base} base rows, {len(offsets)} offsets"
        )
    table = np.empty((units, 2 * rows), PIECE)
    # These names keep the memory behind the struct's pointers alive.
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
    """Return the streams whose CRC-32C does not match, computed with the GIL released.

    Args:
        table: (streams, pieces) of :data:`PIECE`, contiguous.
        crcs: (streams,) uint32, contiguous. An empty stream always matches.

    Raises:
        ValueError: There are not as many checksums as streams.
    """
    if len(crcs) != len(table):
        raise ValueError(f"expected {len(table)} checksums, got {len(crcs)}")
    flags = ffi.new("uint8_t[]", len(table))
    pieces = ffi.from_buffer("pcr_piece[]", table)
    expected = ffi.from_buffer("uint32_t[]", crcs)
    if lib.pcr_check_pieces(pieces, table.shape[1], len(table), expected, flags):
        return [stream for stream, flag in enumerate(flags) if flag]
    return []


def join(table: Table, end: bytes = b"") -> NDArray[np.uint8]:
    """Return the concatenated bytes of all pieces of a table, then ``end``, (bytes,) uint8."""
    pieces = np.ascontiguousarray(table)
    # Not NumPy's sum, which takes ten times as long for the few pieces of an image.
    size = sum(pieces["size"].ravel().tolist())
    out = np.empty(size + len(end), np.uint8)
    lib.pcr_join_pieces(
        ffi.from_buffer("pcr_piece[]", pieces), pieces.size, ffi.from_buffer("uint8_t[]", out)
    )
    out.data[size:] = end
    return out


def atomic_add(numbers: Any, place: int, amount: int) -> None:
    """Atomically add to an int64 in a buffer shared by threads and processes.

    Raises:
        IndexError: There is no such place.
    """
    lib.pcr_atomic_add(_number(numbers, place), amount)


def compare_exchange(numbers: Any, place: int, expected: int, desired: int) -> bool:
    """Atomically replace an int64 in a shared buffer if it is ``expected``; tell whether it was.

    Raises:
        IndexError: There is no such place.
    """
    return bool(lib.pcr_compare_exchange(_number(numbers, place), expected, desired))


def _number(numbers: Any, place: int) -> Any:
    cells = ffi.from_buffer("int64_t[]", numbers)
    if not 0 <= place < len(cells):
        raise IndexError(f"expected a place of {len(cells)} numbers, got {place}")
    return cells + place
