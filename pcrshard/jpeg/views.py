"""Several pictures of one image, and where in the image each was taken from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..arguments import Positive, check_fields
from ..native import Size
from ..native.pool import Boxes, Interval

# How a crop is chosen; None is the whole image.
Crop = Literal["random", "center"] | None
# A side, or (height, width); None is the image's own size.
Side = Annotated[
    Positive | tuple[Positive, Positive] | None, "a size such as 224 or (height, width), or None"
]


@dataclass(frozen=True)
class View:
    """Pictures of one kind that an image gives, as DINO, SwAV and SimCLR take them.

    Attributes:
        size: Side, or (height, width).
        count: How many.
        scale: Range of a random crop's share of the area.
        ratio: Range of a random crop's width over its height.
        crop: ``random``, ``center`` or ``None``, as for :class:`pcrshard.ImageDecoder`.
    """

    size: Side
    count: Positive = 1
    scale: Interval = (0.08, 1.0)
    ratio: Interval = (3 / 4, 4 / 3)
    crop: Crop = "random"

    def __post_init__(self) -> None:
        check_fields(self)
        for name, (low, high), most in (
            ("scale", self.scale, 1.0),
            ("ratio", self.ratio, math.inf),
        ):
            if not 0 < low <= high <= most:
                raise ValueError(
                    f"expected {name} to be (low, high) with 0 < low <= high <= {most:g}, "
                    f"got {(low, high)}"
                )

    @property
    def shape(self) -> Size | None:
        """(height, width), if it is fixed."""
        if self.size is None:
            return None
        height, width = self.size if isinstance(self.size, Sequence) else (self.size, self.size)
        return int(height), int(width)


class Geometry(NamedTuple):
    """Where in the image the pixels are from, so that boxes and masks can follow them.

    Of one picture the shapes are these; of V pictures of a View, and of N images of a batch, there
    are dimensions before them: (N, V, 4), (N, V) and (N, V, 2).

    Attributes:
        crop: (4,) int64, (y, x, height, width) in pixels of the image, which is upright unless the
            decoder has ``upright=False``.
        flipped: () bool, whether the crop is mirrored, left for right.
        size: (2,) int64, height and width of the image.
    """

    crop: Any
    flipped: Any
    size: Any

    @classmethod
    def of_boxes(
        cls,
        boxes: Boxes | None,
        sizes: NDArray[np.int32],
        count: int,
    ) -> Self:
        """Of ``count`` pictures of each of N images, from (N, count, 5) of crop and flip."""
        size = np.repeat(sizes.astype(np.int64)[:, None], count, axis=1)
        crop = np.concatenate([np.zeros_like(size), size], axis=2)
        if boxes is None:
            return cls(crop, np.zeros(crop.shape[:2], bool), size)
        # A crop of no pixels stands for the whole image.
        drawn = boxes[..., 2:3] > 0
        return cls(np.where(drawn, boxes[..., :4], crop), boxes[..., 4] > 0, size)

    def take(self, which: int | slice) -> Geometry:
        """Of some of the pictures of each of N images."""
        return Geometry(*(part[:, which] for part in self))


def at_image(geometry: Any, place: int) -> Any:
    """The geometry of one image of several."""
    if isinstance(geometry, Geometry):
        return Geometry(*(np.asarray(part[place]) for part in geometry))
    return [at_image(each, place) for each in geometry]


def geometry_field(name: str) -> str:
    """The field of a sample that has the geometry of the image in another."""
    return f"{name}.geometry"


class Picture(NamedTuple):
    """What a decoder with ``return_geometry`` gives: pixels, and where they are from."""

    pixels: Any
    geometry: Any


def unfold(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample with each :class:`Picture` of it as two fields: its pixels and its geometry."""
    fields: dict[str, Any] = {}
    for name, value in sample.items():
        if isinstance(value, Picture):
            fields[name] = value.pixels
            fields[geometry_field(name)] = value.geometry
        elif isinstance(value, list) and all(isinstance(each, Picture) for each in value):
            fields[name] = [each.pixels for each in value]
            fields[geometry_field(name)] = [each.geometry for each in value]
        else:
            fields[name] = value
    return fields
