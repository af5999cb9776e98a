"""Predict throughput and recommend a scan from measured figures, without I/O."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..format.scan import FULL, Scan
from .costs import name_scan, record_table

_ENOUGH = 0.95
_LOSS = 0.01
# Fields of a measurement that its table leaves out.
_NOT_SHOWN = (
    "image_bytes",
    "msssim_quartiles",
    "num_images",
    "reference",
    "reference_top1",
)


class Quartiles(NamedTuple):
    """First quartile, median, third quartile."""

    q1: float
    median: float
    q3: float


class ScanFidelity(NamedTuple):
    """Measurements of one scan of a dataset.

    Attributes:
        scan: The scan.
        bytes_per_image: Bytes that a reader at this scan transfers per sample of the whole dataset,
            including index, padding and other fields.
        saving: Bytes of ``"full"`` over these bytes: the upper bound on a job's speedup (Theorem
            4.1 of the VLDB paper).
        image_bytes: The measured images' own bytes up to this scan.
        msssim: Mean MS-SSIM against ``reference``.
        msssim_quartiles: Quartiles of the MS-SSIM over the images.
        psnr: PSNR in dB of the squared error averaged over the images; infinite if all pixels are
            equal.
        decode_seconds: Mean CPU time to decode a whole image on one core of this machine.
        num_images: Images measured.
        reference: Scan that the images were compared with: ``"full"``, or the highest scan of a
            staged copy.
        top1: Fraction of the images that the user's network classifies correctly; ``None`` without
            one.
        reference_top1: The same at ``reference``.
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
    reference: Scan = FULL
    top1: float | None = None
    reference_top1: float | None = None


class Recommendation(NamedTuple):
    """A recommended scan and the reason for it."""

    scan: Scan
    reason: str


def throughput(row: ScanFidelity, bandwidth: float, cores: float = math.inf) -> tuple[float, str]:
    """Predict a job's images per second at a scan, and what limits it: bandwidth or decoding.

    It is X = W / E[s] (section 4.1 of the VLDB paper), up to the decoding rate.

    Args:
        row: Figures of the scan, from :func:`measure`.
        bandwidth: Storage bandwidth in bytes per second.
        cores: Number of cores dedicated to decoding whole images.
    """
    read = (bandwidth / row.bytes_per_image, "bandwidth")
    return min(read, (cores / row.decode_seconds, "decoding"))


def recommend(
    rows: Sequence[ScanFidelity],
    min_msssim: float = _ENOUGH,
    max_loss: float = _LOSS,
) -> Recommendation:
    """Return the lowest scan such that it and all higher scans pass, by top-1 or by MS-SSIM.

    Args:
        rows: Figures of each scan, from :func:`measure`.
        min_msssim: Minimum mean MS-SSIM, used if no network was measured. The paper found that
            groups above 0.95 perform well consistently, and that results below are hard to predict.
        max_loss: Maximum loss of the network's top-1 accuracy against the reference, as a fraction.

    Returns:
        The scan, or ``"full"`` if no row passes, and the reason in a sentence.
    """
    ranked = sorted(rows, key=operator.attrgetter("bytes_per_image"))
    reference = ranked[0].reference_top1
    if reference is None:
        needed = min_msssim
        scores = [row.msssim for row in ranked]
        wanted = f"a mean MS-SSIM of {min_msssim:g} or more"
    else:
        needed = reference - max_loss
        scores = [row.top1 or 0.0 for row in ranked]
        wanted = (
            f"a top-1 of your network at most {100 * max_loss:g} points below its "
            f"{_percent(reference)} at {name_scan(ranked[0].reference)}"
        )
    # Keep rounding from deciding whether 0.74 is one point below 0.75.
    too_low = [place for place, score in enumerate(scores, 1) if score < needed - 1e-9]
    num_below = max(too_low, default=0)
    if num_below == len(ranked):
        best = ranked[scores.index(max(scores))]
        return Recommendation(FULL, f"no scan measured has {wanted}; best: {_described(best)}")
    found = ranked[num_below]
    reason = f"the lowest with {wanted}: {_described(found)}"
    if num_below:
        reason += f"; below: {_described(ranked[num_below - 1])}"
    if reference is not None and max_loss * found.num_images < 1:
        points = 100 / found.num_images
        reason += f"; one of {found.num_images} images is {points:.1f} points, so measure more"
    return Recommendation(found.scan, reason)


def _described(row: ScanFidelity) -> str:
    top1 = "" if row.top1 is None else f"top-1 {_percent(row.top1)}, "
    return (
        f"{name_scan(row.scan)} has {top1}MS-SSIM {row.msssim:.3f} (a quarter of the images below "
        f"{row.msssim_quartiles.q1:.3f}) at {row.saving:.2f} times fewer bytes than full"
    )


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def with_throughput(
    rows: Sequence[ScanFidelity],
    bandwidth: float | None = None,
    cores: float = math.inf,
) -> list[dict[str, Any]]:
    """Return the figures of each scan by name, with :func:`throughput` if a bandwidth is given."""
    records = [row._asdict() for row in rows]
    if bandwidth is not None:
        for record, row in zip(records, rows, strict=True):
            record["images_per_second"], record["limit"] = throughput(row, bandwidth, cores)
    return records


def fidelity_table(
    rows: Sequence[ScanFidelity],
    bandwidth: float | None = None,
    cores: float = math.inf,
) -> str:
    """Format the table of ``pcrshard fidelity``; a bandwidth adds :func:`throughput`."""
    return record_table(with_throughput(rows, bandwidth, cores), omit=_NOT_SHOWN)
