"""Decode, crop and resize in one go, with a seed: what a training job wants of an image."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Literal

import numpy as np

from .crops import Box, center_crop, random_resized_crop
from .markers import frame_size
from .pixels import Pixels, decode_image

Crop = Literal["random", "center"] | None


@dataclasses.dataclass(frozen=True)
class ImageDecoder:
    """JPEG bytes, or the scattered pieces of a sample, to a uint8 array of one size.

    Attributes:
        size: Side, or (height, width), of the result; ``None`` keeps the image's own.
        crop: ``random`` is RandomResizedCrop, ``center`` the middle square of 0.875 of the shorter side, ``None`` the whole image.
        layout: ``chw`` or ``hwc``.
        colour: ``rgb`` or ``gray``.
        scale: Range of the random crop's share of the area.
        ratio: Range of the random crop's width over its height.
        smoothing: Smooth between blocks of unfinished images, through libjpeg-turbo.
        flip: Probability of a mirror image, left for right.
    """

    size: int | tuple[int, int] | None = None
    crop: Crop = None
    layout: Literal["chw", "hwc"] = "chw"
    colour: Literal["rgb", "gray"] = "rgb"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    smoothing: bool = False
    flip: float = 0.0

    def __post_init__(self) -> None:
        if self.crop not in ("random", "center", None):
            raise ValueError(f"expected crop 'random', 'center' or None, got {self.crop!r}")
        if self.layout not in ("chw", "hwc") or self.colour not in ("rgb", "gray"):
            raise ValueError(f"expected a known layout and colour, got {self.layout!r} and {self.colour!r}")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"expected a probability of flip from 0 to 1, got {self.flip}")
        if self.shape is not None and min(self.shape) < 1:
            raise ValueError(f"expected a size above 0, got {self.size}")

    @property
    def shape(self) -> tuple[int, int] | None:
        """(height, width) of the result, if it is fixed."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    def __call__(self, jpeg: bytes | Sequence[bytes | memoryview], rng: random.Random, out: Pixels | None = None) -> Pixels:
        """Decode one image.

        Args:
            jpeg: A JPEG, or its pieces, at any scan.
            rng: Drawn from for a random crop and a flip.
            out: Where to decode to, such as a row of a batch.

        Returns:
            (3, H, W) or (H, W, 3) uint8, one channel for gray.

        Raises:
            CorruptJpeg: It cannot be decoded.
        """
        crop = self._box(jpeg, rng)
        pixels = decode_image(
            jpeg, crop=crop, size=self.shape, layout=self.layout, colour=self.colour, smoothing=self.smoothing, out=out
        )
        if self.flip and rng.random() < self.flip:
            pixels[...] = pixels[..., ::-1].copy() if self.layout == "chw" else pixels[:, ::-1].copy()
        return pixels

    def batch(self, jpegs: Sequence[bytes], rng: random.Random) -> Pixels:
        """Decode several images into one new array, (N, 3, H, W) or (N, H, W, 3); the size must be fixed."""
        if self.shape is None:
            raise ValueError("expected a size, because the images of a batch have one")
        channels = 3 if self.colour == "rgb" else 1
        shape = (channels, *self.shape) if self.layout == "chw" else (*self.shape, channels)
        out = np.empty((len(jpegs), *shape), np.uint8)
        for jpeg, row in zip(jpegs, out, strict=True):
            self(jpeg, rng, row)
        return out

    def _box(self, jpeg: bytes | Sequence[bytes | memoryview], rng: random.Random) -> Box | None:
        if self.crop is None:
            return None
        height, width = frame_size(jpeg if isinstance(jpeg, bytes | memoryview) else jpeg[0])
        if self.crop == "center":
            return center_crop(height, width)
        return random_resized_crop(rng, height, width, scale=self.scale, ratio=self.ratio)
