"""Data of the native tests."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from pcrshard.format.scan_script import STANDARD, scans_for
from pcrshard.jpeg.markers import ScanHeader, map_jpeg

PHOTO_STEP = int(os.environ.get("PCRSHARD_PHOTO_STEP", "12"))  # 1: every photograph


def standard_scans(jpeg: bytes) -> list[ScanHeader]:
    """The scans of a JPEG by the standard script."""
    found = map_jpeg(jpeg)
    return scans_for(STANDARD, found.color, len(found.frame.components))


def scan_ends(jpeg: bytes) -> list[int]:
    """Offset after each scan's entropy data."""
    ends, at = [], 2
    while at + 4 <= len(jpeg) and jpeg[at + 1] != 0xD9:
        marker, at = jpeg[at + 1], at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
        if marker == 0xDA:
            at = jpeg.index(b"\xff", at)
            while jpeg[at + 1] == 0 or 0xD0 <= jpeg[at + 1] <= 0xD7:
                at = jpeg.index(b"\xff", at + 2)
            ends.append(at)
    return ends


Oracle = Callable[..., "np.ndarray | None"]
