"""EXIF orientation: the sizes of upright pictures, and the tag of JPEGs at every scan."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..memory import Buffer
from .markers import APP0, SOI


def upright_sizes(
    sizes: NDArray[Any],
    orientations: NDArray[np.uint8],
) -> NDArray[Any]:
    """Return the sizes of pictures after rotation to upright.

    Args:
        sizes: (N, 2) height and width as stored, such as ``index.dims``.
        orientations: (N,) EXIF orientations, 0 for none, such as ``index.orientation``.

    Returns:
        (N, 2) height and width.
    """
    # Orientations 5 to 8 swap height and width.
    return np.where(orientations[:, None] >= 5, sizes[:, ::-1], sizes)


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
