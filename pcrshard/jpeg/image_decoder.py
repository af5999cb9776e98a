"""Decode, crop and resize in one go, with a seed: what a training job wants of an image."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .. import native
from ..native.pool import MAX_VIEWS, Boxes, Draw, draw_boxes
from .crops import (
    Box,
    Crop,
    Interval,
    Rng,
    Size,
    center_crop,
    random_resized_crop,
)
from .pixels import SMOOTHING, Jpeg, Pixels, decode_image, image_size
from .views import Geometry, Picture, View, decode_views, stack_geometry

Layout = native.Layout
# A side, or (height, width); None is the image's own size.
Side = int | Size | None
# The crop and whether it is mirrored.
Drawn = tuple[Box | None, bool]
# What each view says for itself.
_OF_VIEWS = ("size", "crop", "scale", "ratio")


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
        color: ``rgb`` or ``gray``.
        scale: Range of the random crop's share of the area.
        ratio: Range of the random crop's width over its height.
        smoothing: Smooth between blocks of unfinished images, as libjpeg-turbo does.
        flip: Probability of a mirror image, left for right.
        views: Several pictures of each image, in place of ``size``, ``crop``, ``scale`` and
            ``ratio``; an image gives an array for each :class:`View`, (count, 3, H, W). The
            coefficients are decoded once.
        return_geometry: Give a :class:`Picture`: the pixels, and the :class:`Geometry` of where
            they are from, which is a list of them with ``views``.
    """

    size: Side = None
    crop: Crop = None
    layout: Layout = "chw"
    color: Literal["rgb", "gray"] = "rgb"
    scale: Interval = (0.08, 1.0)
    ratio: Interval = (3 / 4, 4 / 3)
    smoothing: bool = SMOOTHING
    flip: float = 0.0
    views: Sequence[View] = ()
    return_geometry: bool = False

    def __post_init__(self) -> None:
        self._check_size()
        self._check_views()
        if self.crop not in ("random", "center", None):
            raise ValueError(f"expected crop 'random', 'center' or None, got {self.crop!r}")
        if self.layout not in ("chw", "hwc") or self.color not in ("rgb", "gray"):
            raise ValueError(
                f"expected a known layout and color, got {self.layout!r} and {self.color!r}"
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

    def _check_views(self) -> None:
        if not all(isinstance(view, View) for view in self.views):
            raise TypeError(f"expected a list of pcrshard.View, got views={self.views!r}")
        defaults = {field.name: field.default for field in fields(self)}
        given = [name for name in _OF_VIEWS if getattr(self, name) != defaults[name]]
        if self.views and given:
            raise ValueError(f"expected {' and '.join(given)} in each View, not beside views")
        _ = self.kinds  # Each says what is wrong with it.
        if len(self.pictures) > MAX_VIEWS:
            raise ValueError(f"expected at most {MAX_VIEWS} views, got {len(self.pictures)}")

    @cached_property
    def kinds(self) -> list[ImageDecoder]:
        """The decoder of the pictures of each view."""
        return [
            replace(
                self,
                size=view.size,
                crop=view.crop,
                scale=view.scale,
                ratio=view.ratio,
                views=(),
                return_geometry=False,
            )
            for view in self.views
        ]

    @cached_property
    def pictures(self) -> list[ImageDecoder]:
        """The decoder of each picture that an image gives, in the order in which they draw."""
        kinds = zip(self.kinds, self.views, strict=True)
        return [kind for kind, view in kinds for _ in range(view.count)] or [self]

    @property
    def is_sized(self) -> bool:
        """Whether all images give arrays of one shape, or of one for each view."""
        return self.size is not None or bool(self.views)

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
        out: Any = None,
    ) -> Any:
        """Decode one image.

        Args:
            jpeg: A JPEG, or its pieces, at any scan.
            rng: Drawn from for a random crop and a flip, of each view after the other.
            out: Where to decode to, such as a row of a batch; with ``views`` an array of each.

        Returns:
            (3, H, W) or (H, W, 3) uint8, one channel for gray; with ``views`` a list of arrays,
            (count, 3, H, W), one for each. With ``return_geometry`` a :class:`Picture` of that.

        Raises:
            CorruptJpeg: It cannot be decoded.
        """
        size = (0, 0)
        if self.return_geometry or any(picture.crop for picture in self.pictures):
            size = image_size(jpeg)
        drawn = [picture._draw(rng, *size) for picture in self.pictures]
        pixels: Any
        if self.views:
            pixels = self._decode_views(jpeg, drawn, out)
        else:
            pixels = self._decode_one(jpeg, drawn[0], out)
        if not self.return_geometry:
            return pixels
        where = [Geometry.of_draw(crop, mirrored, size) for crop, mirrored in drawn]
        return Picture(pixels, self.group(where) if self.views else where[0])

    def _decode_one(
        self,
        jpeg: Jpeg,
        drawn: Drawn,
        out: Pixels | None,
    ) -> Pixels:
        crop, mirrored = drawn
        pixels = decode_image(
            jpeg,
            crop=crop,
            size=self.shape,
            layout=self.layout,
            color=self.color,
            smoothing=self.smoothing,
            out=out,
        )
        if mirrored:
            self._mirror(pixels)
        return pixels

    def _decode_views(
        self,
        jpeg: Jpeg,
        drawn: Sequence[Drawn],
        out: Sequence[Pixels] | None,
    ) -> list[Pixels]:
        if out is None:
            out = [np.empty(shape[1:], np.uint8) for shape in self.batch_shapes(1)]
        rows = [row for array in out for row in array]
        crops = [crop for crop, _ in drawn]
        decode_views(
            jpeg,
            crops,
            rows,
            layout=self.layout,
            color=self.color,
            smoothing=self.smoothing,
        )
        for row, (_, mirrored) in zip(rows, drawn, strict=True):
            if mirrored:
                self._mirror(row)
        return list(out)

    def group(self, where: Sequence[Geometry]) -> list[Geometry]:
        """The geometry of each view, from that of each picture."""
        pictures = iter(where)
        return [Geometry.stack(itertools.islice(pictures, view.count)) for view in self.views]

    def draw_boxes(
        self,
        state: int,
        ids: NDArray[np.int64],
        sizes: NDArray[np.int32],
    ) -> Boxes | None:
        """(N, V, 5) int32, crop and flip of each picture of many images; ``None`` if whole.

        Args:
            state: That of ``Draws(seed, epoch)``.
            ids: (N,) the last part of each image's key.
            sizes: (N, 2) height and width of each image.
        """
        if self.flip == 0 and not any(picture.crop for picture in self.pictures):
            return None
        how = [Draw(each.crop, each.scale, each.ratio, each.flip) for each in self.pictures]
        return draw_boxes(state, ids, sizes, how)

    def geometry(
        self,
        boxes: Boxes | None,
        sizes: NDArray[np.int32],
    ) -> Any:
        """The geometry of many images, as of one, from :meth:`draw_boxes`; none if not asked for.

        Args:
            boxes: (N, V, 5), or ``None`` for whole images.
            sizes: (N, 2) height and width of each image.
        """
        if not self.return_geometry:
            return None
        where = Geometry.of_boxes(boxes, sizes, len(self.pictures))
        if not self.views:
            return where.take(0)
        stops = np.cumsum([view.count for view in self.views]).tolist()
        starts = [0, *stops]
        return [where.take(slice(*ends)) for ends in zip(starts, stops, strict=False)]

    def batch_shape(self, count: int) -> tuple[int, ...]:
        """(N, 3, H, W) or (N, H, W, 3) of so many images, one channel for gray."""
        if self.shape is None:
            raise ValueError("expected a size, because the images of a batch have one")
        channels = 3 if self.color == "rgb" else 1
        if self.layout == "chw":
            return (count, channels, *self.shape)
        return (count, *self.shape, channels)

    def batch_shapes(self, count: int) -> list[tuple[int, ...]]:
        """The shape of each array of so many images: (N, V, 3, H, W) of each of ``views``."""
        if not self.views:
            return [self.batch_shape(count)]
        kinds = zip(self.kinds, self.views, strict=True)
        return [(count, *kind.batch_shape(view.count)) for kind, view in kinds]

    def batch(self, jpegs: Sequence[bytes], rng: Rng) -> Any:
        """Decode several images into new arrays: what one image gives, with N before each shape."""
        outs = [np.empty(shape, np.uint8) for shape in self.batch_shapes(len(jpegs))]
        rows = [list(arrays) if self.views else arrays[0] for arrays in zip(*outs, strict=True)]
        pictures = [self(jpeg, rng, row) for jpeg, row in zip(jpegs, rows, strict=True)]
        pixels = outs if self.views else outs[0]
        if not self.return_geometry:
            return pixels
        return Picture(pixels, stack_geometry([picture.geometry for picture in pictures]))

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
