"""A picture of some images at common scans, and their differences from full fidelity."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from ..format.scan import FULL, Scan, check_scan
from ..jpeg.pixels import SMOOTHING, Pixels, decode_image
from ..storage import Options
from .msssim import Reference, count_scales, middle
from .plots import Picture, plot_contact_sheet, pyplot_module
from .sampled_images import ImageSample, Pieces, draw_images

_SHOWN = (1, 2, 5)
# Scans, and the number of pieces of each.
Columns = Sequence[tuple[Scan, int]]
Compare = Callable[[Pixels], float]
Decode = Callable[[Pieces], Pixels]


def contact_sheet(
    url: str,
    path: str,
    scans: Sequence[Scan] | None = None,
    *,
    num_images: int = 3,
    seed: int = 0,
    side: int = 224,
    storage_options: Options = None,
    reference: str | None = None,
    smoothing: bool = SMOOTHING,
) -> None:
    """Draw random images at some scans side by side, with differences from the last scan below.

    The last scan is full fidelity, or the highest scan of a staged copy.

    Args:
        url: The dataset's folder.
        path: Target file, a PNG.
        scans: Scans shown before the last one; 1, 2 and 5 by default.
        num_images: Number of images.
        seed: Random seed; the same seed picks the same images.
        side: Maximum side in pixels of the square center crop shown of each image.
        storage_options: fsspec storage options.
        reference: The dataset that ``url`` is a staged copy of.
        smoothing: As for :class:`pcrshard.ImageDecoder`.

    Raises:
        MissingDependency: matplotlib or OpenCV is not installed.
        PCRError: As for :func:`measure`.
    """
    pyplot_module()
    sample = draw_images(
        url, num_images, seed, num_images, reference=reference, storage_options=storage_options
    )
    columns = _columns(sample, scans)
    decode = partial(decode_image, smoothing=smoothing)
    rows = [pictures for pictures, _ in sample.look(partial(_draw_row, columns, decode, side))]
    best = "full fidelity" if sample.top == FULL else f"scan {sample.top}"
    title = f"middle of each image, and four times its difference to {best}"
    plot_contact_sheet(rows, path, title=f"script {sample.dataset.script}: {title}")


def _columns(sample: ImageSample, scans: Sequence[Scan] | None) -> Columns:
    """Return the scans shown and the number of pieces of each."""
    num_groups = sample.dataset.num_groups
    last = min(check_scan(sample.top, num_groups), num_groups)
    shown = [scan for scan in _SHOWN if scan < last] if scans is None else scans
    return [(scan, check_scan(scan, num_groups)) for scan in [*shown, sample.top]]


def _draw_row(
    columns: Columns,
    decode: Decode,
    side: int,
    pieces: Pieces,
) -> list[Picture]:
    compare = _comparison(decode(pieces))
    pictures = []
    for scan, stop in columns:
        pixels = decode(pieces[:stop])
        num_bytes = sum(map(len, pieces[:stop]))
        pictures.append(Picture(scan, num_bytes, compare(pixels), middle(pixels, side)))
    return pictures


def _comparison(pixels: Pixels) -> Compare:
    """Return a function that gives MS-SSIM against ``pixels``, or NaN if they are too small."""
    is_comparable = count_scales(*pixels.shape[:2]) > 0
    return Reference(pixels).compare if is_comparable else lambda _: math.nan
