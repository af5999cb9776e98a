"""How close each scan of a dataset comes to full fidelity, and what it costs.

Bytes, MS-SSIM, PSNR and decoding time of a sample of its images, and what a network sees in them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

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
from .costs import ScanCost, scan_costs
from .msssim import (
    WEIGHTS,
    Reference,
    count_scales,
    msssim,
    require_opencv,
)
from .sampled_images import (
    ImageSample,
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
    storage_options: Options = None,
    on_image: OnImage | None = None,
    reference: str | None = None,
    model: Network | None = None,
    smoothing: bool = SMOOTHING,
) -> list[ScanFidelity]:
    """Measure scans on a random sample of a dataset's images.

    Reads up to eight whole shards but for their tails, each in one request. Takes about a
    twentieth of a second of CPU time per scan and megapixel, most of it for MS-SSIM.

    Args:
        url: The dataset's folder. A staged copy is compared with the highest scan that it holds.
        scans: The scans to measure; by default all that there are. ``"full"`` has the pixels of N.
        num_images: Number of images; those with a side below 11 pixels are not counted.
        seed: The same seed takes the same images.
        rounds: Times that an image is decoded, of which the fastest counts.
        storage_options: fsspec storage options.
        on_image: Called with (done, total) after each image.
        reference: The dataset that ``url`` is a staged copy of, to compare with full fidelity; the
            images are read from there.
        model: A classifier, whose share of right answers is measured too; labels are those of the
            field ``cls``.
        smoothing: As for :class:`pcrshard.ImageDecoder`.

    Returns:
        The figures of each scan, in the order asked for.

    Raises:
        ScanUnavailable: There is no such scan, or a staged copy does not hold it.
        MissingDependency: OpenCV is not installed.
        ValueError: ``reference`` has other shards.
        PCRError: No image is large enough, a shard cannot be read, an image is damaged, or there
            are no labels for ``model``.
    """
    require_opencv()
    sample = draw_images(
        url, num_images, seed, _MAX_SHARDS, reference=reference, storage_options=storage_options
    )
    costs = scan_costs(sample.dataset)
    stops = _stops(sample.dataset, scans)
    climb = partial(_climb, stops=stops, rounds=rounds, model=model, smoothing=smoothing)
    ladders = _climb_all(sample, climb, on_image, model is not None)
    if not ladders:
        raise PCRError(
            "expected progressive JPEGs of 11 pixels or more on each side, found none", url=url
        )
    return [
        _summarise(costs[stop - 1], sample.top, ladders, place) for place, stop in enumerate(stops)
    ]


def _stops(index: DatasetIndex, scans: Sequence[Scan] | None) -> list[int]:
    """How many pieces each scan has; raises if a staged copy does not hold it."""
    if scans is None:
        return list(range(1, index.num_groups + 1))[: index.scan]
    for scan in scans:
        index.prefix_bytes(scan)
    return [check_scan(scan, index.num_groups) for scan in scans]


class _Rung(NamedTuple):
    """What was seen of one image at one scan."""

    num_bytes: int
    msssim: float
    squared_error: float
    seconds: float
    is_small: bool


class _Ladder(NamedTuple):
    """What was seen of one image: at each scan, and by the network at each scan and at the best."""

    rungs: list[_Rung]
    answers: list[int]
    label: int = -1


def _climb_all(
    sample: ImageSample,
    climb: Callable[[Pieces], _Ladder],
    on_image: OnImage | None,
    has_labels: bool,
) -> list[_Ladder]:
    """Look at all images drawn; those that are too small are left out."""
    fields = (_LABEL,) if has_labels else ()
    return [
        ladder._replace(label=_label(other)) if has_labels else ladder
        for ladder, other in sample.look(climb, on_image, fields)
        if ladder.rungs
    ]


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


def _climb(
    pieces: Pieces,
    stops: Sequence[int],
    rounds: int,
    model: Network | None,
    smoothing: bool,
) -> _Ladder:
    """Look at one image at each scan; nothing of one that is too small."""
    decode = partial(decode_image, smoothing=smoothing)
    pixels = decode(pieces)
    if count_scales(*pixels.shape[:2]) == 0:
        return _Ladder([], [])
    reference = Reference(pixels)
    views = [pieces[:stop] for stop in stops]
    # Round by round, so that a disturbance does not hit one scan alone.
    earlier = [[_timed(decode, view)[1] for view in views] for _ in range(rounds - 1)]
    rungs = [
        _rung(view, decode, reference, times) for view, *times in zip(views, *earlier, strict=True)
    ]
    answers = model.classify([*views, pieces], smoothing=smoothing) if model else []
    return _Ladder(rungs, answers)


def _rung(
    pieces: Pieces,
    decode: Decode,
    reference: Reference,
    times: Sequence[float],
) -> _Rung:
    decoded, seconds = _timed(decode, pieces)
    error = decoded.astype(np.float32) - reference.pixels
    return _Rung(
        num_bytes=sum(map(len, pieces)),
        msssim=reference.compare(decoded),
        squared_error=float(np.square(error).mean()),
        seconds=min([seconds, *times]),
        is_small=reference.is_small,
    )


def _timed(decode: Decode, pieces: Pieces) -> tuple[Pixels, float]:
    """The picture, and the seconds of CPU time that it took."""
    begun = time.thread_time()
    decoded = decode(pieces)
    return decoded, time.thread_time() - begun


def _summarise(
    cost: ScanCost,
    reference: Scan,
    ladders: Sequence[_Ladder],
    place: int,
) -> ScanFidelity:
    rungs = [ladder.rungs[place] for ladder in ladders]
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
        reference=reference,
        top1=_share_right(ladders, place),
        reference_top1=_share_right(ladders, -1),
    )


def _share_right(ladders: Sequence[_Ladder], place: int) -> float | None:
    """The network's share of right answers at a scan, if there is a network."""
    if not ladders[0].answers:
        return None
    return float(np.mean([ladder.answers[place] == ladder.label for ladder in ladders]))


def _quartiles(values: Sequence[float]) -> Quartiles:
    return Quartiles(*np.quantile(values, (0.25, 0.5, 0.75)).tolist())
