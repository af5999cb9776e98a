"""Measure how close each scan of a dataset comes to full fidelity, and its cost.

Measures bytes, MS-SSIM, PSNR and decoding time on a sample of images, and a network's top-1.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import PCRError
from ..format.scan import FULL
from ..jpeg.pixels import decode_image
from ..storage import Options
from .advice import ScanFidelity
from .costs import scan_costs
from .intervals import Interval, confidence, of_change
from .msssim import Reference, count_scales, require_opencv
from .sampled_images import LABEL, OnImage, Pieces, draw_images

if TYPE_CHECKING:
    from .user_network import Network

_MAX_SHARDS = 8


def psnr(squared_error: float) -> float:
    """Return the peak signal-to-noise ratio in dB for a mean squared error of 8-bit pixels.

    >>> psnr(0.0), round(psnr(1.0), 2)
    (inf, 48.13)
    """
    return 10 * math.log10(255**2 / squared_error) if squared_error else math.inf


def measure(
    url: str,
    *,
    num_images: int = 32,
    seed: int = 0,
    rounds: int = 3,
    storage_options: Options = None,
    on_image: OnImage | None = None,
    model: Network | None = None,
) -> list[ScanFidelity]:
    """Measure each scan of a dataset on a random sample of its images.

    Reads up to eight whole shards except their tails, each in one request. Takes about 0.05 s of
    CPU time per scan and megapixel, most of it for MS-SSIM.

    Args:
        url: The dataset's folder.
        num_images: Number of images; images with a side below 11 pixels are skipped.
        seed: Random seed; the same seed picks the same images.
        rounds: Number of times each image is decoded; the fastest counts.
        storage_options: fsspec storage options.
        on_image: Called with (done, total) after each image.
        model: Classifier whose top-1 accuracy is also measured, against the labels in field
            ``cls``.

    Returns:
        The figures of each scan that the dataset holds, lowest first. The last one is the reference
        of the others: it has the pixels of full fidelity, or is the highest of a staged copy.

    Raises:
        MissingDependency: OpenCV is not installed.
        PCRError: No image is large enough, a shard cannot be read, an image is damaged, or there
            are no labels for ``model``.
    """
    require_opencv()
    sample = draw_images(url, num_images, seed, _MAX_SHARDS, storage_options)
    costs = [cost for cost in scan_costs(sample.dataset) if cost.scan != FULL]
    measured: list[list[tuple[float, ...]]] = []
    right: list[NDArray[np.bool_]] = []
    labels: Counter[int] = Counter()
    for pieces, label in sample.images(on_image):
        pixels = decode_image(pieces)
        if count_scales(*pixels.shape[:2]) == 0:
            continue
        reference = Reference(pixels)
        views = [pieces[:stop] for stop in range(1, len(costs) + 1)]
        measured.append([_measure_image(view, reference, rounds) for view in views])
        if model is not None:
            right.append(np.array(model.classify(views)) == _number(label))
            labels[_number(label)] += 1
    if not measured:
        raise PCRError(
            "expected progressive JPEGs of 11 pixels or more on each side, found none", url=url
        )
    # Shape: (scans, 3 figures, images).
    figures = np.array(measured).transpose(1, 2, 0)
    top1: list[float | None] = [None] * len(costs)
    changes: list[Interval | None] = [None] * len(costs)
    if right:
        answers = np.array(right)
        top1 = answers.mean(axis=0).tolist()
        gained = (answers & ~answers[:, -1:]).sum(axis=0).tolist()
        lost = (~answers & answers[:, -1:]).sum(axis=0).tolist()
        changes = [of_change(*pair, len(right)) for pair in zip(gained, lost, strict=True)]
    return [
        ScanFidelity(
            scan=cost.scan,
            bytes_per_image=cost.bytes_per_sample,
            saving=cost.saving,
            msssim=float(msssims.mean()),
            msssim_interval=confidence(msssims.tolist())[1:] if len(measured) > 1 else None,
            msssim_quartile=float(np.quantile(msssims, 0.25)),
            psnr=psnr(float(errors.mean())),
            decode_seconds=float(seconds.mean()),
            num_images=len(measured),
            top1=own,
            top1_change=change,
            top1_constant=max(labels.values()) / len(right) if right else None,
        )
        for cost, (msssims, errors, seconds), own, change in zip(
            costs, figures, top1, changes, strict=True
        )
    ]


def _number(label: bytes | None) -> int:
    try:
        return int(label or b"")
    except ValueError as error:
        raise PCRError(
            f"expected the number of a class in field {LABEL!r} to compare the model's answers "
            f"with, got {label and label[:20]!r}"
        ) from error


def _measure_image(view: Pieces, reference: Reference, rounds: int) -> tuple[float, float, float]:
    """Return the MS-SSIM, the mean squared error and the seconds to decode a view."""
    times = []
    for _ in range(rounds):
        begun = time.thread_time()
        decoded = decode_image(view)
        times.append(time.thread_time() - begun)
    error = float(np.square(decoded.astype(np.float32) - reference.pixels).mean())
    return reference.compare(decoded), error, min(times)
