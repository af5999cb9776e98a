"""Measure how close each scan of a dataset comes to full fidelity, and its cost.

Measures bytes, MS-SSIM, PSNR and decoding time on a sample of images, and a network's top-1.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import PCRError
from ..format.dataset_index import DatasetIndex
from ..format.scan import Scan, check_scan
from ..jpeg.pixels import decode_image
from ..storage import Options
from .advice import Quartiles, ScanFidelity
from .costs import scan_costs
from .msssim import Reference, count_scales, require_opencv
from .sampled_images import OnImage, Pieces, draw_images

if TYPE_CHECKING:
    from .user_network import Network

_LABEL = "cls"
_MAX_SHARDS = 8


def psnr(squared_error: float) -> float:
    """Return the peak signal-to-noise ratio in dB for a mean squared error of 8-bit pixels.

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
    storage_options: Options = None,
    on_image: OnImage | None = None,
    model: Network | None = None,
) -> list[ScanFidelity]:
    """Measure scans on a random sample of a dataset's images.

    Reads up to eight whole shards except their tails, each in one request. Takes about 0.05 s of
    CPU time per scan and megapixel, most of it for MS-SSIM.

    Args:
        url: The dataset's folder. A staged copy is compared with the highest scan that it holds.
        scans: Scans to measure; all by default. ``"full"`` has the pixels of scan N.
        num_images: Number of images; images with a side below 11 pixels are skipped.
        seed: Random seed; the same seed picks the same images.
        rounds: Number of times each image is decoded; the fastest counts.
        storage_options: fsspec storage options.
        on_image: Called with (done, total) after each image.
        model: Classifier whose top-1 accuracy is also measured, against the labels in field
            ``cls``.

    Returns:
        The figures of each scan, in the order of ``scans``.

    Raises:
        ScanUnavailable: A scan does not exist, or a staged copy does not hold it.
        MissingDependency: OpenCV is not installed.
        PCRError: No image is large enough, a shard cannot be read, an image is damaged, or there
            are no labels for ``model``.
    """
    require_opencv()
    sample = draw_images(url, num_images, seed, _MAX_SHARDS, storage_options)
    stops = _stops(sample.dataset, scans)
    measured: list[list[tuple[float, ...]]] = []
    right: list[NDArray[np.bool_]] = []
    for pieces, others in sample.images(() if model is None else (_LABEL,), on_image):
        pixels = decode_image(pieces)
        if count_scales(*pixels.shape[:2]) == 0:
            continue
        reference = Reference(pixels)
        views = [pieces[:stop] for stop in stops]
        measured.append(_measure_image(views, reference, rounds))
        if model is not None:
            answers = model.classify([*views, pieces])
            right.append(np.array(answers) == _label(others[_LABEL]))
    if not measured:
        raise PCRError(
            "expected progressive JPEGs of 11 pixels or more on each side, found none", url=url
        )
    costs = scan_costs(sample.dataset)
    # Shape: (images, scans, 4 figures).
    figures = np.array(measured)
    # The reference comes last.
    top1 = np.mean(right, axis=0).tolist() if right else [None] * (len(stops) + 1)
    return [
        ScanFidelity(
            scan=costs[stop - 1].scan,
            bytes_per_image=costs[stop - 1].bytes_per_sample,
            saving=costs[stop - 1].saving,
            image_bytes=_quartiles(num_bytes),
            msssim=float(msssims.mean()),
            msssim_quartiles=_quartiles(msssims),
            psnr=psnr(float(errors.mean())),
            decode_seconds=float(seconds.mean()),
            num_images=len(measured),
            reference=sample.top,
            top1=top1[place],
            reference_top1=top1[-1],
        )
        for place, stop in enumerate(stops)
        for num_bytes, msssims, errors, seconds in [figures[:, place].T]
    ]


def _stops(index: DatasetIndex, scans: Sequence[Scan] | None) -> list[int]:
    """Return the number of pieces of each scan; raise if a staged copy does not hold it."""
    if scans is None:
        return list(range(1, index.num_groups + 1))[: index.scan]
    for scan in scans:
        index.prefix_bytes(scan)
    return [check_scan(scan, index.num_groups) for scan in scans]


def _label(label: bytes | None) -> int:
    try:
        return int(label or b"")
    except ValueError as error:
        raise PCRError(
            f"expected the number of a class in field {_LABEL!r} to compare the model's answers "
            f"with, got {label and label[:20]!r}"
        ) from error


def _measure_image(
    views: Sequence[Pieces],
    reference: Reference,
    rounds: int,
) -> list[tuple[float, ...]]:
    """Return the bytes, MS-SSIM, mean squared error and seconds to decode of each view."""
    times = np.empty((rounds, len(views)))
    found = []
    # Interleave the rounds, so that a disturbance does not hit a single scan.
    for number, place in itertools.product(range(rounds), range(len(views))):
        begun = time.thread_time()
        decoded = decode_image(views[place])
        times[number, place] = time.thread_time() - begun
        if number == 0:
            error = float(np.square(decoded.astype(np.float32) - reference.pixels).mean())
            num_bytes = sum(map(len, views[place]))
            found.append((num_bytes, reference.compare(decoded), error))
    return [(*figures, fastest) for figures, fastest in zip(found, times.min(axis=0), strict=True)]


def _quartiles(values: NDArray[np.float64]) -> Quartiles:
    return Quartiles(*np.quantile(values, (0.25, 0.5, 0.75)).tolist())
