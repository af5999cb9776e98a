"""Data of the native tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("PCRSHARD_DATA", ROOT.parent / "shared" / "data"))
PHOTO_STEP = int(os.environ.get("PCRSHARD_PHOTO_STEP", "12"))  # 1: every photograph

STANDARD = {
    3: [
        ((0, 1, 2), 0, 0, 0, 1),
        ((0,), 1, 5, 0, 2),
        ((2,), 1, 63, 0, 1),
        ((1,), 1, 63, 0, 1),
        ((0,), 6, 63, 0, 2),
        ((0,), 1, 63, 2, 1),
        ((0, 1, 2), 0, 0, 1, 0),
        ((2,), 1, 63, 1, 0),
        ((1,), 1, 63, 1, 0),
        ((0,), 1, 63, 1, 0),
    ],
    1: [
        ((0,), 0, 0, 0, 1),
        ((0,), 1, 5, 0, 2),
        ((0,), 6, 63, 0, 2),
        ((0,), 1, 63, 2, 1),
        ((0,), 0, 0, 1, 0),
        ((0,), 1, 63, 1, 0),
    ],
}


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
