"""Advice on the scan script of a finished dataset."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from .. import storage
from ..format.dataset_index import DatasetIndex
from ..format.names import is_jpeg_field
from ..format.scan_script import STANDARD
from ..jpeg.quality import HIGH_QUALITY, estimate_quality
from ..reading.shard import Shard

_SAMPLES = 32


def advise_script(
    index: DatasetIndex,
    urls: Sequence[str],
    *,
    storage_options: storage.Options = None,
) -> str:
    """Return the benefit of a better scan script for a dataset; empty if there is none.

    Reads scan 1 of the first shard.
    """
    if index.script != STANDARD.name:
        return ""
    shard = Shard(urls[0], entry=index.shards[0], storage_options=storage_options)
    images = (
        image
        for sample in itertools.islice(shard.samples(1), _SAMPLES)
        for field, image in sample.items()
        if is_jpeg_field(field) and isinstance(image, bytes)
    )
    found = [quality for quality in map(estimate_quality, images) if quality]
    quality = statistics.median(found) if found else 0
    if quality < HIGH_QUALITY:
        return ""
    return (
        f"these images have JPEG quality {quality:.0f}: with --script q95 (or auto) such images "
        "reach MS-SSIM 0.95 with 0.16 of their bytes instead of 0.44, and on ImageNet photographs "
        "a classifier reached 83.5 % top-1 at 23 kB per image instead of 72 % at 20 kB"
    )
