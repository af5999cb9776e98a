"""Predict throughput and recommend a scan from measured figures, without I/O."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..format.scan import FULL, Scan
from .intervals import Interval, of_fraction

_ENOUGH = 0.95
# Acceptable loss of top-1 accuracy, as a fraction.
_LOSS = 0.01


class ScanFidelity(NamedTuple):
    """Measurements of one scan of a dataset.

    Attributes:
        scan: The scan.
        bytes_per_image: Bytes that a reader at this scan transfers per sample of the whole dataset,
            including index, padding and other fields.
        saving: Bytes of ``"full"`` over these bytes: the upper bound on a job's speedup (Theorem
            4.1 of the VLDB paper).
        msssim: Mean MS-SSIM against the highest scan measured.
        msssim_interval: 95 % interval of that mean; ``None`` for a single image.
        msssim_quartile: First quartile of the MS-SSIM over the images.
        psnr: PSNR in dB of the squared error averaged over the images; infinite if all pixels are
            equal.
        decode_seconds: Mean CPU time to decode a whole image on one core of this machine.
        num_images: Images measured.
        top1: Fraction of the images that the user's network classifies correctly; ``None`` without
            one.
        top1_change: 95 % interval of ``top1`` minus that of the highest scan, on the same images.
        top1_constant: ``top1`` of the one answer that is right most often.
    """

    scan: Scan
    bytes_per_image: float
    saving: float
    msssim: float
    msssim_interval: Interval | None
    msssim_quartile: float
    psnr: float
    decode_seconds: float
    num_images: int
    top1: float | None = None
    top1_change: Interval | None = None
    top1_constant: float | None = None


class Recommendation(NamedTuple):
    """A recommended scan and the reason for it.

    Attributes:
        scan: The lowest scan that is certainly enough.
        reason: A sentence.
        lowest: The lowest scan that may be enough; lower than ``scan`` if the images are too few to
            tell.
        images: About the number of images that would tell; ``None`` if these do.
    """

    scan: Scan
    reason: str
    lowest: Scan
    images: int | None = None


class _Figure(NamedTuple):
    """What decides on a scan: an estimate, its interval, and the least that is enough."""

    value: float
    low: float
    high: float
    least: float


def recommend(rows: Sequence[ScanFidelity], min_msssim: float = _ENOUGH) -> Recommendation:
    """Return the lowest scan such that it and all higher scans pass, by top-1 or by MS-SSIM.

    A scan passes if its whole 95 % interval does: the mean MS-SSIM, or the change of top-1 between
    the scan and the highest one on the same images. Each scan is judged alone.

    Args:
        rows: Figures of each scan, from :func:`measure`.
        min_msssim: Minimum mean MS-SSIM, used if no network was measured. The paper found that
            groups above 0.95 perform well consistently, and that results below are hard to predict.
            A network must come within a point of its top-1 accuracy at the highest scan instead.

    Returns:
        The scan, or ``"full"`` if no row passes or the network's answers are no better than one
        for all images; the reason, and what remains open.
    """
    ranked = sorted(rows, key=operator.attrgetter("bytes_per_image"))
    reference = ranked[-1].top1
    if reference is None:
        wanted = f"a mean MS-SSIM of {min_msssim:g} or more"
        figures = [
            _Figure(row.msssim, *(row.msssim_interval or (row.msssim, row.msssim)), min_msssim)
            for row in ranked
        ]
    else:
        at = ranked[-1].scan
        constant = ranked[-1].top1_constant
        low, high = _top1_interval(ranked[-1])
        if constant is not None and low <= constant < 1:
            return Recommendation(
                FULL,
                f"no scan is known to be enough: the {low:.1%} to {high:.1%} of your network at "
                f"scan {at} are hardly better than the {constant:.1%} of one answer for all images",
                FULL,
            )
        wanted = f"a top-1 at most 1 point below the {reference:.1%} of your network at scan {at}"
        # Keep rounding from deciding whether 0.74 is one point below 0.75.
        figures = [
            _Figure(change, *(row.top1_change or (change, change)), -_LOSS - 1e-9)
            for row in ranked
            for change in [(row.top1 or 0.0) - reference]
        ]
        figures[-1] = _Figure(0.0, 0.0, 0.0, -_LOSS)  # the reference itself
    scans: list[Scan] = [*(row.scan for row in ranked), FULL]
    sure = _first([figure.low >= figure.least for figure in figures])
    possible = _first([figure.high >= figure.least for figure in figures])
    scan, lowest = scans[sure], scans[possible]
    if sure == possible:
        found = f"the lowest with {wanted}" if sure < len(ranked) else f"no scan has {wanted}"
        return Recommendation(scan, found, lowest)
    count = ranked[0].num_images
    images = max(_images_to_tell(figure, count) for figure in figures[possible:sure])
    reason = (
        f"cannot tell from {count} images: between scans {lowest} and {scan}, about {images:,} "
        f"would do; scan {scan} certainly has {wanted}"
    )
    return Recommendation(scan, reason, lowest, images)


def _first(passed: Sequence[bool]) -> int:
    """Return the place from which on all have passed."""
    return max((place for place, own in enumerate(passed, 1) if not own), default=0)


def _images_to_tell(figure: _Figure, count: int) -> int:
    """Return about how many images would put an interval on one side, to two digits."""
    half = (figure.high - figure.low) / 2
    # Closer than a fifth of a point to the limit, it does not matter on which side.
    distance = max(abs(figure.value - figure.least), _LOSS / 5)
    needed = math.ceil(count * max(half / distance, 1) ** 2)
    step: int = 10 ** max(len(str(needed)) - 2, 0)
    return -(-needed // step) * step


def accuracy_question(rows: Sequence[ScanFidelity]) -> str | None:
    """Return what a user should check before trusting a network's figures; ``None`` without one."""
    highest = max(rows, key=operator.attrgetter("bytes_per_image"))
    if highest.top1 is None:
        return None
    low, high = _top1_interval(highest)
    return (
        f"is {low:.1%} to {high:.1%} (at scan {highest.scan}) the accuracy that you know of this "
        "network? If not, its normalization, the input size or the order of its classes is another"
    )


def _top1_interval(row: ScanFidelity) -> Interval:
    """Return the 95 % interval of a network's accuracy at a scan."""
    return of_fraction(round((row.top1 or 0.0) * row.num_images), row.num_images)


def with_throughput(
    rows: Sequence[ScanFidelity],
    bandwidth: float | None = None,
    cores: float = math.inf,
) -> list[dict[str, Any]]:
    """Return the figures of each scan by name; a bandwidth adds a job's throughput.

    It is X = W / E[s] (section 4.1 of the VLDB paper), up to the decoding rate; ``limit`` names the
    lower one.

    Args:
        rows: Figures of each scan, from :func:`measure`.
        bandwidth: Storage bandwidth in bytes per second.
        cores: Number of cores dedicated to decoding whole images.
    """
    records = []
    for row in rows:
        record = row._asdict()
        del record["num_images"], record["top1_constant"]  # the same at each scan
        for name in ("msssim_interval", "top1_change"):
            bounds = record[name]
            record[name] = bounds and [round(bound, 4) for bound in bounds]
        # JSON has no infinity.
        record["psnr"] = row.psnr if math.isfinite(row.psnr) else None
        if bandwidth is not None:
            record["images_per_second"], record["limit"] = min(
                (bandwidth / row.bytes_per_image, "bandwidth"),
                (cores / row.decode_seconds, "decoding"),
            )
        records.append(record)
    return records
