"""What each scan costs, and how close it comes to full fidelity: bytes, MS-SSIM, PSNR and decoding time of a sample of images.

The one door to torchmetrics. Section 6.4 of the VLDB paper takes MS-SSIM as the estimate of the accuracy that a scan group keeps.
"""

from __future__ import annotations

import functools
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import MissingDependency, ScanUnavailable
from ..format.dataset_index import DatasetIndex
from ..format.scan import FULL, Scan, check_scan
from ..jpeg.crops import Box
from ..jpeg.pixels import Pixels, decode_image
from ..reading.dataset_folder import open_dataset
from ..reading.prefix import Sample
from ..reading.shard import Shard
from ..storage.files import Options
from .costs import human_bytes, table
from .plots import Picture, plot_contact_sheet, pyplot_module

# Of the five scales, from the finest on (Wang, Simoncelli, Bovik 2003).
WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
# The smaller side of an image that n scales need: 11 pixels at the coarsest, and what torchmetrics insists on.
_MIN_SIDES = (11, 22, 44, 99, 176)
# Torch holds some 30 float32 copies of what it compares.
_MAX_SIDE = 2048
_ENOUGH = 0.95

T = TypeVar("T")
Pieces = list[memoryview]
OnImage = Callable[[int, int], None]


class Quartiles(NamedTuple):
    """First quartile, median, third quartile."""

    q1: float
    median: float
    q3: float


class ScanFidelity(NamedTuple):
    """One scan of a dataset.

    Attributes:
        scan: The scan.
        bytes_per_image: What a reader at this scan moves, per sample of the whole dataset: index, padding and other fields included.
        saving: Bytes of ``"full"`` over these, which is the most that a job can gain (Theorem 4.1 of the VLDB paper).
        image_bytes: Of the measured images' own bytes up to this scan.
        msssim: Mean MS-SSIM against full fidelity.
        msssim_quartiles: Over the images.
        psnr: In dB, of the squared error averaged over the images; infinite where all pixels are equal.
        decode_seconds: Mean CPU time to decode a whole image on one core of this machine.
        num_images: Images measured.
        num_small: Those of them that were too small for five scales, see :func:`msssim`.
    """

    scan: Scan
    bytes_per_image: float
    saving: float
    image_bytes: Quartiles
    msssim: float
    msssim_quartiles: Quartiles
    psnr: float
    decode_seconds: float
    num_images: int
    num_small: int


class Throughput(NamedTuple):
    """Images a second that a job can get at a scan, and what limits it."""

    images_per_second: float
    limit: Literal["bandwidth", "decoding"]


class Recommendation(NamedTuple):
    """A scan, and why."""

    scan: Scan
    reason: str


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

    Gaussian window of 11 pixels (sigma 1.5), K = (0.01, 0.03), dynamic range 255, five scales, means over the three channels of RGB. The papers do
    not say whether they took luma or RGB; in luma alone the chroma scans would be worth nothing. Gray images have three equal channels, which
    give what one would. Images whose smaller side is below 176 pixels have fewer scales, with the weights of the finest ones, scaled to a sum of 1.
    Of images with a side above 2048 the middle is compared.

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
    y, x, height, width = _middle(pixels, _MAX_SIDE)
    betas = tuple(weight / sum(WEIGHTS[:scales]) for weight in WEIGHTS[:scales])
    images = (
        torch.from_numpy(_planes(image[y : y + height, x : x + width]))
        for image in (pixels, reference)
    )
    with torch.inference_mode():
        # A negative mean would become a NaN by the power of its weight.
        return float(metric(*images, data_range=255.0, betas=betas, normalize="relu"))


def _planes(pixels: Pixels) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None], np.float32)


