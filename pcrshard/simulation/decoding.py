"""Decoding cost on this machine, used as the cost per core of a simulated cluster."""

from __future__ import annotations

import itertools
import time
import timeit

from ..format.scan import Scan
from ..jpeg.image_decoder import ImageDecoder
from ..reading.shard import Shard

_IMAGES = 32


def image_seconds(shard: Shard, scan: Scan) -> float:
    """Return the mean CPU seconds to decode a ``jpg`` of a shard to a random 224 x 224 crop.

    The first images are decoded three times; the fastest time counts.
    """
    samples = itertools.islice(shard.samples(scan), _IMAGES)
    jpegs = [sample["jpg"] for sample in samples if "jpg" in sample]
    decoder = ImageDecoder(224, "random")

    def decode() -> None:
        for number, jpeg in enumerate(jpegs):
            decoder(jpeg, number)

    seconds = timeit.repeat(decode, number=1, repeat=3, timer=time.thread_time)
    return min(seconds) / max(len(jpegs), 1)
