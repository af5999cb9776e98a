"""What the measured figures of scans say: a job's rate, and which scan to take; pure."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from ..format.scan import FULL, Scan
from .costs import human_bytes, name_scan, table

_ENOUGH = 0.95
_LOSS = 0.01
_NORMAL975 = 1.96
_HEADER = (
    "scan",
    "bytes/sample",
    "image bytes [q1 q3]",
    "saving",
    "MS-SSIM [q1 q3]",
    "PSNR",
    "decode ms",
)


class Quartiles(NamedTuple):
    """First quartile, median, third quartile."""

    q1: float
    median: float
    q3: float


class ScanFidelity(NamedTuple):
    """What was measured of one scan of a dataset.

    Attributes:
        scan: The scan.
        bytes_per_image: Bytes that a reader at this scan moves per sample of the whole dataset,
            with index, padding and other fields.
        saving: Bytes of ``"full"`` over these, which is the most that a job can gain (Theorem 4.1
            of the VLDB paper).
        image_bytes: The measured images' own bytes up to this scan.
        msssim: Mean MS-SSIM against ``reference``.
        msssim_quartiles: MS-SSIM over the images.
        psnr: PSNR in dB of the squared error averaged over the images; infinite where all pixels
            are equal.
        decode_seconds: Mean CPU time to decode a whole image on one core of this machine.
        num_images: Images measured.
        num_small: How many of them were too small for five scales, see :func:`msssim`.
        reference: What the images were compared with: ``"full"``, or the highest scan of a staged
            copy.
        top1: Share of the images that the user's network names right; ``None`` without one.
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


class Throughput(NamedTuple):
    """Images a second that a job can get at a scan, and what limits it."""

    images_per_second: float
    limit: Literal["bandwidth", "decoding"]


class Recommendation(NamedTuple):
    """A scan, and why."""

    scan: Scan
    reason: str


def throughput(
    row: ScanFidelity,
    bandwidth: float,
    cores: float = math.inf,
) -> Throughput:
    """Predict a job's rate at a scan.

    It is X = W / E[s] (section 4.1 of the VLDB paper) until decoding is the limit.

    Args:
        row: Figures of the scan, from :func:`measure`.
        bandwidth: Bytes a second that the storage gives.
        cores: Cores that do nothing but decode whole images.
    """
    read = Throughput(bandwidth / row.bytes_per_image, "bandwidth")
    decoded = Throughput(cores / row.decode_seconds, "decoding")
    return min(read, decoded)


def recommend(
    rows: Sequence[ScanFidelity],
    min_msssim: float = _ENOUGH,
    max_loss: float = _LOSS,
) -> Recommendation:
    """The lowest scan that is enough: by the user's network if one was asked, else by MS-SSIM.

    Args:
        rows: Figures of each scan, from :func:`measure`.
        min_msssim: Least mean MS-SSIM. The paper found its groups above 0.95 to perform well
            consistently, and change hard to predict below.
        max_loss: Most that the network's top-1 may lose to the reference, as a share of the images.

    Returns:
        A scan, ``"full"`` if none of the rows is enough, and the reason in a sentence.
    """
    ranked = sorted(rows, key=operator.attrgetter("bytes_per_image"))
    if _has_answers(rows):
        return _recommend_by_network(ranked, max_loss)
    return _recommend_by_likeness(ranked, min_msssim)


def _has_answers(rows: Sequence[ScanFidelity]) -> bool:
    """Whether a network was asked."""
    return any(row.top1 is not None for row in rows)


def _recommend_by_likeness(ranked: Sequence[ScanFidelity], min_msssim: float) -> Recommendation:
    """The first scan that is alike enough."""
    below = list(itertools.takewhile(lambda row: row.msssim < min_msssim, ranked))
    if len(below) == len(ranked):
        return _none_alike(ranked, min_msssim)
    found = ranked[len(below)]
    reason = (
        f"scan {found.scan} is the first with a mean MS-SSIM of {min_msssim:g} or more "
        f"({found.msssim:.3f}, a quarter of the images below {found.msssim_quartiles.q1:.3f}), "
        f"and reads {_fewer(found)} bytes than full"
    )
    if below:
        lower = below[-1]
        reason += f"; scan {lower.scan} has {lower.msssim:.3f} at {_fewer(lower)}"
    return Recommendation(found.scan, reason)


