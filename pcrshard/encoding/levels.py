"""Where each image is cut: scan groups by slope, from sizes and losses of its scans.

Pure functions. A loss is 0 for a whole image, and at most 1: :class:`pcrshard.native.LossWeights`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import EncodeError
from ..jpeg.markers import Frame
from ..jpeg.pixels import LossWeights

# Of the scales of MS-SSIM, finest first (Wang, Simoncelli, Bovik 2003), without the first, which
# weighs 0.04.
_MSSSIM_SCALES = (0.0, 0.2990, 0.3142, 0.2473, 0.1395)
# What classifiers look at in photographs of some 400 x 500 pixels: half of the size and a quarter.
_SCALES = (0.0, 0.5, 0.5)
_MOST_SCALES = 9
# Weights of Cb and Cr: the same similarity for the fewest bytes in all sets of photographs; and to
# follow MS-SSIM, which looks at RGB.
_CHROMA = 0.6
_RGB_CHROMA = 1.0


def loss_weights(frame: Frame, color: str, train_size: int) -> LossWeights:
    """Return what counts as loss of an image.

    Args:
        frame: The image's frame.
        color: Its color space.
        train_size: Side in pixels at which networks see images, 0 if unknown. Half of the loss is
            at the scale at which the image is a little smaller, half at half of that.
    """
    scales: list[float] = [*_SCALES]
    if train_size:
        # As half and a quarter of the size are for 224 pixels of photographs of 400.
        halvings = math.log2(max(min(frame.height, frame.width) / train_size, 1)) + 0.25
        below = min(int(halvings), _MOST_SCALES - 3)
        rest = min(halvings - below, 1.0)
        scales = [0.0] * below + [1 - rest, 1.0, rest]
        scales = [weight / 2 for weight in scales]
    return LossWeights(_components(frame, color, _CHROMA), _padded(scales))


def similarity_weights(frame: Frame, color: str) -> LossWeights:
    """Return weights of a loss that follows MS-SSIM, see :func:`similarity`."""
    return LossWeights(_components(frame, color, _RGB_CHROMA), _padded(_MSSSIM_SCALES))


def similarity(loss: float) -> float:
    """Return the MS-SSIM that goes with a loss by :func:`similarity_weights`.

    Fitted to all scans of 541 photographs by two scripts; off by 0.005 on average.
    """
    return max(1 - 1.15 * loss - 5.2 * loss * loss, 0.0)


def _components(frame: Frame, color: str, chroma: float) -> tuple[float, ...]:
    count = len(frame.components)
    return (1.0, chroma, chroma) if color == "ycc" else (1 / count,) * count


def _padded(scales: Sequence[float]) -> tuple[float, ...]:
    return (*scales, *[0.0] * (_MOST_SCALES - len(scales)))


class MeasuredScans(NamedTuple):
    """What is known of the scans of an image.

    Attributes:
        sizes: Bytes of the prefix up to each scan, (scans,) float64, rising.
        losses: Loss of the image at it, (scans,) float64.
        first: Scans that every level has: until all components have begun.
    """

    sizes: NDArray[np.float64]
    losses: NDArray[np.float64]
    first: int

    @classmethod
    def of(cls, sizes: Sequence[int], losses: Sequence[float], first: int) -> MeasuredScans:
        """Return what is known of an image whose last scan loses nothing."""
        exact = np.array([*losses[:-1], 0.0])
        return cls(np.array(sizes, np.float64), exact, first)


def count_scans(image: MeasuredScans, slopes: Sequence[float]) -> NDArray[np.int64]:
    """Return the scans of an image at each level, (levels,) int64, at least ``first``, rising.

    At each level the sum of the loss and the slope's price of the bytes is least, so that no level
    ends where a straight line between other prefixes passes below.

    >>> image = MeasuredScans.of([10, 20, 90], [0.5, 0.1, 0.0], 1)
    >>> count_scans(image, (0.1, 0.01, 0.0)).tolist()
    [1, 2, 3]
    """
    first = image.first - 1
    price = np.array(slopes)[:, None] * image.sizes[first:]
    # The last one costs nothing, so that all scans are in it, whatever they add.
    stops = (image.losses[first:] + price)[:-1].argmin(1) + image.first
    return np.maximum.accumulate(np.append(stops, len(image.sizes)))


def group_by_slope(image: MeasuredScans, slopes: Sequence[float]) -> list[int]:
    """Return the level, 1..K, of each scan of an image, rising."""
    numbers = np.arange(1, len(image.sizes) + 1)
    return [int(level) + 1 for level in np.searchsorted(count_scans(image, slopes), numbers)]


def default_shares(lowest: float, num_levels: int) -> list[float]:
    """Return a geometric ladder of shares of the full bytes, from 5 % or ``lowest``, to 1.

    >>> [round(share, 2) for share in default_shares(0.0, 4)]
    [0.05, 0.14, 0.37, 1.0]
    """
    begin = min(max(0.05, lowest * 1.02), 0.5)
    steps = range(num_levels)
    return [begin ** (1 - step / max(num_levels - 1, 1)) for step in steps]


def choose_slopes(
    images: Sequence[MeasuredScans], num_levels: int, shares: Sequence[float] = ()
) -> tuple[float, ...]:
    """Return slopes at which the levels take shares of the bytes of a sample of images.

    Args:
        images: The sample.
        num_levels: Number of levels K.
        shares: Share of the full bytes at each level, rising to 1; default: a geometric ladder.

    Raises:
        EncodeError: The sample cannot be cut at these shares.
    """
    # Where an image has fewer scans than others, its last one is repeated.
    most = max(len(image.sizes) for image in images)
    sizes = np.array([np.pad(i.sizes, (0, most - len(i.sizes)), "edge") for i in images])
    losses = np.array([np.pad(i.losses, (0, most - len(i.losses)), "edge") for i in images])
    for row, image in zip(losses, images, strict=True):
        row[: image.first - 1] = math.inf

    def share_at(slope: float) -> float:
        stops = (losses + slope * sizes).argmin(1)
        return float(np.take_along_axis(sizes, stops[:, None], 1).sum() / sizes[:, -1].sum())

    lowest = share_at(1.0)
    shares = shares or default_shares(lowest, num_levels)
    if shares[0] < lowest:
        raise EncodeError(
            f"expected a first level of at least {lowest:.3f} of the bytes, which the first scan "
            f"of these images takes, got {shares[0]}"
        )
    slopes = []
    for share in shares[:-1]:
        # Losses are at most 1, and bytes are many.
        low, high = 1e-15, 1.0
        for _ in range(60):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if share_at(middle) <= share else (middle, high)
        slopes.append(float(f"{high:.5g}"))
    if sorted(set(slopes), reverse=True) != slopes:
        raise EncodeError(
            f"expected images that differ at {num_levels} levels, "
            f"got slopes {slopes}: use fewer levels, or --script standard"
        )
    return (*slopes, 0.0)
