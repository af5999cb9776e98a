"""ICC profiles of images: read, added to JPEGs, and applied (ICC.1:2022)."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms

from ..memory import Buffer
from .markers import APP0, SOI, SOS, Segment, read_segment

_APP2 = 0xE2
_SIGNATURE = b"ICC_PROFILE\0"
_CHUNK_BYTES = 65519
# Pillow's modes of the color spaces that a profile may be of (ICC.1 table 19).
_MODES = {b"RGB ": "RGB", b"GRAY": "L", b"CMYK": "CMYK"}


def read_profile(segments: Iterable[Segment]) -> bytes:
    """Return the ICC profile in the segments of a JPEG; empty if there is none or it lacks a chunk.

    As libjpeg's ``jpeg_read_icc_profile``, it takes chunks in any order, each exactly once.
    """
    chunks: dict[int, bytes] = {}
    counts: set[int] = set()
    start = len(_SIGNATURE)
    for segment in segments:
        data = segment.payload
        if segment.code == _APP2 and data.startswith(_SIGNATURE) and len(data) >= start + 2:
            number, count = data[start : start + 2]
            if number in chunks:
                return b""
            chunks[number] = data[start + 2 :]
            counts.add(count)
    if counts != {len(chunks)} or sorted(chunks) != list(range(1, len(chunks) + 1)):
        return b""
    return b"".join(chunks[number] for number in sorted(chunks))


def first_segments(jpeg: Buffer) -> Iterator[Segment]:
    """Yield the marker segments of a JPEG before its first scan.

    Raises:
        CorruptJpeg: A segment is damaged.
    """
    segment = read_segment(jpeg, len(SOI))
    while segment.code != SOS:
        yield segment
        segment = read_segment(jpeg, segment.stop)


def with_profile(jpeg: Buffer, profile: bytes) -> bytes:
    """Add the segments of an ICC profile to a JPEG, or to the beginning of one.

    They follow a leading JFIF segment, which must be the first.
    """
    count = -(-len(profile) // _CHUNK_BYTES)
    segments = []
    for number in range(count):
        chunk = profile[number * _CHUNK_BYTES : (number + 1) * _CHUNK_BYTES]
        payload = _SIGNATURE + bytes([number + 1, count]) + chunk
        segments.append(b"\xff\xe2" + (2 + len(payload)).to_bytes(2) + payload)
    start = len(SOI)
    if jpeg[start : start + 2] == bytes([0xFF, APP0]):
        start += 2 + int.from_bytes(jpeg[start + 2 : start + 4])
    return b"".join((jpeg[:start], *segments, jpeg[start:]))


def profile_mode(profile: bytes) -> str:
    """Return Pillow's mode of a profile's color space; empty for others and for no profile."""
    return _MODES.get(profile[16:20], "")


@lru_cache(maxsize=256)
def _transform(profile: bytes) -> Any:
    """Return the transform from a profile to sRGB; ``None`` if unusable or without effect."""
    mode = profile_mode(profile)
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        found = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (ImageCms.PyCMSError, OSError, ValueError):
        return None
    if mode == "RGB":
        # Most profiles are sRGB's own.
        steps = np.linspace(0, 255, 17).round().astype(np.uint8)
        grid = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(1, -1, 3)
        mapped = np.asarray(ImageCms.applyTransform(Image.fromarray(grid), found))
        if np.abs(mapped.astype(int) - grid).max() <= 1:
            return None
    return found


def is_wide(profile: bytes) -> bool:
    """Return whether colors change if a profile is applied, as those of Display P3 do."""
    return bool(profile) and _transform(profile) is not None


def to_srgb(picture: Any, profile: bytes) -> Any:
    """Convert a Pillow image to sRGB by its profile, perceptually, as ``ImageCms`` does by default.

    An image of another mode than the profile's, or with an unusable profile, keeps its numbers.
    """
    found = _transform(profile) if picture.mode == profile_mode(profile) else None
    return picture.convert("RGB") if found is None else ImageCms.applyTransform(picture, found)


def pixels_to_srgb(pixels: NDArray[np.uint8], profile: bytes, layout: str) -> None:
    """Convert RGB pixels to sRGB in place.

    Args:
        pixels: (..., 3, H, W) uint8, or (..., H, W, 3) in the layout ``hwc``.
        profile: An RGB profile.
        layout: ``chw`` or ``hwc``.
    """
    if not is_wide(profile) or not pixels.size:
        return
    last = np.moveaxis(pixels, -3, -1) if layout == "chw" else pixels
    flat = np.ascontiguousarray(last).reshape(1, -1, 3)
    converted = np.asarray(to_srgb(Image.fromarray(flat), profile))
    last[...] = converted.reshape(last.shape)