def _none_alike(ranked: Sequence[ScanFidelity], min_msssim: float) -> Recommendation:
    best = max(ranked, key=operator.attrgetter("msssim"))
    return Recommendation(
        FULL,
        f"no scan measured reaches MS-SSIM {min_msssim:g}; "
        f"the best is scan {best.scan} with {best.msssim:.3f}",
    )


def _fewer(row: ScanFidelity) -> str:
    return f"{row.saving:.2f} times fewer"


def _recommend_by_network(ranked: Sequence[ScanFidelity], max_loss: float) -> Recommendation:
    """The lowest scan from which on the network's top-1 loses no more than ``max_loss``."""
    num_below = _num_below(ranked, max_loss)
    limit = f"{100 * max_loss:g} point{'s' * (max_loss > _LOSS)}"
    first = ranked[0]
    at_best = f"{_percent(first.reference_top1)} at {name_scan(first.reference)}"
    if num_below == len(ranked):
        reason = f"your network's top-1 is more than {limit} below its {at_best} at each scan"
        return Recommendation(FULL, reason)
    found = ranked[num_below]
    reason = (
        f"from scan {found.scan} on your network's top-1 loses at most {limit} "
        f"({_percent(found.top1)}, {at_best}; mean MS-SSIM {found.msssim:.3f}), "
        f"and it reads {_fewer(found)} bytes than full"
    )
    return Recommendation(found.scan, reason + _doubt(first.num_images, max_loss))


def _num_below(ranked: Sequence[ScanFidelity], max_loss: float) -> int:
    """How many of the scans are not above one whose loss is too large."""
    # Rounding must not decide whether 0.74 is a point below 0.75.
    limit = max_loss + 1e-9
    return max((place for place, row in enumerate(ranked, 1) if _loss(row) > limit), default=0)


def _doubt(num_images: int, max_loss: float) -> str:
    if max_loss * num_images >= 1:
        return ""
    return f"; one of {num_images} images is {100 / num_images:.1f} points, so measure more"


def _loss(row: ScanFidelity) -> float:
    """What a network's top-1 loses to the reference."""
    return (row.reference_top1 or 0.0) - (row.top1 or 0.0)


def _percent(share: float | None) -> str:
    return f"{100 * (share or 0.0):.1f} %"


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share of so many images (Wilson 1927).

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
    """The table of ``pcrshard fidelity``; with a bandwidth also the rates of :func:`throughput`."""
    header = list(_HEADER)
    lines = [_cells(row) for row in rows]
    if _has_answers(rows):
        header.append("top-1 [95 %]")
    if bandwidth is not None:
        header += ["images/s", "limit"]
        for line, row in zip(lines, rows, strict=True):
            rate = throughput(row, bandwidth, cores)
            line += [f"{rate.images_per_second:.0f}", rate.limit]
    return table(header, lines)


def _cells(row: ScanFidelity) -> list[object]:
    cells: list[object] = [
        row.scan,
        human_bytes(row.bytes_per_image),
        _spread(human_bytes, row.image_bytes),
        f"{row.saving:.2f}x",
        _spread("{:.4f}".format, row.msssim_quartiles._replace(median=row.msssim)),
        f"{row.psnr:.1f}",
        f"{1000 * row.decode_seconds:.2f}",
    ]
    if row.top1 is not None:
        cells.append(_share(row.top1, row.num_images))
    return cells


def _spread(shown: Callable[[float], str], quartiles: Quartiles) -> str:
    low, middle, high = map(shown, quartiles)
    return f"{middle} [{low} {high}]"


def _share(share: float, count: int) -> str:
    low, high = wilson_interval(share, count)
    return f"{_percent(share)} [{100 * low:.1f} {100 * high:.1f}]"
