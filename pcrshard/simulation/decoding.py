"""Decoding cost on this machine, used as the cost per core of a simulated cluster."""

from __future__ import annotations

import itertools
import time

from ..format.scan import Scan
from ..jpeg.image_decoder import ImageDecoder
from ..reading.shard import Shard

_SIDE = 224


def image_seconds(
    shard: Shard,
    scan: Scan,
    *,
    field: str = "jpg",
    num_images: int = 32,
) -> float:
    """Return the mean CPU seconds to decode an image of a shard to a random 224 x 224 crop.

    Each sampled image is decoded three times; the fastest counts.
    """
    decoder = ImageDecoder(_SIDE, "random")
    seconds: list[float] = []
    for number, sample in enumerate(itertools.islice(shard.samples(scan), num_images)):
        if field in sample:
            times = [_seconds(decoder, sample[field], number) for _ in range(3)]
            seconds.append(min(times))
    return sum(seconds) / max(len(seconds), 1)


def _seconds(decoder: ImageDecoder, jpeg: bytes, number: int) -> float:
    begun = time.thread_time()
    decoder(jpeg, number)
    return time.thread_time() - begun
