"""Pack one-byte codes to the bit width of each block of 64, in PyTorch, on any device.

A block whose largest code has w bits takes 8 w bytes. The width is split into parts of 4, 2, and 1
bits as needed, packed two, four, and eight to a byte. Blocks of the same width are grouped so that
a few operations pack all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64
_WIDTHS = range(1, 9)
# Each width as a sum of parts that divide a byte.
_PARTS = {
    width: (8,) if width == 8 else tuple(part for part in (4, 2, 1) if width & part)
    for width in _WIDTHS
}


def pack(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Pack codes.

    Args:
        codes: (n,) int8.

    Returns:
        (bytes,) uint8; and one byte that tells whether codes are signed, then the width of each
        block, two to a byte. Synchronizes with the device twice.
    """
    signed = (codes < 0).any()
    blocks = _blocks(zigzag(codes) if bool(signed) else codes.view(torch.uint8))
    widths = _widths(blocks)
    order, counts = _order(widths)
    packed = []
    start = 0
    for width, count in zip(_WIDTHS, counts[1:], strict=True):
        first = start + counts[0]
        if count:
            packed.append(pack_width(blocks[order[first : first + count]], width))
        start += count
    data = torch.cat(packed) if packed else blocks.new_empty(0)
    padded = torch.nn.functional.pad(widths, (0, widths.numel() % 2))
    head = pack_part(padded.view(-1, 2), 4).flatten()
    return data, torch.cat([signed.view(torch.uint8)[None], head])


def unpack(data: Tensor, head: Tensor, count: int) -> Tensor:
    """Unpack (count,) int8 codes."""
    num_blocks = -(-count // BLOCK)
    widths = unpack_part(head[1:, None], 4).flatten()[:num_blocks]
    order, counts = _order(widths)
    blocks = data.new_zeros((num_blocks, BLOCK))
    start = 0
    first = counts[0]
    for width, size in zip(_WIDTHS, counts[1:], strict=True):
        if size:
            stop = start + size * width * BLOCK // 8
            part = data[start:stop].view(size, width * BLOCK // 8)
            blocks[order[first : first + size]] = unpack_width(part, width)
            start = stop
        first += size
    flat = blocks.flatten()[:count]
    return unzigzag(flat) if bool(head[0]) else flat.view(torch.int8)


def zigzag(codes: Tensor) -> Tensor:
    """Map 0, -1, 1, -2, ... to 0, 1, 2, 3, ..., so that codes of small magnitude need few bits."""
    return ((codes << 1) ^ (codes >> 7)).view(torch.uint8)


def unzigzag(flat: Tensor) -> Tensor:
    """Invert :func:`zigzag`."""
    return (flat >> 1).view(torch.int8) ^ -(flat & 1).view(torch.int8)


def _blocks(flat: Tensor) -> Tensor:
    padding = -flat.numel() % BLOCK
    if padding:
        flat = torch.nn.functional.pad(flat, (0, padding))
    return flat.view(-1, BLOCK)


def _widths(blocks: Tensor) -> Tensor:
    """Return the (blocks,) uint8 bit widths of the largest code of each block."""
    if blocks.numel() == 0:
        return blocks.new_empty(0)
    largest = blocks.amax(1)
    width = torch.zeros_like(largest)
    for bit in range(8):
        width += largest >= (1 << bit)
    return width


def _order(widths: Tensor) -> tuple[Tensor, list[int]]:
    """Return the blocks sorted by width, and the number of blocks of each width 0 to 8."""
    order = widths.argsort(stable=True)
    counts: list[int] = torch.bincount(widths.int(), minlength=9).tolist()
    return order, counts


def pack_width(rows: Tensor, width: int) -> Tensor:
    """Pack (k, n) values of ``width`` bits into (k * n * width / 8,) bytes."""
    parts = []
    shift = 0
    for part in _PARTS[width]:
        piece = rows if part == 8 else (rows >> shift) & ((1 << part) - 1)
        parts.append(pack_part(piece, part))
        shift += part
    return torch.cat(parts, dim=1).flatten()


def unpack_width(rows: Tensor, width: int) -> Tensor:
    """Unpack (k, n) values from (k, n * width / 8) bytes."""
    count = rows.shape[1] * 8 // width
    whole = rows.new_zeros((rows.shape[0], count))
    start = 0
    shift = 0
    for part in _PARTS[width]:
        stop = start + part * count // 8
        whole |= unpack_part(rows[:, start:stop], part) << shift
        start = stop
        shift += part
    return whole


def pack_part(rows: Tensor, bits: int) -> Tensor:
    """Pack (k, n) values into (k, n * bits / 8) bytes, overlaying equal parts of each row."""
    if bits == 8:
        return rows
    pieces = rows.chunk(8 // bits, dim=1)
    packed = pieces[0].clone()
    for position, piece in enumerate(pieces[1:], 1):
        packed |= piece << (bits * position)
    return packed


def unpack_part(packed: Tensor, bits: int) -> Tensor:
    """Unpack (k, n * 8 / bits) values from (k, n) bytes."""
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=1)
