"""Which part of an image to decode: the usual crops, as pure functions of the image's size."""

from __future__ import annotations

import math
import random

Box = tuple[int, int, int, int]


def random_resized_crop(
    rng: random.Random,
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

    >>> random_resized_crop(random.Random(0), 375, 500)
    (3, 5, 372, 432)
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
