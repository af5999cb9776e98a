"""The quality setting that a JPEG was compressed with, estimated from its quantization table."""

from __future__ import annotations

import numpy as np

from ..errors import CorruptJpeg
from .markers import DQT, read_segment

# From this quality on the scan script `q95` beats `standard`; see docs/scripts.md for figures.
HIGH_QUALITY = 90
# T.81 K.1, the luminance table of quality 50, in zigzag order.
_LUMINANCE = np.array([
    16, 11, 12, 14, 12, 10, 16, 14, 13, 14, 18, 17, 16, 19, 24, 40,
    26, 24, 22, 22, 24, 49, 35, 37, 29, 40, 58, 51, 61, 60, 57, 51,
    56, 55, 64, 72, 92, 78, 64, 68, 87, 69, 55, 56, 80, 109, 81, 87,
    95, 98, 103, 104, 103, 62, 77, 113, 121, 112, 100, 120, 92, 101, 103, 99,
])  # fmt: skip
_QUALITIES = np.arange(1, 101)


def estimate_quality(head: bytes) -> int | None:
    """Return the libjpeg quality, 1 to 100, whose luminance table is nearest to a JPEG's.

    Args:
        head: The JPEG, or its beginning up to and including the first quantization table.

    Returns: The quality; ``None`` without an 8-bit table.
    """
    stop = 2
    try:
        while (segment := read_segment(head, stop)).code != DQT:
            stop = segment.stop
    except CorruptJpeg:
        return None
    if len(segment.payload) < 65 or segment.payload[0] >> 4:
        return None
    table = np.frombuffer(segment.payload, np.uint8, 64, offset=1).astype(int)
    scales = np.where(_QUALITIES < 50, 5000 // _QUALITIES, 200 - 2 * _QUALITIES)[:, None]
    tables = np.clip((_LUMINANCE * scales + 50) // 100, 1, 255)
    return int(np.abs(tables - table).sum(axis=1).argmin()) + 1
