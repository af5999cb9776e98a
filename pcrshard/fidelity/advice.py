"""Predict throughput and recommend a scan from measured figures, without I/O."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..format.scan import FULL, Scan

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
        msssim_quartile: First quartile of the MS-SSIM over the images.
        psnr: PSNR in dB of the squared error averaged over the images; infinite if all pixels are
            equal.
        decode_seconds: Mean CPU time to decode a whole image on one core of this machine.
        num_images: Images measured.
        top1: Fraction of the images that the user's network classifies correctly; ``None`` without
            one.
    """

    scan: Scan
    bytes_per_image: float
    saving: float
    msssim: float
    msssim_quartile: float
    psnr: float
    decode_seconds: float
    num_images: int
    top1: float | None = None


class Recommendation(NamedTuple):
    """A recommended scan and the reason for it."""

    scan: Scan
    reason: str


def recommend(rows: Sequence[ScanFidelity], min_msssim: float = _ENOUGH) -> Recommendation:
    """Return the lowest scan such that it and all higher scans pass, by top-1 or by MS-SSIM.

    Args:
        rows: Figures of each scan, from :func:`measure`.
        min_msssim: Minimum mean MS-SSIM, used if no network was measured. The paper found that
            groups above 0.95 perform well consistently, and that results below are hard to predict.
            A network must come within a point of its top-1 accuracy at the highest scan instead.

    Returns:
        The scan, or ``"full"`` if no row passes, and the reason in a sentence.
    """
    ranked = sorted(rows, key=operator.attrgetter("bytes_per_image"))
    reference = ranked[-1].top1
    if reference is None:
        wanted = f"a mean MS-SSIM of {min_msssim:g} or more"
        passes = [row.msssim >= min_msssim for row in ranked]
    else:
        at = ranked[-1].scan
        wanted = f"a top-1 at most 1 point below the {reference:.1%} of your network at scan {at}"
        # Keep rounding from deciding whether 0.74 is one point below 0.75.
        passes = [(row.top1 or 0.0) >= reference - _LOSS - 1e-9 for row in ranked]
    num_below = max((place for place, passed in enumerate(passes, 1) if not passed), default=0)
    if num_below == len(ranked):
        return Recommendation(FULL, f"no scan measured has {wanted}")
    return Recommendation(ranked[num_below].scan, f"the lowest with {wanted}")


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
        del record["num_images"]  # the same at each scan
        # JSON has no infinity.
        record["psnr"] = row.psnr if math.isfinite(row.psnr) else None
        if bandwidth is not None:
            record["images_per_second"], record["limit"] = min(
                (bandwidth / row.bytes_per_image, "bandwidth"),
                (cores / row.decode_seconds, "decoding"),
            )
        records.append(record)
    return records
