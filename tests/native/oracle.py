"""Data of the native tests."""

import os

from pcrshard.format.scan_script import STANDARD, scans_for
from pcrshard.jpeg.markers import map_jpeg

PHOTO_STEP = int(os.environ.get("PCRSHARD_PHOTO_STEP", "12"))  # 1: every photograph


def standard_scans(jpeg):
    """The scans of a JPEG by the standard script."""
    found = map_jpeg(jpeg)
    return scans_for(STANDARD, found.color, len(found.frame.components))


def scan_ends(jpeg):
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
