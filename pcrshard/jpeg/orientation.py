"""EXIF orientation: the tag of JPEGs at every scan."""

from __future__ import annotations

import struct

from ..memory import Buffer
from .markers import APP0, SOI


def with_orientation(jpeg: Buffer, orientation: int) -> bytes:
    """Add an EXIF segment with only the orientation to a JPEG, or to the beginning of one.

    The segment follows a leading JFIF segment, which must be the first.
    """
    tiff = b"MM\0*\0\0\0\x08" + struct.pack(">HHHIHHI", 1, 0x0112, 3, 1, orientation, 0, 0)
    exif = b"Exif\0\0" + tiff
    segment = b"\xff\xe1" + (2 + len(exif)).to_bytes(2) + exif
    start = len(SOI)
    if jpeg[start : start + 2] == bytes([0xFF, APP0]):
        start += 2 + int.from_bytes(jpeg[start + 2 : start + 4])
    return b"".join((jpeg[:start], segment, jpeg[start:]))
