"""The quality setting that a JPEG was compressed with, estimated from its quantization table."""

from __future__ import annotations

from ..errors import CorruptJpeg
from .markers import DQT, read_segment

# From this quality on the scan script `q95` beats `standard`; see docs/scripts.md for figures.
HIGH_QUALITY = 90
# The sum of the luminance table of quality 50 (T.81 K.1), which libjpeg scales for the others.
_SUM_OF_50 = 3688


def estimate_quality(head: bytes) -> int | None:
    """Return the libjpeg quality whose luminance table has the sum of a JPEG's.

    Exact for libjpeg's tables of qualities 25 to 99; 100 counts as 99.

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
    scale = sum(segment.payload[1:65]) / _SUM_OF_50
    return round(100 - 50 * scale if scale < 1 else 50 / scale)
