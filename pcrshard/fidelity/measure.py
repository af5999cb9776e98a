"""Measure how close each scan of a dataset comes to full fidelity, and its cost.

Measures bytes, MS-SSIM, PSNR and decoding time on a sample of images, and a network's top-1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import PCRError
from ..format.dataset_index import DatasetIndex
from ..format.scan import Scan, check_scan
from ..jpeg.pixels import SMOOTHING, Pixels, decode_image
from ..reading.prefix import Sample
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
from .contact_sheet import contact_sheet
from .costs import scan_costs
from .msssim import (
    WEIGHTS,
    Reference,
    count_scales,
    msssim,
    require_opencv,
)
from .sampled_images import (
    OnImage,
    Pieces,
    draw_images,
    pick,
)

if TYPE_CHECKING:
    from .user_network import Network

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

_LABEL = "cls"
_MAX_SHARDS = 8
Decode = Callable[[Pieces], Pixels]


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
    reference: str | None = None,
    model: Network | None = None,
    smoothing: bool = SMOOTHING,
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
        reference: Original dataset if ``url`` is a staged copy; images are read from there and
            compared with full fidelity.
        model: Classifier whose top-1 accuracy is also measured, against the labels in field
            ``cls``.
        smoothing: As for :class:`pcrshard.ImageDecoder`.

    Returns:
        The figures of each scan, in the order of ``scans``.

    Raises:
        ScanUnavailable: A scan does not exist, or a staged copy does not hold it.
        MissingDependency: OpenCV is not installed.
        ValueError: ``reference`` has different shards.
        PCRError: No image is large enough, a shard cannot be read, an image is damaged, or there
            are no labels for ``model``.
    """
    require_opencv()
    sample = draw_images(
        url, num_images, seed, _MAX_SHARDS, reference=reference, storage_options=storage_options
    )
    stops = _stops(sample.dataset, scans)
    look = partial(_measure_image, stops=stops, rounds=rounds, model=model, smoothing=smoothing)
    fields = () if model is None else (_LABEL,)
    found = [
        image._replace(label=_label(other)) if fields else image
        for image, other in sample.look(look, on_image, fields)
        if image is not None
    ]
    if not found:
        raise PCRError(
            "expected progressive JPEGs of 11 pixels or more on each side, found none", url=url
        )
    costs = scan_costs(sample.dataset)
    # Shape: (images, scans, 4 figures).
    figures = np.array([image.scans for image in found])
    top1 = _top1(found)
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
            num_images=len(found),
            num_small=sum(image.is_small for image in found),
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


class _Image(NamedTuple):
    """Measurements of one image.

    Attributes:
        scans: Bytes, MS-SSIM, mean squared error and seconds to decode at each scan.
        is_small: Whether the image is too small for five scales of MS-SSIM.
        answers: Class predicted by the network at each scan, and at the reference.
        label: True class of the image.
    """

    scans: Sequence[tuple[float, ...]]
    is_small: bool
    answers: list[int]
    label: int = -1


def _label(sample: Sample) -> int:
    if _LABEL not in sample:
        raise PCRError(
            f"there are no labels to compare the model's answers with: expected a field {_LABEL!r} "
            f"with the number of the class, sample {sample['__key__']!r} has none"
        )
    try:
        return int(sample[_LABEL])
    except ValueError as error:
        raise PCRError(
            f"expected the number of a class in field {_LABEL!r}, got {sample[_LABEL][:20]!r}",
            key=sample["__key__"],
        ) from error


def _measure_image(
    pieces: Pieces,
    stops: Sequence[int],
    rounds: int,
    model: Network | None,
    smoothing: bool,
) -> _Image | None:
    """Measure one image at each scan; return ``None`` if it is too small."""
    decode = partial(decode_image, smoothing=smoothing)
    pixels = decode(pieces)
    if count_scales(*pixels.shape[:2]) == 0:
        return None
    reference = Reference(pixels)
    views = [pieces[:stop] for stop in stops]
    # Interleave the rounds, so that a disturbance does not hit a single scan.
    earlier = [[_timed(decode, view)[1] for view in views] for _ in range(rounds - 1)]
    scans = []
    for view, *times in zip(views, *earlier, strict=True):
        decoded, seconds = _timed(decode, view)
        error = float(np.square(decoded.astype(np.float32) - pixels).mean())
        num_bytes = sum(map(len, view))
        scans.append((num_bytes, reference.compare(decoded), error, min([seconds, *times])))
    answers = model.classify([*views, pieces], smoothing=smoothing) if model else []
    return _Image(scans, reference.is_small, answers)


def _timed(decode: Decode, pieces: Pieces) -> tuple[Pixels, float]:
    """Return the decoded picture and the CPU seconds it took."""
    begun = time.thread_time()
    decoded = decode(pieces)
    return decoded, time.thread_time() - begun


def _top1(images: Sequence[_Image]) -> Sequence[float | None]:
    """Return the network's accuracy at each scan and at the reference, if there is a network."""
    answers = np.array([image.answers for image in images])
    labels = np.array([[image.label] for image in images])
    means: list[float] = (answers == labels).mean(axis=0).tolist()
    return means or [None] * (1 + len(images[0].scans))


def _quartiles(values: NDArray[np.float64]) -> Quartiles:
    return Quartiles(*np.quantile(values, (0.25, 0.5, 0.75)).tolist())
