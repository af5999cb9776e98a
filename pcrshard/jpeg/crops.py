"""Which part of an image to decode: the usual crops, as pure functions of the image's size."""

from __future__ import annotations

import math
import random
from typing import Literal

# Height and width in pixels.
Size = tuple[int, int]
Box = tuple[int, int, int, int]
Interval = tuple[float, float]
# How a crop is chosen; None is the whole image.
Crop = Literal["random", "center"] | None
_MASK = (1 << 64) - 1


class Draws:
    """A few draws that belong to a key, such as (seed, epoch, sample).

    SplitMix64 (Steele, Lea, Flood 2014). One is made for every sample: to seed a ``random.Random``
    costs more than all draws of a crop. The native core draws the same of ``state``:
    :func:`pcrshard.native.pool.draw_boxes`.

    >>> Draws(0, 1, 2).randint(1, 6) == Draws(0, 1, 2).randint(1, 6)
    True
    """

    __slots__ = ("state",)

    def __init__(self, *key: int) -> None:
        self.state = 0
        for part in key:
            self.state = _mix(self.state + part)

    def random(self) -> float:
        """In [0, 1), 53 bits."""
        self.state = (self.state + 0x9E3779B97F4A7C15) & _MASK
        return (_mix(self.state) >> 11) * 2.0**-53

    def uniform(self, a: float, b: float) -> float:
        """From ``a`` to ``b``."""
        return a + (b - a) * self.random()

    def randint(self, a: int, b: int) -> int:
        """From ``a`` to ``b``, both included; of less than 2^32 numbers."""
        return a + int((b - a + 1) * self.random())


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK
    return z ^ z >> 31


# What crops and flips draw from.
Rng = random.Random | Draws


def random_resized_crop(
    rng: Rng,
    height: int,
    width: int,
    *,
    scale: Interval = (0.08, 1.0),
    ratio: Interval = (3 / 4, 4 / 3),
) -> Box:
    """A random part of random area and shape (Szegedy et al. 2015), as torchvision draws it.

    Ten tries, then the largest middle part of a shape in the range.

    Args:
        rng: Where the numbers come from; the caller's seed decides.
        height: Height of the image in pixels.
        width: Width of the image in pixels.
        scale: Range of the part's share of the area.
        ratio: Range of the part's width over its height.

    Returns:
        (y, x, height, width) within the image.

    >>> random_resized_crop(Draws(0), 375, 500)
    (6, 87, 330, 389)
    """
    shapes = (math.log(ratio[0]), math.log(ratio[1]))
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        shape = math.exp(rng.uniform(*shapes))
        part_width = round(math.sqrt(area * shape))
        part_height = round(math.sqrt(area / shape))
        if 0 < part_width <= width and 0 < part_height <= height:
            y = rng.randint(0, height - part_height)
            x = rng.randint(0, width - part_width)
            return y, x, part_height, part_width

    return _largest_part(height, width, ratio)


def _largest_part(
    height: int,
    width: int,
    ratio: Interval,
) -> Box:
    low, high = ratio
    shape = min(max(width / height, low), high)
    part_height = min(height, round(width / shape))
    part_width = min(width, round(height * shape))
    return _middle(height, width, part_height, part_width)


def center_crop(
    height: int,
    width: int,
    *,
    fraction: float = 0.875,
) -> Box:
    """The middle square whose side is a fraction of the shorter side.

    0.875 is ``Resize(256)`` then ``CenterCrop(224)``.

    >>> center_crop(375, 500)
    (23, 86, 328, 328)
    """
    side = max(1, round(min(height, width) * fraction))
    return _middle(height, width, side, side)


def _middle(
    height: int,
    width: int,
    part_height: int,
    part_width: int,
) -> Box:
    y = (height - part_height) // 2
    x = (width - part_width) // 2
    return y, x, max(part_height, 1), max(part_width, 1)
