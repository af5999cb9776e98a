"""Decode, crop and resize in one go, with a seed: what a training job wants of an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .. import native
from .crops import (
    Box,
    Interval,
    Rng,
    Size,
    center_crop,
    random_resized_crop,
)
from .pixels import SMOOTHING, Jpeg, Pixels, decode_image, image_size

Crop = Literal["random", "center"] | None
Layout = native.Layout
# A side, or (height, width); None is the image's own size.
Side = int | Size | None


def _sides(size: Any) -> tuple[Any, ...]:
    """What should be height and width."""
    is_list = isinstance(size, Sequence) and not isinstance(size, str)
    return tuple(size) if is_list else (size, size)


def _is_whole(side: object) -> bool:
    return isinstance(side, int | np.integer) and not isinstance(side, bool)


@dataclass(frozen=True)
class ImageDecoder:
    """JPEG bytes, or the scattered pieces of a sample, to a uint8 array of one size.

    Attributes:
        size: Side, or (height, width), of the result; ``None`` keeps the image's own.
        crop: ``random`` is RandomResizedCrop, ``center`` the middle square of 0.875 of the shorter
            side, ``None`` the whole image.
        layout: ``chw`` or ``hwc``.
        colour: ``rgb`` or ``gray``.
        scale: Range of the random crop's share of the area.
        ratio: Range of the random crop's width over its height.
        smoothing: Smooth between blocks of unfinished images, as libjpeg-turbo does.
        flip: Probability of a mirror image, left for right.
    """

    size: Side = None
    crop: Crop = None
    layout: Layout = "chw"
    colour: Literal["rgb", "gray"] = "rgb"
    scale: Interval = (0.08, 1.0)
    ratio: Interval = (3 / 4, 4 / 3)
    smoothing: bool = SMOOTHING
    flip: float = 0.0

    def __post_init__(self) -> None:
        self._check_size()
        if self.crop not in ("random", "center", None):
            raise ValueError(f"expected crop 'random', 'center' or None, got {self.crop!r}")
        if self.layout not in ("chw", "hwc") or self.colour not in ("rgb", "gray"):
            raise ValueError(
                f"expected a known layout and colour, got {self.layout!r} and {self.colour!r}"
            )
        if not 0 <= self.flip <= 1:
            raise ValueError(f"expected a probability of flip from 0 to 1, got {self.flip}")

    def _check_size(self) -> None:
        if self.size is None:
            return
        sides = _sides(self.size)
        if len(sides) != 2 or not all(map(_is_whole, sides)):
            raise TypeError(
                f"expected a size such as 224 or (height, width), or None, got {self.size!r}"
            )
        if min(sides) < 1:
            raise ValueError(f"expected a size above 0, got {self.size}")

    @property
    def shape(self) -> Size | None:
        """(height, width) of the result, if it is fixed."""
        if self.size is None:
            return None
        height, width = _sides(self.size)
        return int(height), int(width)

    def __call__(
        self,
        jpeg: Jpeg,
        rng: Rng,
        out: Pixels | None = None,
    ) -> Pixels:
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
        size = (0, 0)
        if self.crop:
            size = image_size(jpeg)
        crop, mirrored = self._draw(rng, *size)
        pixels = decode_image(
            jpeg,
            crop=crop,
            size=self.shape,
            layout=self.layout,
            colour=self.colour,
            smoothing=self.smoothing,
            out=out,
        )
        if mirrored:
            self._mirror(pixels)
        return pixels

    def decode_batch(
        self,
        table: native.Table,
        sizes: NDArray[Any],
        rngs: Sequence[Rng],
        out: Pixels,
    ) -> list[bool]:
        """Decode many images in one call of the native core, which costs less than a call for each.

        Args:
            table: (N, pieces) of :func:`pcrshard.native.image_table`; its buffers must be alive.
            sizes: (N, 2) height and width of each image.
            rngs: What the crop and the flip of each image are drawn from.
            out: (N, 3, H, W) or (N, H, W, 3) uint8, C-contiguous; one channel for gray.

        Returns:
            For each image whether it was decoded, to the same pixels as by :meth:`__call__`, which
            says what is wrong with the others.
        """
        draws = list(map(self._draw, rngs, *sizes.T.tolist()))
        crops = np.array([crop for crop, _ in draws], np.int32) if self.crop else None
        decoded = native.decode_batch(
            table,
            out,
            crops=crops,
            layout=self.layout,
            colour=self.colour,
            smoothing=self.smoothing,
        )
        for i, (_, mirrored) in enumerate(draws):
            if mirrored and decoded[i]:
                self._mirror(out[i])
        return list(map(bool, decoded))

    def batch_shape(self, count: int) -> tuple[int, ...]:
        """(N, 3, H, W) or (N, H, W, 3) of so many images, one channel for gray."""
        if self.shape is None:
            raise ValueError("expected a size, because the images of a batch have one")
        channels = 3 if self.colour == "rgb" else 1
        if self.layout == "chw":
            return (count, channels, *self.shape)
        return (count, *self.shape, channels)

    def batch(self, jpegs: Sequence[bytes], rng: Rng) -> Pixels:
        """Decode several images of one size into a new array, (N, 3, H, W) or (N, H, W, 3)."""
        out = np.empty(self.batch_shape(len(jpegs)), np.uint8)
        for jpeg, row in zip(jpegs, out, strict=True):
            self(jpeg, rng, row)
        return out

    def _draw(
        self,
        rng: Rng,
        height: int,
        width: int,
    ) -> tuple[Box | None, bool]:
        """The crop, and whether to mirror it."""
        crop = None
        if self.crop == "center":
            crop = center_crop(height, width)
        elif self.crop == "random":
            crop = random_resized_crop(rng, height, width, scale=self.scale, ratio=self.ratio)
        return crop, self.flip > 0 and rng.random() < self.flip

    def _mirror(self, pixels: Pixels) -> None:
        axis = 2 if self.layout == "chw" else 1
        # Of a copy, because the pixels would be read after they are overwritten.
        pixels[...] = np.flip(pixels, axis).copy()
