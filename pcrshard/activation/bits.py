"""Pack booleans and one-byte codes as bit planes, in PyTorch operations, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64


def pack_planes(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Pack codes in blocks of 64, each without its empty bit planes.

    Small codes leave the high planes empty; codes that are all positive also leave the sign plane
    empty.

    Args:
        codes: (n,) int8.

    Returns:
        (p,) int64 planes; and one byte per block with a bit for each of its planes. Synchronizes
        with the device once.
    """
    planes = to_planes(torch.nn.functional.pad(codes, (0, -codes.numel() % BLOCK)))
    has_bits = planes != 0
    return planes[has_bits], pack_booleans(has_bits.flatten())


def unpack_planes(planes: Tensor, head: Tensor, count: int) -> Tensor:
    """Unpack (count,) int8 codes."""
    has_bits = unpack_booleans(head).view(-1, 8)
    every = planes.new_zeros(has_bits.shape)
    every[has_bits] = planes
    return from_planes(every)[:count]


def to_planes(codes: Tensor) -> Tensor:
    """Split (n,) int8 codes, n a multiple of 64, into (n / 64, 8) int64 planes, signs first."""
    groups = to_bits(codes).view(-1, 8, 8)
    return groups.transpose(1, 2).flatten().view(torch.int64).view(-1, 8)


def from_planes(planes: Tensor) -> Tensor:
    """Invert :func:`to_planes`."""
    return from_bits(planes.view(torch.uint8).view(-1, 8, 8).transpose(1, 2).flatten())


def to_bits(codes: Tensor) -> Tensor:
    """Split (n,) int8 codes, n a multiple of 8, into (n / 8, 8) bytes of bit i, signs first."""
    # Zigzag: 0, -1, 1, -2, ... become 0, 1, 2, 3, ..., with the sign in the lowest bit.
    zigzag = (codes << 1) ^ (codes >> 7)
    return _transpose(zigzag.view(torch.int64)).view(torch.uint8).view(-1, 8)


def from_bits(flat: Tensor) -> Tensor:
    """Invert :func:`to_bits`, given flat bytes."""
    zigzag = _transpose(flat.view(torch.int64)).view(torch.uint8)
    return (zigzag >> 1).view(torch.int8) ^ -(zigzag & 1).view(torch.int8)


def pack_booleans(flat: Tensor) -> Tensor:
    """Pack (n,) booleans eight to a byte."""
    padded = torch.nn.functional.pad(flat.to(torch.uint8), (0, -flat.shape[0] % 8))
    return _transpose(padded.view(torch.int64)).to(torch.uint8)


def unpack_booleans(packed: Tensor) -> Tensor:
    """Unpack all (8 n,) booleans of n bytes."""
    return _transpose(packed.to(torch.int64)).view(torch.uint8).to(torch.bool)


def _transpose(words: Tensor) -> Tensor:
    """Transpose 8x8 matrices of bits: byte i of a word gets bit i of its bytes.

    Hacker's Delight, section 7-3.
    """
    for shift, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0xF0F0F0F0)):
        swapped = (words ^ (words >> shift)) & mask
        words = words ^ swapped ^ (swapped << shift)
    return words
