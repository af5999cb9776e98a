"""Which part of an image to decode: the usual crops, as pure functions of the image's size."""

from __future__ import annotations

import math
from typing import Protocol

Box = tuple[int, int, int, int]
_MASK = (1 << 64) - 1


class Rng(Protocol):
    """What crops and flips draw from: ``random.Random``, or :class:`Draws`."""

    def random(self) -> float:
        """In [0, 1)."""

    def uniform(self, a: float, b: float) -> float:
        """From ``a`` to ``b``."""

    def randint(self, a: int, b: int) -> int:
        """From ``a`` to ``b``, both included."""


class Draws:
    """A few draws that belong to a key, such as (seed, epoch, sample).

    SplitMix64 (Steele, Lea, Flood 2014). Made for every sample: to seed a ``random.Random`` costs more than all draws of a crop.

    >>> Draws(0, 1, 2).randint(1, 6) == Draws(0, 1, 2).randint(1, 6)
    True
    """

    __slots__ = ("_state",)

    def __init__(self, *key: int) -> None:
        self._state = 0
        for part in key:
            self._state = _mix(self._state + part)

    def random(self) -> float:
        """In [0, 1), 53 bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        return (_mix(self._state) >> 11) * 2.0**-53

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


def random_resized_crop(
    rng: Rng,
    height: int,
    width: int,
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Box:
    """A random part of random area and shape (Szegedy et al. 2015), with torchvision's ten tries and its fallback.

    Args:
        rng: Drawn from; the caller's seed decides.
        height: Of the image, in pixels.
        width: Of the image, in pixels.
        scale: Range of the part's share of the area.
        ratio: Range of the part's width over its height.

    Returns:
        (y, x, height, width) within the image.

    >>> random_resized_crop(Draws(0), 375, 500)
    (6, 87, 330, 389)
    """
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        shape = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < w <= width and 0 < h <= height:
            return rng.randint(0, height - h), rng.randint(0, width - w), h, w
    shape = min(max(width / height, ratio[0]), ratio[1])
    h, w = min(height, round(width / shape)), min(width, round(height * shape))
    return (height - h) // 2, (width - w) // 2, max(h, 1), max(w, 1)


def center_crop(height: int, width: int, *, fraction: float = 0.875) -> Box:
    """The middle square whose side is a fraction of the shorter side; 0.875 is ``Resize(256)`` then ``CenterCrop(224)``.

    >>> center_crop(375, 500)
    (23, 86, 328, 328)
    """
    side = max(1, round(min(height, width) * fraction))
    return (height - side) // 2, (width - side) // 2, side, side
