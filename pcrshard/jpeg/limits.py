"""Limits on the memory and time of decoding a JPEG, in proportion to its bytes.

Only markers are examined, before any decoder runs.
"""

from __future__ import annotations

from ..errors import UnsupportedJpeg
from .markers import JpegMap

MAX_PIXELS = 1 << 28
# Memory limit: 512 MiB for a file of up to 1 MiB, and 512 bytes for each further byte. The native
# core has the same limit.
MEMORY_PER_BYTE = 512
MEMORY_FLOOR_BYTES = 1 << 20
# Limit on claimed pixels, so that a shard of many small files does not take minutes: one block of
# 8x8 pixels per bit, the minimum of Huffman coding, or a small picture.
BLOCKS_PER_BYTE = 8
FREE_BLOCKS = 1 << 10
# Limit on how often blocks are visited: libjpeg visits every block of a scan, however short the
# scan. The scans of libjpeg visit a block of luma six times.
VISITS_PER_BLOCK = 8
MAX_VISITS = 1 << 26
_BLOCK_PIXELS = 64


def check_pixels(
    height: int,
    width: int,
    num_bytes: int,
    memory_bytes: int,
) -> None:
    """Refuse an image that claims too much for its file, before allocating memory for it.

    Args:
        height: Claimed height in pixels.
        width: Claimed width in pixels.
        num_bytes: Bytes of the file.
        memory_bytes: Memory that a decoder would allocate.

    Raises:
        UnsupportedJpeg: More than 2**28 pixels, or too much memory for a file of this size.
    """
    if height * width > MAX_PIXELS:
        raise UnsupportedJpeg(f"{width}x{height} is more than {MAX_PIXELS} pixels")
    allowed = MEMORY_PER_BYTE * max(num_bytes, MEMORY_FLOOR_BYTES)
    if memory_bytes > allowed:
        raise UnsupportedJpeg(
            f"expected to need at most {allowed} bytes of memory for {num_bytes} bytes, "
            f"got {width}x{height} pixels, which need {memory_bytes}"
        )


def check_cost(found: JpegMap, num_bytes: int) -> None:
    """Refuse a JPEG whose coefficients would cost libjpeg too much memory or time for its size.

    Args:
        found: The parts of the file.
        num_bytes: Bytes of the file.

    Raises:
        UnsupportedJpeg: The JPEG claims too much.
    """
    _, height, width, _ = found.frame
    num_blocks = found.frame.num_blocks
    check_pixels(height, width, num_bytes, sum(num_blocks) * _BLOCK_PIXELS * 2)

    blocks = BLOCKS_PER_BYTE * num_bytes + FREE_BLOCKS
    if height * width > blocks * _BLOCK_PIXELS:
        raise UnsupportedJpeg(f"{num_bytes} bytes are too few for {width}x{height} pixels")
    visits = sum(num_blocks[place] for scan in found.scans for place in scan.components)
    most_visits = min(VISITS_PER_BLOCK * blocks, MAX_VISITS)
    if visits > most_visits:
        raise UnsupportedJpeg(
            f"expected scans that visit at most {most_visits} blocks, got {visits}"
        )
