"""How close each scan of a dataset comes to full fidelity, and what it costs.

Bytes, MS-SSIM, PSNR and decoding time of a sample of its images. The one door to torchmetrics.
Section 6.4 of the VLDB paper takes MS-SSIM as the estimate of the accuracy that a scan group keeps.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import MissingDependency, ScanUnavailable
from ..format.dataset_index import DatasetIndex
from ..format.scan import FULL, Scan, check_scan
from ..jpeg.pixels import Pixels, decode_image
from ..reading.dataset_folder import open_dataset
from ..reading.prefix import Select
from ..reading.shard import Shard
from ..storage import Options
from .advice import (
    Quartiles,
    Recommendation,
    ScanFidelity,
    Throughput,
    fidelity_table,
    recommend,
    throughput,
)
from .costs import ScanCost, scan_costs
from .plots import Picture, plot_contact_sheet, pyplot_module

__all__ = [
    "WEIGHTS",
    "Quartiles",
    "Recommendation",
    "ScanFidelity",
    "Throughput",
    "contact_sheet",
    "count_scales",
    "fidelity_table",
    "measure",
    "msssim",
    "pick",
    "psnr",
    "recommend",
    "throughput",
]

# Weights of the five scales, from the finest on (Wang, Simoncelli, Bovik 2003).
WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
# The smaller side of an image that n scales need: 11 pixels at the coarsest, and what torchmetrics
# insists on.
_MIN_SIDES = (11, 22, 44, 99, 176)
# Torch holds some 30 float32 copies of what it compares.
_MAX_SIDE = 2048

T = TypeVar("T")
Pieces = list[memoryview]
OnImage = Callable[[int, int], None]
# A shard, and where the samples drawn are in it.
Drawn = tuple[Shard, list[int]]


def count_scales(height: int, width: int) -> int:
    """The scales of MS-SSIM that an image is large enough for, 0 to 5.

    >>> [count_scales(500, side) for side in (375, 176, 175, 99, 44, 22, 11, 10)]
    [5, 5, 4, 4, 3, 2, 1, 0]
    """
    return sum(side <= min(height, width) for side in _MIN_SIDES)


@functools.cache
def _metric() -> Any:
    try:
        import torch
        from torchmetrics.functional.image import multiscale_structural_similarity_index_measure
    except ImportError as error:
        raise MissingDependency(
            "torchmetrics is not installed: pip install 'pcrshard[train]'"
        ) from error
    return torch, multiscale_structural_similarity_index_measure


def msssim(pixels: Pixels, reference: Pixels) -> float:
    """MS-SSIM of two images, 1 for equal ones.

    Gaussian window of 11 pixels (sigma 1.5), K = (0.01, 0.03), dynamic range 255, five scales,
    means over the three channels of RGB. The papers do not say whether they took luma or RGB; in
    luma alone the chroma scans would be worth nothing. Gray images have three equal channels, which
    give what one would. Images whose smaller side is below 176 pixels have fewer scales, with the
    weights of the finest ones, scaled to a sum of 1. Of images with a side above 2048 the middle is
    compared.

    Args:
        pixels: (H, W, 3) uint8.
        reference: The same shape.

    Raises:
        MissingDependency: torch or torchmetrics is not installed.
        ValueError: The shapes differ, or a side is below 11 pixels.
    """
    if pixels.shape != reference.shape or pixels.ndim != 3:
        raise ValueError(
            f"expected two images (H, W, C) of one shape, got {pixels.shape} and {reference.shape}"
        )
    scales = count_scales(*pixels.shape[:2])
    if scales == 0:
        raise ValueError(
            f"expected sides of {_MIN_SIDES[0]} pixels or more, got {pixels.shape[:2]}"
        )
    if np.array_equal(pixels, reference):
        return 1.0
    torch, metric = _metric()
    total = sum(WEIGHTS[:scales])
    betas = tuple(weight / total for weight in WEIGHTS[:scales])
    images = (torch.from_numpy(_planes(_middle(image, _MAX_SIDE))) for image in (pixels, reference))
    with torch.inference_mode():
        # A negative mean would become a NaN by the power of its weight.
        return float(metric(*images, data_range=255.0, betas=betas, normalize="relu"))


def _planes(pixels: Pixels) -> npt.NDArray[np.float32]:
    """(H, W, C) as (1, C, H, W)."""
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None], np.float32)


def _middle(pixels: Pixels, side: int) -> Pixels:
    """The middle of an image, at most so many pixels square."""
    top, left = (max(0, length - side) // 2 for length in pixels.shape[:2])
    return pixels[top : top + side, left : left + side]


def psnr(squared_error: float) -> float:
    """Peak signal to noise in dB of a mean squared error of 8-bit pixels.

    >>> psnr(0.0), round(psnr(1.0), 2)
    (inf, 48.13)
    """
    return 10 * math.log10(255**2 / squared_error) if squared_error else math.inf


def measure(
    url: str,
    scans: Sequence[Scan] | None = None,
    *,
    num_images: int = 32,
    seed: int = 0,
    rounds: int = 3,
    max_shards: int = 8,
    storage_options: Options = None,
    on_image: OnImage | None = None,
) -> list[ScanFidelity]:
    """Measure scans on a random sample of a dataset's images.

    Reads up to ``max_shards`` whole shards but for their tails, each in one request. Takes about a
    fifth of a second of CPU time per scan and megapixel, nearly all of it for MS-SSIM.

    Args:
        url: The dataset's folder.
        scans: The scans to measure; 1 to N by default. ``"full"`` has the pixels of N.
        num_images: Number of images; those with a side below 11 pixels are not counted.
        seed: The same seed takes the same images.
        rounds: Times that an image is decoded, of which the fastest counts.
        max_shards: Most shards that are read.
        storage_options: fsspec storage options.
        on_image: Called with (done, total) after each image.

    Returns:
        The figures of each scan, in the order asked for.

    Raises:
        ScanUnavailable: There is no such scan, or the dataset is a staged copy without full
            fidelity to compare with.
        MissingDependency: torchmetrics is not installed.
        ValueError: The dataset has no image that is large enough.
        PCRError: A shard cannot be read, an image is damaged.
    """
    _metric()
    index, drawn = _draw(url, num_images, seed, max_shards, storage_options)
    wanted = range(1, index.num_groups + 1) if scans is None else scans
    stops = [check_scan(scan, index.num_groups) for scan in wanted]
    looks = _look(drawn, lambda pieces: _climb(pieces, stops, rounds), on_image)
    ladders = [rungs for rungs in looks if rungs]
    if not ladders:
        raise ValueError(
            f"expected images of {_MIN_SIDES[0]} pixels or more on each side, found none in {url}"
        )
    costs = scan_costs(index)
    return [
        _summarise(costs[stop - 1], rungs) for stop, *rungs in zip(stops, *ladders, strict=True)
    ]


class _Rung(NamedTuple):
    """What was seen of one image at one scan."""

    num_bytes: int
    msssim: float
    squared_error: float
    seconds: float
    is_small: bool


def _climb(
    pieces: Pieces,
    stops: Sequence[int],
    rounds: int,
) -> list[_Rung]:
    """Look at one image at each scan; nothing for one that is too small."""
    reference = decode_image(pieces)
    scales = count_scales(*reference.shape[:2])
    if scales == 0:
        return []
    # Round by round, so that a disturbance does not hit one scan alone.
    seconds = [[_decode_seconds(pieces[:stop]) for stop in stops] for _ in range(rounds)]
    rungs = []
    for stop, *spent in zip(stops, *seconds, strict=True):
        pixels = decode_image(pieces[:stop])
        error = float(np.square(pixels.astype(np.float32) - reference).mean())
        num_bytes = sum(map(len, pieces[:stop]))
        is_small = scales < len(WEIGHTS)
        rungs.append(_Rung(num_bytes, msssim(pixels, reference), error, min(spent), is_small))
    return rungs


def _decode_seconds(pieces: Pieces) -> float:
    begun = time.thread_time()
    decode_image(pieces)
    return time.thread_time() - begun


def _summarise(cost: ScanCost, rungs: Sequence[_Rung]) -> ScanFidelity:
    num_bytes, values, errors, seconds, is_small = zip(*rungs, strict=True)
    return ScanFidelity(
        scan=cost.scan,
        bytes_per_image=cost.bytes_per_sample,
        saving=cost.saving,
        image_bytes=_quartiles(num_bytes),
        msssim=float(np.mean(values)),
        msssim_quartiles=_quartiles(values),
        psnr=psnr(float(np.mean(errors))),
        decode_seconds=float(np.mean(seconds)),
        num_images=len(rungs),
        num_small=sum(is_small),
    )


def _quartiles(values: Sequence[float]) -> Quartiles:
    return Quartiles(*np.quantile(values, (0.25, 0.5, 0.75)).tolist())


def _draw(
    url: str,
    num_images: int,
    seed: int,
    max_shards: int,
    storage_options: Options,
) -> tuple[DatasetIndex, list[Drawn]]:
    """Open a dataset, and draw images from some of its shards."""
    index, urls = open_dataset(url, storage_options=storage_options)
    if index.scan is not None:
        raise ScanUnavailable(
            "expected full fidelity to compare with, got a staged copy of scans "
            f"1 to {index.scan} of {index.num_groups}; measure the dataset that it comes from"
        )
    sizes = [entry.num_samples for entry in index.shards]
    picked = pick(random.Random(seed), sizes, num_images, max_shards)
    drawn = [
        (Shard(urls[i], entry=index.shards[i], storage_options=storage_options), positions)
        for i, positions in picked.items()
    ]
    return index, drawn


def _look(
    drawn: list[Drawn],
    look: Callable[[Pieces], T],
    on_image: OnImage | None = None,
) -> Iterator[T]:
    """Call ``look`` with the pieces of each image drawn; of several streams, of the first one."""
    total = sum(len(positions) for _, positions in drawn)
    done = 0
    for shard, positions in drawn:
        with shard.load(shard.num_groups) as prefix:
            field = prefix.index.schema.streams[0][0]
            for sample in prefix.samples(positions, select=_only(field), decode=look):
                if field in sample:
                    yield sample[field]
                    done += 1
                    if on_image is not None:
                        on_image(done, total)


def _only(field: str) -> Select:
    return lambda _, name: name == field


def pick(
    rng: random.Random,
    sizes: Sequence[int],
    num_images: int,
    max_shards: int,
) -> dict[int, list[int]]:
    """Choose images at random from a few shards.

    Args:
        rng: Source of the random numbers.
        sizes: Samples of each shard.
        num_images: Number of images; all if there are not so many in the shards chosen.
        max_shards: Most shards to choose.

    Returns:
        For each shard chosen the positions of its samples, in order.

    >>> pick(random.Random(0), [3, 3, 3, 3], 4, 2)
    {1: [0, 1, 2], 3: [0]}
    """
    shards = rng.sample(range(len(sizes)), min(max_shards, len(sizes)))
    images = [(shard, i) for shard in sorted(shards) for i in range(sizes[shard])]
    chosen = sorted(rng.sample(images, min(num_images, len(images))))
    by_shard = itertools.groupby(chosen, key=operator.itemgetter(0))
    return {shard: [i for _, i in group] for shard, group in by_shard}


def contact_sheet(
    url: str,
    path: str,
    scans: Sequence[Scan] | None = None,
    *,
    num_images: int = 3,
    seed: int = 0,
    side: int = 224,
    storage_options: Options = None,
) -> None:
    """Draw random images at each scan side by side, with their differences to full fidelity below.

    Args:
        url: The dataset's folder.
        path: Target file, a PNG.
        scans: The scans shown before ``"full"``; by default up to five from 1 to N.
        num_images: Number of images.
        seed: The same seed takes the same images.
        side: The middle of each image is shown, at most so many pixels square.
        storage_options: fsspec storage options.

    Raises:
        MissingDependency: matplotlib or torchmetrics is not installed.
        PCRError: As for :func:`measure`.
    """
    pyplot_module()
    index, drawn = _draw(url, num_images, seed, num_images, storage_options)
    last = index.num_groups
    spread = sorted({round(1 + i * (last - 1) / 4) for i in range(5)})
    columns = [*(spread if scans is None else scans), FULL]
    stops = [check_scan(scan, last) for scan in columns]

    def draw_row(pieces: Pieces) -> list[Picture]:
        reference = decode_image(pieces)
        return [
            _picture(scan, pieces[:stop], reference, side)
            for scan, stop in zip(columns, stops, strict=True)
        ]

    title = (
        f"script {index.script}: "
        "middle of each image, and four times its difference to full fidelity"
    )
    plot_contact_sheet(list(_look(drawn, draw_row)), path, title=title)


def _picture(
    scan: Scan,
    pieces: Pieces,
    reference: Pixels,
    side: int,
) -> Picture:
    pixels = decode_image(pieces)
    is_comparable = count_scales(*pixels.shape[:2]) > 0
    value = msssim(pixels, reference) if is_comparable else math.nan
    return Picture(scan, sum(map(len, pieces)), value, _middle(pixels, side))
