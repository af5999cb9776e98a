"""One-byte codes in as many bits as each block of 64 needs, by PyTorch operations on any device.

A block whose largest code has w bits takes 8 w bytes: bits 0-3 two to a byte, then two more bits
four to a byte, then one more eight to a byte, as far as w asks for them. Blocks of one width lie
together, so that a few operations pack all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64
_WIDTHS = range(1, 9)
# How a width is made up of parts that divide a byte.
_PARTS = {
    width: (8,) if width == 8 else tuple(part for part in (4, 2, 1) if width & part)
    for width in _WIDTHS
}


def pack(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Pack codes.

    Args:
        codes: (n,) int8.

    Returns:
        (bytes,) uint8; and one byte that says whether there are negative codes, then the width of
        each block, two to a byte. Waits for the device twice.
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
    """The (count,) int8 codes that were packed."""
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
    """Map 0, -1, 1, -2, ... to 0, 1, 2, 3, ..., so that small codes have few bits."""
    return ((codes << 1) ^ (codes >> 7)).view(torch.uint8)


def unzigzag(flat: Tensor) -> Tensor:
    """The inverse of :func:`zigzag`."""
    return (flat >> 1).view(torch.int8) ^ -(flat & 1).view(torch.int8)


def _blocks(flat: Tensor) -> Tensor:
    padding = -flat.numel() % BLOCK
    if padding:
        flat = torch.nn.functional.pad(flat, (0, padding))
    return flat.view(-1, BLOCK)


def _widths(blocks: Tensor) -> Tensor:
    """(blocks,) uint8: bits of the largest code of each."""
    if blocks.numel() == 0:
        return blocks.new_empty(0)
    largest = blocks.amax(1)
    width = torch.zeros_like(largest)
    for bit in range(8):
        width += largest >= (1 << bit)
    return width


def _order(widths: Tensor) -> tuple[Tensor, list[int]]:
    """The blocks in order of their width, and how many there are of each of the widths 0 to 8."""
    order = widths.argsort(stable=True)
    counts: list[int] = torch.bincount(widths.int(), minlength=9).tolist()
    return order, counts


def pack_width(rows: Tensor, width: int) -> Tensor:
    """(k * n * width / 8,) bytes of (k, n) values of ``width`` bits."""
    parts = []
    shift = 0
    for part in _PARTS[width]:
        piece = rows if part == 8 else (rows >> shift) & ((1 << part) - 1)
        parts.append(pack_part(piece, part))
        shift += part
    return torch.cat(parts, dim=1).flatten()


def unpack_width(rows: Tensor, width: int) -> Tensor:
    """(k, n) values of (k, n * width / 8) bytes."""
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
    """(k, n * bits / 8) bytes of (k, n) values; equal parts of a row lie over each other."""
    if bits == 8:
        return rows
    pieces = rows.chunk(8 // bits, dim=1)
    packed = pieces[0].clone()
    for position, piece in enumerate(pieces[1:], 1):
        packed |= piece << (bits * position)
    return packed


def unpack_part(packed: Tensor, bits: int) -> Tensor:
    """(k, n * 8 / bits) values of (k, n) bytes."""
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=1)
