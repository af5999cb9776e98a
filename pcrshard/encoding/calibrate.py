"""What a sample of a source decides before it is encoded: scan script, slopes, similarities."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice
from typing import NamedTuple, TypeVar

import numpy as np

from ..cpus import usable_cpus
from ..errors import EncodeError, FormatError
from ..format.levels import LEVELS, Levels
from ..format.scan_script import Q95, STANDARD, ScanScript
from ..format.shard_format import AUTO, SCRIPTS, ShardFormat
from ..jpeg.quality import HIGH_QUALITY, estimate_quality
from .encode_jpeg import measure_scans, similarities
from .levels import MeasuredScans, choose_slopes

_T = TypeVar("_T")
Similarity = tuple[tuple[float, float], ...]
# Images that the script and the similarities are from, and that are in memory at a time.
SAMPLE = 64
# Of a source, so that reading images twice costs little; and the most.
_SHARE = 0.01
_MOST = 1000


class Calibration(NamedTuple):
    """What a sample decided.

    Attributes:
        script: The scan script or the levels of the dataset.
        similarity: For each scan group, the estimated MS-SSIM of its prefix: mean over the sample,
            and 5th percentile. Empty if nothing could be estimated.
    """

    script: ScanScript | Levels
    similarity: Similarity = ()

    @property
    def levels(self) -> Levels | None:
        """The levels, if the dataset has some."""
        return self.script if isinstance(self.script, Levels) else None


def draw_sample(count: int) -> list[int]:
    """Return the samples of a source to look at, always the same ones, in random order.

    >>> [len(draw_sample(count)) for count in (10, 1_000, 10_000, 1_281_167)]
    [10, 64, 100, 1000]
    """
    size = min(count, max(SAMPLE, min(_MOST, int(count * _SHARE))))
    return random.Random(0).sample(range(count), size)


def calibrate(fmt: ShardFormat, jpegs: Iterable[bytes]) -> Calibration:
    """Decide what divides the images of a dataset, and estimate what each group shows of them.

    Args:
        fmt: The format, which may leave the script to the images.
        jpegs: Files in random order; what is no JPEG, or cannot be divided, is left out.

    Raises:
        EncodeError: Levels are asked for, and too few images can be divided, or they are too alike.
    """
    files = iter(jpegs)
    first = list(islice(files, SAMPLE))
    script = fmt.script
    if isinstance(script, str):
        qualities = filter(None, map(estimate_quality, first)) if script not in SCRIPTS else ()
        is_high = statistics.median([*qualities] or [0]) >= HIGH_QUALITY
        script = SCRIPTS.get(script, Q95 if is_high else STANDARD)
    # A script is the better guess by a few images.
    wants_levels = fmt.script == LEVELS or (fmt.script == AUTO and len(first) == SAMPLE)
    if wants_levels and isinstance(script, ScanScript):
        try:
            script = _find_levels(fmt, script, chain(first, files))
        except EncodeError:
            if fmt.script == LEVELS:
                raise
    final = script
    rows = np.array(_of_each(lambda jpeg: similarities(jpeg, final), first))
    if not len(rows):
        return Calibration(script)
    figures = np.stack([rows.mean(0), np.quantile(rows, 0.05, axis=0)], 1).round(4)
    return Calibration(script, tuple(map(tuple, figures.tolist())))


def _find_levels(fmt: ShardFormat, base: ScanScript, jpegs: Iterator[bytes]) -> Levels:
    """Return levels that take the shares of the bytes that the format says.

    Raises:
        EncodeError: Too few images can be divided, or they are too alike.
    """
    found: list[MeasuredScans] = []
    while some := list(islice(jpegs, SAMPLE)):
        found += _of_each(lambda jpeg: measure_scans(jpeg, base, fmt.train_size), some)
    if len(found) < fmt.num_groups:
        raise EncodeError(
            f"expected at least {fmt.num_groups} images that can be divided into scans, one for "
            f"each level, got {len(found)}: use --script {base.name}, or --levels-of with a "
            "dataset that has levels"
        )
    slopes = choose_slopes(found, fmt.num_groups, fmt.level_shares)
    return Levels(base, slopes, fmt.train_size)


def _of_each(function: Callable[[bytes], _T], jpegs: Iterable[bytes]) -> list[_T]:
    """Return what a function gives for each image that can be divided."""

    def call(jpeg: bytes) -> list[_T]:
        with suppress(FormatError):
            return [function(jpeg)]
        return []

    cpus = usable_cpus()
    with ThreadPoolExecutor(cpus) as threads:
        found = threads.map(call, jpegs) if cpus > 1 else map(call, jpegs)
        return [each for some in found for each in some]
