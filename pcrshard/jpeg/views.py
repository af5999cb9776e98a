"""Several pictures of one image, and the location of each in the image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..arguments import Positive, check_fields
from ..native import Size
from ..native.pool import Boxes, Interval

# The ranges of RandomResizedCrop.
SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
# Kind of crop; None is the whole image.
Crop = Literal["random", "center"] | None
# A side, or (height, width); None is the image's own size.
Side = Annotated[
    Positive | tuple[Positive, Positive] | None, "a size such as 224 or (height, width), or None"
]


@dataclass(frozen=True)
class View:
    """One kind of picture to take from each image, as in DINO, SwAV and SimCLR.

    Attributes:
        size: Side, or (height, width).
        count: Number of pictures.
        scale: Range of a random crop's fraction of the area.
        ratio: Range of a random crop's aspect ratio, width over height.
        crop: ``random``, ``center`` or ``None``, as for :class:`pcrshard.ImageDecoder`.

    Raises:
        TypeError: A value has another type.
        ValueError: A value is out of range, or two options conflict.
    """

    size: Side
    count: Positive = 1
    scale: Interval = SCALE
    ratio: Interval = RATIO
    crop: Crop = "random"

    def __post_init__(self) -> None:
        check_fields(self)
        for name, most in (("scale", 1.0), ("ratio", math.inf)):
            low, high = getattr(self, name)
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
    """The location of a picture in its image, for transforming boxes and masks.

    Shapes are for one picture; V pictures of a View and N images of a batch add leading dimensions:
    (N, V, 4), (N, V) and (N, V, 2).

    Attributes:
        crop: (4,) int64, (y, x, height, width) in pixels of the image, which is upright unless the
            decoder has ``upright=False``.
        flipped: () bool, whether the crop is flipped horizontally.
        size: (2,) int64, height and width of the image.
    """

    crop: Any
    flipped: Any
    size: Any

    @classmethod
    def of_boxes(
        cls,
        boxes: Boxes,
        sizes: NDArray[np.int32],
    ) -> Self:
        """Return the geometry of (N, V, 5) crops and flips of N images."""
        size = np.repeat(sizes.astype(np.int64)[:, None], boxes.shape[1], axis=1)
        crop = np.concatenate([np.zeros_like(size), size], axis=2)
        # An empty crop stands for the whole image.
        drawn = boxes[..., 2:3] > 0
        return cls(np.where(drawn, boxes[..., :4], crop), boxes[..., 4] > 0, size)

    def take(self, which: int | slice) -> Geometry:
        """Return the geometry of some pictures of each of N images."""
        return Geometry(*(part[:, which] for part in self))


def at_image(geometry: Any, place: int) -> Any:
    """Return the geometry of one image of several."""
    if isinstance(geometry, Geometry):
        return Geometry(*(np.asarray(part[place]) for part in geometry))
    return [at_image(each, place) for each in geometry]


class Picture(NamedTuple):
    """The result of a decoder with ``return_geometry``: pixels and their location."""

    pixels: Any
    geometry: Any
