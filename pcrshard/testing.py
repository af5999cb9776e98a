"""Synthetic JPEGs, for tests and benchmarks of this package and of code that uses it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from .jpeg.other_formats import Pixels


def make_pixels(
    seed: int,
    height: int,
    width: int,
    channels: int = 3,
) -> Pixels:
    """Return a smooth random picture, (height, width, channels) uint8; deterministic."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64) / max(height, width)
    picture = np.zeros((height, width, channels))
    for _ in range(6):
        fy, fx, phase = rng.uniform(0, 25, 3)
        picture += np.sin(fy * y + fx * x + phase)[..., None] * rng.uniform(-30, 30, channels)
    picture += rng.normal(0, 6, picture.shape)
    return np.clip(picture + 128, 0, 255).astype(np.uint8)


def make_jpeg(
    seed: int = 0,
    height: int = 48,
    width: int = 64,
    mode: str = "RGB",
    **options: Any,
) -> bytes:
    """Return a synthetic JPEG.

    Args:
        seed: Seed of the picture.
        height: In pixels.
        width: In pixels.
        mode: ``L``, ``RGB`` or ``CMYK``, as in Pillow.
        options: Pillow's JPEG options: ``quality``, ``subsampling``, ``progressive``,
            ``restart_marker_blocks``, ``exif``, ...
    """
    channels = {"L": 1, "RGB": 3, "CMYK": 4}[mode]
    pixels = make_pixels(seed, height, width, channels)
    out = io.BytesIO()
    Image.fromarray(pixels[..., 0] if channels == 1 else pixels, mode).save(out, "JPEG", **options)
    return out.getvalue()
