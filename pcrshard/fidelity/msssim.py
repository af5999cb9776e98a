"""MS-SSIM against a reference (Wang, Simoncelli, Bovik 2003). The only importer of OpenCV.

Section 6.4 of the VLDB paper uses MS-SSIM to estimate the accuracy that a scan group preserves.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MissingDependency
from ..jpeg.other_formats import Pixels

Plane = NDArray[np.float32]
# The reference, its means and its variances in the window, each (H, W, C).
Scale = tuple[Plane, Plane, Plane]

# Weights of the five scales, finest first.
WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
# Minimum shorter side for n scales: 11 pixels, one window, at the coarsest scale.
_MIN_SIDES = (11, 22, 44, 99, 176)
# Only the middle of larger images is compared: as informative, with bounded memory.
_MAX_SIDE = 2048
_WINDOW = 11
_SIGMA = 1.5
_C1 = (0.01 * 255) ** 2
_C2 = (0.03 * 255) ** 2


def count_scales(height: int, width: int) -> int:
    """Return the number of MS-SSIM scales that an image is large enough for, 0 to 5.

    >>> [count_scales(500, side) for side in (375, 176, 175, 99, 44, 22, 11, 10)]
    [5, 5, 4, 4, 3, 2, 1, 0]
    """
    return sum(side <= min(height, width) for side in _MIN_SIDES)


class Reference:
    """The picture that others are compared with, with its statistics computed once.

    Gaussian window of 11 pixels (sigma 1.5), K = (0.01, 0.03), dynamic range 255, five scales,
    means over the three RGB channels. The papers do not say whether they used luma or RGB; in luma
    alone the chroma scans would have no effect. Gray images have three equal channels, which give
    the same result as one. Images whose shorter side is below 176 pixels use fewer scales, with the
    weights of the finest scales normalized to a sum of 1. Images with a side above 2048 are
    compared by their center.

    Args:
        pixels: (H, W, C) uint8.

    Attributes:
        pixels: The picture.

    Raises:
        MissingDependency: OpenCV is not installed.
        ValueError: A side is below 11 pixels.
    """

    def __init__(self, pixels: Pixels) -> None:
        count = count_scales(*pixels.shape[:2])
        if count == 0:
            least = _MIN_SIDES[0]
            raise ValueError(f"expected sides of {least} pixels or more, got {pixels.shape[:2]}")
        self.pixels = pixels
        weights = np.array(WEIGHTS[:count])
        self._weights = weights / weights.sum()
        self._scales = [
            (picture, mean := _blur(picture), _blur(picture * picture) - mean * mean)
            for picture in islice(_pyramid(pixels), count)
        ]

    def compare(self, pixels: Pixels) -> float:
        """Return the MS-SSIM of another picture of the same size, 1 if it is equal.

        Args:
            pixels: (H, W, C) uint8.
        """
        if np.array_equal(pixels, self.pixels):
            return 1.0
        result = 1.0
        pictures = islice(_pyramid(pixels), len(self._scales))
        for picture, scale, weight in zip(pictures, self._scales, self._weights, strict=True):
            is_coarsest = scale is self._scales[-1]
            # Raising a negative mean to its weight would give NaN.
            result *= max(_similarity(picture, scale, with_luminance=is_coarsest), 0.0) ** weight
        return float(result)


def _similarity(picture: Plane, scale: Scale, *, with_luminance: bool) -> float:
    """Return the mean of contrast times structure, and times luminance at the coarsest scale.

    Works in place, because page faults on new memory would dominate.
    """
    reference, reference_mean, variance = scale
    mean = _blur(picture)
    similarity = _blur(picture * reference)
    similarity -= mean * reference_mean
    similarity *= 2
    similarity += _C2
    contrasts = _blur(picture * picture)
    contrasts -= mean * mean
    contrasts += variance
    contrasts += _C2
    similarity /= contrasts
    if with_luminance:
        squares = mean * mean + reference_mean * reference_mean
        similarity *= (2 * mean * reference_mean + _C1) / (squares + _C1)
    # Keep only positions where the window lies inside the picture.
    margin = _WINDOW // 2
    return float(similarity[margin:-margin, margin:-margin].mean())


def middle(pixels: Pixels, side: int) -> Pixels:
    """Return the center crop of an image, at most ``side`` pixels square."""
    top, left = (max(0, length - side) // 2 for length in pixels.shape[:2])
    return pixels[top : top + side, left : left + side]


@cache
def require_opencv() -> Any:
    """Return the ``cv2`` module, limited to the calling thread.

    Raises:
        MissingDependency: OpenCV is not installed.
    """
    try:
        import cv2
    except ImportError as error:
        message = "OpenCV is not installed: pip install 'pcrshard[fidelity]'"
        raise MissingDependency(message) from error
    cv2.setNumThreads(1)  # its threads would count toward our CPU time
    return cv2


def _blur(picture: Plane) -> Plane:
    """Return means over the Gaussian window, invalid within 5 pixels of the borders."""
    size = (_WINDOW, _WINDOW)
    blurred: Plane = require_opencv().GaussianBlur(picture, size, _SIGMA)
    return blurred.reshape(picture.shape)


def _pyramid(pixels: Pixels) -> Iterator[Plane]:
    """Yield a picture at each scale, finest first, lazily.

    Each scale has the means of 2 x 2 pixels of the one before, without an odd last row or column.
    """
    picture = middle(pixels, _MAX_SIDE).astype(np.float32)
    while True:
        yield picture
        height, width = (side // 2 for side in picture.shape[:2])
        even = picture[: 2 * height, : 2 * width]
        cv2 = require_opencv()
        picture = cv2.resize(even, (width, height), interpolation=cv2.INTER_AREA)
        picture = picture.reshape(height, width, -1)
