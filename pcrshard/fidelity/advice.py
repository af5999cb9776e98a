"""Predict throughput and recommend a scan from measured figures, without I/O."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

from ..format.scan import FULL, Scan
from .costs import human_bytes, name_scan, record_table

_ENOUGH = 0.95
_LOSS = 0.01
_NORMAL975 = 1.96


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
        num_small: Number of images too small for five scales; see :func:`msssim`.
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
    num_small: int
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
    has_network = any(row.top1 is not None for row in rows)
    # Keep rounding from deciding whether 0.74 is one point below 0.75.
    limit = max_loss + 1e-9
    is_enough = [
        (row.reference_top1 or 0) - (row.top1 or 0) <= limit
        if has_network
        else row.msssim >= min_msssim
        for row in ranked
    ]
    wanted = (
        f"a top-1 of your network at most {100 * max_loss:g} points below its "
        f"{_percent(ranked[0].reference_top1)} at {name_scan(ranked[0].reference)}"
        if has_network
        else f"a mean MS-SSIM of {min_msssim:g} or more"
    )
    num_below = max((place for place, good in enumerate(is_enough, 1) if not good), default=0)
    if num_below == len(ranked):
        best = max(ranked, key=lambda row: row.top1 or row.msssim)
        return Recommendation(FULL, f"no scan measured has {wanted}; best: {_described(best)}")
    found = ranked[num_below]
    reason = f"the lowest with {wanted}: {_described(found)}"
    if num_below:
        reason += f"; below: {_described(ranked[num_below - 1])}"
    if has_network and max_loss * found.num_images < 1:
        points = 100 / found.num_images
        reason += f"; one of {found.num_images} images is {points:.1f} points, so measure more"
    return Recommendation(found.scan, reason)


def _described(row: ScanFidelity) -> str:
    top1 = "" if row.top1 is None else f"top-1 {_percent(row.top1)}, "
    return (
        f"{name_scan(row.scan)} has {top1}MS-SSIM {row.msssim:.3f} (a quarter of the images below "
        f"{row.msssim_quartiles.q1:.3f}) at {row.saving:.2f} times fewer bytes than full"
    )


def _percent(fraction: float | None) -> str:
    return f"{100 * (fraction or 0.0):.1f} %"


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a fraction of ``count`` images (Wilson 1927).

    >>> [round(bound, 3) for bound in wilson_interval(0.75, 32)]
    [0.579, 0.867]
    """
    squared = _NORMAL975**2 / count
    whole = 1 + squared
    middle = (share + squared / 2) / whole
    half = math.sqrt(squared * (share * (1 - share) + squared / 4)) / whole
    return middle - half, middle + half


def fidelity_table(
    rows: Sequence[ScanFidelity],
    bandwidth: float | None = None,
    cores: float = math.inf,
) -> str:
    """Format the table of ``pcrshard fidelity``; a bandwidth adds :func:`throughput`."""
    lines: list[dict[str, object]] = []
    for row in rows:
        low, middle, high = map(human_bytes, row.image_bytes)
        worst, _, best = row.msssim_quartiles
        line: dict[str, object] = {
            "scan": row.scan,
            "bytes/sample": human_bytes(row.bytes_per_image),
            "image bytes [q1 q3]": f"{middle} [{low} {high}]",
            "saving": f"{row.saving:.2f}x",
            "MS-SSIM [q1 q3]": f"{row.msssim:.4f} [{worst:.4f} {best:.4f}]",
            "PSNR": f"{row.psnr:.1f}",
            "decode ms": f"{1000 * row.decode_seconds:.2f}",
        }
        if row.top1 is not None:
            lower, upper = wilson_interval(row.top1, row.num_images)
            line["top-1 [95 %]"] = f"{_percent(row.top1)} [{100 * lower:.1f} {100 * upper:.1f}]"
        if bandwidth is not None:
            rate, line["limit"] = throughput(row, bandwidth, cores)
            line["images/s"] = f"{rate:.0f}"
        lines.append(line)
    return record_table(lines)