def measure(
    url: str,
    scans: Sequence[Scan] | None = None,
    *,
    num_images: int = 32,
    seed: int = 0,
    rounds: int = 3,
    max_shards: int = 8,
    storage_options: Options | None = None,
    on_image: OnImage | None = None,
) -> list[ScanFidelity]:
    """Measure scans on a random sample of a dataset's images.

    Reads up to ``max_shards`` whole shards but for their tails, each in one request. Takes a fifth of a second of CPU time per scan and megapixel or
    so, nearly all of it for MS-SSIM.

    Args:
        url: The dataset's folder.
        scans: Which; 1 to N by default. ``"full"`` has the pixels of N.
        num_images: How many images; images with a side below 11 pixels are not counted.
        seed: Same seed, same images.
        rounds: Of decoding; the fastest counts.
        max_shards: At most so many shards are read.
        storage_options: fsspec storage options.
        on_image: Called with (done, total) after each image.

    Returns:
        A row for each scan, in the order asked for.

    Raises:
        ScanUnavailable: There is no such scan, or the dataset is a staged copy without full fidelity to compare with.
        MissingDependency: torchmetrics is not installed.
        ValueError: The dataset has no image that is large enough.
        PCRError: A shard cannot be read, an image is damaged.
    """
    _metric()
    index, urls = open_dataset(url, storage_options=storage_options)
    wanted: list[Scan] = list(scans) if scans is not None else list(range(1, index.num_groups + 1))
    stops = [check_scan(scan, index.num_groups) for scan in wanted]
    stops = [min(stop, index.num_groups) for stop in stops]

    def look(pieces: Pieces) -> _Seen | None:
        return _look(pieces, stops, rounds)

    seen = [
        s
        for _, s in _sample(
            index, urls, num_images, seed, max_shards, storage_options, look, on_image
        )
        if s
    ]
    if not seen:
        raise ValueError(
            f"expected images of {_MIN_SIDES[0]} pixels or more on each side, found none in {url}"
        )
    return [
        _summarise(index, scan, [s.rungs[i] for s in seen], sum(s.small for s in seen))
        for i, scan in enumerate(wanted)
    ]


class _Rung(NamedTuple):
    """What was seen of one image at one scan."""

    num_bytes: int
    msssim: float
    squared_error: float
    seconds: float


class _Seen(NamedTuple):
    small: bool
    rungs: list[_Rung]


def _look(pieces: Pieces, stops: Sequence[int], rounds: int) -> _Seen | None:
    reference = decode_image(pieces)
    scales = count_scales(*reference.shape[:2])
    if scales == 0:
        return None
    seconds = [math.inf] * len(stops)
    for _ in range(rounds):  # interleaved, so that a disturbance does not hit one scan alone
        for i, stop in enumerate(stops):
            begin = time.thread_time()
            decode_image(pieces[:stop])
            seconds[i] = min(seconds[i], time.thread_time() - begin)
    rungs = []
    for stop, spent in zip(stops, seconds, strict=True):
        pixels = decode_image(pieces[:stop])
        error = float(np.square(pixels.astype(np.float32) - reference).mean())
        rungs.append(_Rung(sum(map(len, pieces[:stop])), msssim(pixels, reference), error, spent))
    return _Seen(scales < len(WEIGHTS), rungs)


def _summarise(
    index: DatasetIndex, scan: Scan, rungs: Sequence[_Rung], num_small: int
) -> ScanFidelity:
    values, prefix = [rung.msssim for rung in rungs], index.prefix_bytes(scan)
    return ScanFidelity(
        scan=scan,
        bytes_per_image=prefix / index.num_samples,
        saving=index.prefix_bytes(FULL) / prefix,
        image_bytes=_quartiles([rung.num_bytes for rung in rungs]),
        msssim=float(np.mean(values)),
        msssim_quartiles=_quartiles(values),
        psnr=psnr(float(np.mean([rung.squared_error for rung in rungs]))),
        decode_seconds=float(np.mean([rung.seconds for rung in rungs])),
        num_images=len(rungs),
        num_small=num_small,
    )


def psnr(squared_error: float) -> float:
    """Peak signal to noise in dB of a mean squared error of 8-bit pixels.

    >>> psnr(0.0), round(psnr(1.0), 2)
    (inf, 48.13)
    """
    return 10 * math.log10(255**2 / squared_error) if squared_error else math.inf


