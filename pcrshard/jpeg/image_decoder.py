"""Decode, rotate upright, crop and resize in one step, with seeded random crops, for training."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from .. import native
from ..arguments import check_fields, is_integer
from ..errors import CorruptJpeg
from ..lazy import lazy
from ..native.pieces import Table, piece_table
from ..native.pool import MAX_VIEWS, Batch, Boxes, Draw, Interval, Pool, draw_boxes, own_pool
from .color_profiles import first_segments, pixels_to_srgb, profile_mode, read_profile
from .other_formats import Pixels, crop_and_resize
from .pixels import SMOOTHING, Jpeg, arithmetic_as_huffman, arrange, as_pieces, decode_image
from .views import RATIO, SCALE, Crop, Geometry, Picture, Side, View, at_image

# Source of random crops and flips: a generator, an integer key, or Python's ``random``.
Rng = random.Random | int | None


@dataclass(frozen=True)
class ImageDecoder:
    """A decoder from JPEG bytes, or the pieces of a sample, to a uint8 array of fixed size.

    Attributes:
        size: Side, or (height, width), of the result; ``None`` keeps the image's own size.
        crop: ``random`` is RandomResizedCrop, ``center`` the centered square of 0.875 of the
            shorter side, ``None`` the whole image.
        flip: Probability of a horizontal flip.
        layout: ``chw`` or ``hwc``.
        color: ``rgb`` as stored, ``srgb`` converted by the ICC profile, or ``gray``. Images whose
            profile is sRGB, or that have none, cost nothing more; others about 1 ms per 224x224.
        upright: Whether to apply the EXIF orientation, like Pillow's ``exif_transpose``; crops and
            sizes are those of the upright picture. ``False`` gives the stored pixels.
        scale: Range of the random crop's fraction of the area.
        ratio: Range of the random crop's aspect ratio, width over height.
        smoothing: Smooth between blocks of images at a lower scan, as libjpeg-turbo does.
        views: Several pictures of each image, instead of ``size``, ``crop``, ``scale`` and
            ``ratio``; each :class:`View` yields an array, (count, 3, H, W). The coefficients are
            decoded once.
        return_geometry: Whether to return a :class:`Picture`: the pixels and their
            :class:`Geometry` in the image; with ``views`` lists of these.
        min_visible: Boxes of which a crop has less than this fraction of their area get no area.

    Raises:
        TypeError: A value has another type.
        ValueError: A value is out of range, or two options conflict.
    """

    size: Side = None
    crop: Crop = None
    flip: float = 0.0
    layout: native.PixelLayout = "chw"
    color: Literal["rgb", "gray", "srgb"] = "rgb"
    upright: bool = True
    scale: Interval = SCALE
    ratio: Interval = RATIO
    smoothing: bool = SMOOTHING
    views: Annotated[Sequence[View], "a list of pcrshard.View"] = ()
    return_geometry: bool = False
    min_visible: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        own = (self.size, self.crop, self.scale, self.ratio)
        if self.views and own != (None, None, SCALE, RATIO):
            raise ValueError("expected size, crop, scale and ratio in each View, not beside views")
        if any(view.size is None for view in self.views):
            raise ValueError("expected a size of each View")
        if len(self._pictures) > MAX_VIEWS:  # also validates size and crop
            raise ValueError(f"expected at most {MAX_VIEWS} views, got {len(self._pictures)}")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"expected a probability of flip from 0 to 1, got {self.flip}")
        if not 0 <= self.min_visible <= 1:
            raise ValueError(f"expected min_visible from 0 to 1, got {self.min_visible}")

    @lazy
    def _kinds(self) -> Sequence[View]:
        """The views; by default one."""
        return self.views or [View(self.size, 1, self.scale, self.ratio, self.crop)]

    @lazy
    def _pictures(self) -> list[View]:
        """The view of each picture of an image, in the order of their random numbers."""
        return [view for view in self._kinds for _ in range(view.count)]

    @lazy
    def _draws(self) -> list[Draw]:
        """How the crop and flip of each picture are drawn."""
        return [Draw(view.crop, view.scale, view.ratio, self.flip) for view in self._pictures]

    @lazy
    def _parts(self) -> list[slice]:
        """The pictures of each view."""
        stops = itertools.accumulate((view.count for view in self._kinds), initial=0)
        return [slice(*ends) for ends in itertools.pairwise(stops)]

    @property
    def _stored(self) -> native.Color:
        """The color that the core decodes."""
        return "gray" if self.color == "gray" else "rgb"

    @property
    def is_random(self) -> bool:
        """Whether crops or flips are drawn."""
        return self.flip > 0 or any(view.crop == "random" for view in self._kinds)

    @property
    def is_sized(self) -> bool:
        """Whether all results have the same shape, or the same shape per view."""
        return self._kinds[0].size is not None

    @property
    def is_pooled(self) -> bool:
        """Whether pools decode for it: results have a shape, and no subclass decodes otherwise."""
        return self.is_sized and type(self) is ImageDecoder

    def batch_shapes(self, count: int) -> list[tuple[int, ...]]:
        """Return the shape of each array of a batch of ``count`` images.

        Shapes are (N, 3, H, W) or (N, H, W, 3), with one channel for gray, or (N, V, 3, H, W) per
        view.

        Raises:
            ValueError: The decoder has no size.
        """
        shapes = []
        for view in self._kinds:
            if view.shape is None:
                raise ValueError("expected a size, because the images of a batch have one")
            pictures = (count, view.count) if self.views else (count,)
            shapes.append((*pictures, *native.image_shape(self.layout, view.shape, self._stored)))
        return shapes

    def begin(
        self,
        pool: Pool,
        table: Table,
        arrays: Sequence[Pixels],
        keys: Sequence[int],
        *,
        orientations: int | NDArray[np.uint8] = native.AUTO,
        keep: Any = None,
    ) -> Batch:
        """Start decoding images to one size in the threads of a pool.

        Args:
            pool: Threads that decode; pass images that they cannot decode to :meth:`__call__`.
            table: (N, P) addresses and sizes of the P pieces of each image.
            arrays: Arrays for the pixels, with the shapes of :meth:`batch_shapes`.
            keys: Random key of each image, from :func:`pcrshard.native.pool.draw_key`.
            orientations: (N,) EXIF orientation of each image; by default the one in its bytes.
            keep: Objects to keep alive while the pool decodes.

        Raises:
            ValueError: An array has another shape.
            RuntimeError: The pool is closed, or belongs to another process.
        """
        pictures = list(arrays)
        if self.views:
            pictures = [array[:, place] for array in arrays for place in range(array.shape[1])]
        return pool.decode(
            table,
            pictures,
            layout=self.layout,
            color=self._stored,
            orientations=orientations if self.upright else native.STORED,
            draws=self._draws,
            keys=keys,
            smoothing=self.smoothing,
            keep=keep,
        )

    def begin_jpegs(
        self,
        pool: Pool,
        jpegs: Sequence[Jpeg],
        keys: Sequence[int],
        arrays: Sequence[Pixels] | None = None,
    ) -> Decoded:
        """Start decoding images, in the threads of a pool if they have a fixed size.

        Args:
            pool: Threads that decode.
            jpegs: The images, each a JPEG or its pieces.
            keys: Random key of each image.
            arrays: As for :meth:`begin`; by default new arrays.

        Raises:
            TypeError: A JPEG is not bytes.
            RuntimeError: The pool is closed.
        """
        images = list(map(as_pieces, jpegs))
        decoded = Decoded(self, lambda place: self._alone(images[place], keys[place]))
        if self.is_sized:
            if arrays is None:
                arrays = [np.empty(shape, np.uint8) for shape in self.batch_shapes(len(jpegs))]
            batch = self.begin(pool, piece_table(images), arrays, keys, keep=images)
            decoded.add(batch, arrays, lambda place: self.profile_of(images[place][0]))
        return decoded

    def profile_of(self, start: Any) -> bytes | None:
        """Return the RGB profile to apply, empty for none; ``None`` if only Pillow can apply it."""
        if self.color != "srgb":
            return b""
        try:
            profile = read_profile(first_segments(start))
        except CorruptJpeg:
            return None
        return profile if profile_mode(profile) in ("", "RGB") else None

    def result(
        self,
        pictures: Sequence[Pixels],
        boxes: Boxes,
        sizes: NDArray[np.int32],
    ) -> Any:
        """Return what a call returns, from the pixels of one image, per view.

        Args:
            pictures: The pixels, one array per view.
            boxes: (1, V, 5) its boxes.
            sizes: (1, 2) its height and width.
        """
        image = pictures if self.views else pictures[0]
        if not self.return_geometry:
            return image
        return Picture(image, at_image(self.geometry(boxes, sizes), 0))

    def geometry(
        self,
        boxes: Boxes,
        sizes: NDArray[np.int32],
    ) -> Any:
        """Return the geometry of the pictures of many images.

        Args:
            boxes: (N, V, 5) boxes from a :class:`pcrshard.native.pool.Batch`.
            sizes: (N, 2) height and width of each image.

        Returns: A :class:`Geometry` of N images, or one per view.
        """
        where = Geometry.of_boxes(boxes, sizes)
        return [where.take(part) for part in self._parts] if self.views else where.take(0)

    def places(self, size: Sequence[int], key: int) -> list[list[tuple[Geometry, native.Size]]]:
        """Return the crops and flips of an image of (height, width) pixels.

        Returns:
            For each view, or the only one without views, those of its pictures, with the
            (height, width) that they have then.
        """
        boxes = draw_boxes(key, (int(size[0]), int(size[1])), self._draws)[None]
        where = Geometry.of_boxes(boxes, np.array([size], np.int32))
        found = [at_image(where.take(place), 0) for place in range(len(self._pictures))]
        sizes = [view.shape for view in self._pictures]
        each = [
            (own, shape or tuple(own.crop[2:].tolist()))
            for own, shape in zip(found, sizes, strict=True)
        ]
        return [each[part] for part in self._parts]

    def __call__(self, jpeg: Jpeg, rng: Rng = None) -> Any:
        """Decode one image.

        Args:
            jpeg: A JPEG, or its pieces, at any scan.
            rng: Source of the random crop and flip: a ``random.Random``, an integer key, such as
                from :func:`pcrshard.native.pool.draw_key`, or by default Python's ``random``.

        Returns: (3, H, W) or (H, W, 3) uint8, one channel for gray; with ``views`` a list of
            arrays, (count, 3, H, W), one per view. With ``return_geometry`` a :class:`Picture` of
            these.

        Raises:
            CorruptJpeg: It cannot be decoded.
            UnsupportedJpeg: Neither the native core nor Pillow supports it.
            TypeError: The argument is not bytes, or ``rng`` has another type.
        """
        return self.begin_jpegs(own_pool(), [jpeg], [self.key(rng)])[0]

    def key(self, rng: Rng) -> int:
        """Return the random key of an image; advance the generator only if something is random.

        Raises:
            TypeError: ``rng`` has another type.
        """
        if is_integer(rng):
            return int(rng)
        if not isinstance(rng, random.Random | None):
            raise TypeError(f"expected rng to be a random.Random, an integer or None, got {rng!r}")
        return (random if rng is None else rng).getrandbits(64) if self.is_random else 0

    def _alone(self, pieces: Sequence[Any], key: int) -> Any:
        """Decode an image that the pool cannot."""
        huffman = arithmetic_as_huffman(pieces) if self.is_sized else None
        if huffman is not None:
            return self.begin_jpegs(own_pool(), [huffman], [key])[0]
        whole = decode_image(
            pieces, color=self.color, upright=self.upright, smoothing=self.smoothing
        )
        boxes = draw_boxes(key, whole.shape[:2], self._draws)[None]
        sizes = np.array([whole.shape[:2]], np.int32)
        where = Geometry.of_boxes(boxes, sizes)
        pictures = []
        for view, crop, flipped in zip(
            self._pictures, where.crop[0].tolist(), where.flipped[0], strict=True
        ):
            image = crop_and_resize(whole, crop, view.shape)
            pictures.append(arrange(image[:, ::-1] if flipped else image, self.layout))
        if self.views:
            pictures = [np.stack(pictures[part]) for part in self._parts]
        return self.result(pictures, boxes, sizes)


class Decoded:
    """What a decoder returns for each of many images, by their positions.

    A pool decodes what it can, into arrays of all images. The others are decoded by themselves when
    they are asked for, and are then in the arrays, too.

    Args:
        image: The decoder.
        alone: Decodes the image at a position by itself; its errors are raised where the image is
            asked for.
    """

    def __init__(self, image: ImageDecoder, alone: Callable[[int], Any]) -> None:
        self.image = image
        self._alone = alone
        self.batch: Batch | None = None
        # Without a pool.
        self._results: dict[int, Any] = {}

    def add(
        self,
        batch: Batch,
        arrays: Sequence[Pixels],
        profile: Callable[[int], bytes | None],
    ) -> None:
        """Take the images from a pool.

        Args:
            batch: All images, some of which the pool may not decode.
            arrays: Those of :meth:`ImageDecoder.begin`.
            profile: With the color ``srgb``, the RGB profile of an image; ``None`` if the pool's
                pixels cannot be converted.
        """
        self.batch, self._arrays, self._profile = batch, arrays, profile

    @lazy
    def _done(self) -> list[bool]:
        """Which images are in the arrays; waits for the pool."""
        assert self.batch is not None
        done = list(self.batch.wait())
        if self.image.color == "srgb":
            for place in [place for place, is_decoded in enumerate(done) if is_decoded]:
                profile = self._profile(place)
                done[place] = profile is not None
                if profile:
                    for array in self._arrays:
                        pixels_to_srgb(array[place], profile, self.image.layout)
        return done

    def complete(self, place: int) -> None:
        """See to it that an image is decoded; raises what the decoder raises."""
        if not (place in self._results if self.batch is None else self._done[place]):
            self.put(place, self._alone(place))

    def put(self, place: int, result: Any) -> None:
        """Take the decoder's result for an image."""
        if self.batch is None:
            self._results[place] = result
            return
        image = self.image
        pixels, geometry = result if image.return_geometry else (result, None)
        for array, own in zip(self._arrays, pixels if image.views else [pixels], strict=True):
            array[place] = own
        if geometry is not None:
            parts = geometry if image.views else [geometry]
            sizes, boxes = self.batch.sizes, self.batch.boxes
            sizes[place] = parts[0].size.reshape(-1, 2)[0]
            boxes[place, :, :4] = np.concatenate([part.crop.reshape(-1, 4) for part in parts])
            boxes[place, :, 4] = np.concatenate([part.flipped.reshape(-1) for part in parts])
        self._done[place] = True

    def __getitem__(self, place: int) -> Any:
        """Return the decoder's result for an image; raises what the decoder raises."""
        self.complete(place)
        if self.batch is None:
            return self._results[place]
        own = slice(place, place + 1)
        rows = [array[place] for array in self._arrays]
        return self.image.result(rows, self.batch.boxes[own], self.batch.sizes[own])
