"""EXIF orientation for ``datasets``, which turns images by it, at scans that do not have EXIF."""

from __future__ import annotations

import struct

from ..format.scan import FULL
from ..reading.prefix import Prefix, Sample


def orientations_of(loaded: Prefix) -> dict[str, list[int]]:
    """EXIF orientations of the images, by the fields where some are turned.

    None at full fidelity, where the images have their own.
    """
    if loaded.scan == FULL:
        return {}
    turned: dict[str, list[int]] = {}
    orientation = loaded.index.orientation
    if not (orientation > 1).any():
        return {}
    for row in range(loaded.index.num_samples):
        for field, units in loaded.units(row):
            values = orientation[list(units)].tolist() or [0]
            turned.setdefault(field, []).append(values[0])
    return {field: column for field, column in turned.items() if max(column) > 1}


def orient(
    sample: Sample,
    row: int,
    orientations: dict[str, list[int]],
) -> None:
    """Put the orientations of a row into its images."""
    for field, values in orientations.items():
        if values[row] > 1 and field in sample:
            sample[field] = _with_orientation(sample[field], values[row])


def _with_orientation(jpeg: bytes, orientation: int) -> bytes:
    """Put an orientation into a JPEG: ``datasets`` turns images by it, and shall at every scan."""
    tiff = b"MM\0*\0\0\0\x08" + struct.pack(">HHHIHHI", 1, 0x0112, 3, 1, orientation, 0, 0)
    segment = b"\xff\xe1" + (8 + len(tiff)).to_bytes(2) + b"Exif\0\0" + tiff
    has_jfif = jpeg[2:4] == b"\xff\xe0"
    # JFIF wants to be first.
    start = 4 + int.from_bytes(jpeg[4:6]) if has_jfif else 2
    return jpeg[:start] + segment + jpeg[start:]