def _quartiles(values: Sequence[float]) -> Quartiles:
    return Quartiles(*map(float, np.quantile(values, (0.25, 0.5, 0.75))))


def _sample(
    index: DatasetIndex,
    urls: Sequence[str],
    num_images: int,
    seed: int,
    max_shards: int,
    options: Options | None,
    look: Callable[[Pieces], T],
    on_image: OnImage | None = None,
) -> list[tuple[str, T]]:
    """Call ``look`` with the pieces of random samples' first stream; returns (key, result) of each."""
    if index.scan is not None:
        raise ScanUnavailable(
            f"expected full fidelity to compare with, got a staged copy of scans 1 to {index.scan} of {index.num_groups}; "
            "measure the dataset that it comes from"
        )
    picked = pick(
        random.Random(seed), [entry.num_samples for entry in index.shards], num_images, max_shards
    )
    found: list[tuple[str, T]] = []
    for shard, rows in picked.items():
        entry = index.shards[shard]
        with Shard(urls[shard], entry=entry, storage_options=options).load(
            entry.num_groups
        ) as prefix:
            field = prefix.index.schema.streams[0][0]
            samples = prefix.samples(rows, select=_only(field), decode=look)
            for sample in samples:
                _note(found, sample, field)
                if on_image is not None:
                    on_image(len(found), sum(map(len, picked.values())))
    return found


def _only(field: str) -> Callable[[str, str], bool]:
    return lambda _, name: name == field


def _note(found: list[tuple[str, Any]], sample: Sample, field: str) -> None:
    if field in sample:
        found.append((sample["__key__"], sample[field]))


def pick(
    rng: random.Random, sizes: Sequence[int], num_images: int, max_shards: int
) -> dict[int, list[int]]:
    """Choose images at random from a few shards.

    Args:
        rng: Drawn from.
        sizes: Samples of each shard.
        num_images: How many; all if there are not so many in the shards chosen.
        max_shards: From how many shards.

    Returns:
        For each shard chosen its rows, in order.

    >>> pick(random.Random(0), [3, 3, 3, 3], 4, 2)
    {1: [0, 1, 2], 3: [0]}
    """
    shards = sorted(rng.sample(range(len(sizes)), min(max_shards, len(sizes))))
    images = [(shard, row) for shard in shards for row in range(sizes[shard])]
    chosen = sorted(rng.sample(images, min(num_images, len(images))))
    return {
        shard: [row for s, row in chosen if s == shard]
        for shard in shards
        if any(s == shard for s, _ in chosen)
    }


def throughput(row: ScanFidelity, bandwidth: float, cores: float = math.inf) -> Throughput:
    """Predict a job's rate at a scan: X = W / E[s] (section 4.1 of the VLDB paper) until decoding is the limit.

    Args:
        row: From :func:`measure`.
        bandwidth: Of the storage, in bytes a second.
        cores: That decode whole images beside nothing else.
    """
    read, decoded = bandwidth / row.bytes_per_image, cores / row.decode_seconds
    return Throughput(min(read, decoded), "bandwidth" if read <= decoded else "decoding")


def recommend(rows: Sequence[ScanFidelity], min_msssim: float = _ENOUGH) -> Recommendation:
    """The lowest scan whose mean MS-SSIM is enough.

    Args:
        rows: From :func:`measure`.
        min_msssim: The paper found its groups above 0.95 to perform well consistently, and change hard to predict below.

    Returns:
        A scan, ``"full"`` if none of the rows is enough, and the reason in a sentence.
    """
    ranked = sorted(rows, key=lambda row: row.bytes_per_image)
    found = next((row for row in ranked if row.msssim >= min_msssim), None)
    if found is None:
        best = max(rows, key=lambda row: row.msssim)
        reason = f"no scan measured reaches MS-SSIM {min_msssim:g}; the best is scan {best.scan} with {best.msssim:.3f}"
        return Recommendation(FULL, reason)
    reason = (
        f"scan {found.scan} is the first with a mean MS-SSIM of {min_msssim:g} or more ({found.msssim:.3f}, a quarter of the images below "
        f"{found.msssim_quartiles.q1:.3f}), and reads {found.saving:.2f} times fewer bytes than full"
    )
    below = [row for row in ranked if row.bytes_per_image < found.bytes_per_image]
    if below:
        reason += f"; scan {below[-1].scan} has {below[-1].msssim:.3f} at {below[-1].saving:.2f} times fewer"
    return Recommendation(found.scan, reason)


def fidelity_table(
    rows: Sequence[ScanFidelity], bandwidth: float | None = None, cores: float = math.inf
) -> str:
    """The table of ``pcrshard fidelity``."""
    header = [
        "scan",
        "bytes/sample",
        "image bytes [q1 q3]",
        "saving",
        "MS-SSIM [q1 q3]",
        "PSNR",
        "decode ms",
    ]
    cells: list[list[object]] = []
    for row in rows:
        low, middle, high = map(human_bytes, row.image_bytes)
        cells.append(
            [
                row.scan,
                human_bytes(row.bytes_per_image),
                f"{middle} [{low} {high}]",
                f"{row.saving:.2f}x",
            ]
        )
        cells[-1] += [
            f"{row.msssim:.4f} [{row.msssim_quartiles.q1:.4f} {row.msssim_quartiles.q3:.4f}]",
            f"{row.psnr:.1f}",
        ]
        cells[-1].append(f"{1000 * row.decode_seconds:.2f}")
        if bandwidth is not None:
            rate = throughput(row, bandwidth, cores)
            cells[-1] += [f"{rate.images_per_second:.0f}", rate.limit]
    return table([*header, "images/s", "limit"] if bandwidth is not None else header, cells)


def contact_sheet(
    url: str,
    path: str,
    scans: Sequence[Scan] | None = None,
    *,
    num_images: int = 3,
    seed: int = 0,
    side: int = 224,
    storage_options: Options | None = None,
) -> None:
    """Draw random images at each scan side by side, differences to full fidelity below, saved as PNG.

    Args:
        url: The dataset's folder.
        path: Target file.
        scans: Columns; by default up to five scans from 1 to N.
        num_images: Rows.
        seed: Same seed, same images.
        side: The middle of each image is shown, at most so many pixels square.
        storage_options: fsspec storage options.

    Raises:
        MissingDependency: matplotlib or torchmetrics is not installed.
        PCRError: As for :func:`measure`.
    """
    pyplot_module()
    index, urls = open_dataset(url, storage_options=storage_options)
    last = index.num_groups
    wanted: list[Scan] = (
        list(scans)
        if scans is not None
        else sorted({round(1 + i * (last - 1) / 4) for i in range(5)})
    )
    stops = [min(check_scan(scan, last), last) for scan in wanted]

    def look(pieces: Pieces) -> list[tuple[int, float, Pixels]]:
        reference = decode_image(pieces)
        y, x, height, width = _middle(reference, side)
        shown = []
        for stop in [*stops, last]:
            pixels = decode_image(pieces[:stop])
            value = msssim(pixels, reference) if count_scales(*pixels.shape[:2]) else math.nan
            shown.append(
                (sum(map(len, pieces[:stop])), value, pixels[y : y + height, x : x + width])
            )
        return shown

    rows = [
        [Picture(key, scan, *cell) for scan, cell in zip([*wanted, FULL], cells, strict=True)]
        for key, cells in _sample(index, urls, num_images, seed, num_images, storage_options, look)
    ]
    plot_contact_sheet(
        rows,
        path,
        title=f"script {index.script}: middle of each image, and four times its difference to full fidelity",
    )


def _middle(pixels: Pixels, side: int) -> Box:
    height, width = pixels.shape[:2]
    h, w = min(height, side), min(width, side)
    return (height - h) // 2, (width - w) // 2, h, w
