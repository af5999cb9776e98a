"""A picture of some images at common scans, and their differences from the last scan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..format.levels import LEVELS
from ..format.scan import FULL, Scan
from ..jpeg.pixels import decode_image
from ..storage import Options
from .costs import human_bytes
from .msssim import Reference, count_scales, middle
from .plots import saved_figure
from .sampled_images import draw_images


def contact_sheet(
    url: str,
    path: str,
    scans: Sequence[int] = (1, 2, 5),
    *,
    recommended: Scan | None = None,
    num_images: int = 3,
    seed: int = 0,
    side: int = 224,
    storage_options: Options = None,
) -> None:
    """Draw random images at some scans side by side, with differences from the last scan below.

    The last scan has the pixels of full fidelity, or is the highest of a staged copy.

    Args:
        url: The dataset's folder.
        path: Target file, a PNG.
        scans: Scans shown before the last one; others are left out.
        recommended: A scan that is shown, too, and marked.
        num_images: Number of images.
        seed: Random seed; the same seed picks the same images.
        side: Maximum side in pixels of the square center crop shown of each image.
        storage_options: fsspec storage options.

    Raises:
        MissingDependency: matplotlib or OpenCV is not installed.
        StorageError: The picture cannot be written.
        PCRError: As for :func:`measure`.
    """
    sample = draw_images(url, num_images, seed, num_images, storage_options)
    last = sample.dataset.scan or sample.dataset.num_groups
    marked = last if recommended == FULL else recommended
    name = "level" if sample.dataset.script == LEVELS else "scan"
    wanted = sorted({*scans, *([] if marked is None else [marked])})
    shown = [*(scan for scan in wanted if scan < last), last]
    with saved_figure(path, 2.3 * len(shown), 4.9 * num_images) as figure:
        axes = figure.subplots(2 * num_images, len(shown), squeeze=False)
        for plot in axes.flat:
            plot.axis("off")
        for (pieces, _), upper, lower in zip(sample.images(), axes[::2], axes[1::2], strict=False):
            full = decode_image(pieces)
            compare = Reference(full).compare if count_scales(*full.shape[:2]) else lambda _: np.nan
            for scan, picture, difference in zip(shown, upper, lower, strict=True):
                pixels = decode_image(pieces[:scan])
                size = human_bytes(sum(map(len, pieces[:scan])))
                mark = " (recommended)" if scan == marked else ""
                caption = f"{name} {scan}: {size}{mark}\nMS-SSIM {compare(pixels):.3f}"
                picture.set_title(caption, fontsize=11)
                picture.imshow(middle(pixels, side))
                amplified = 128 + 4 * (middle(pixels, side) - middle(full, side).astype(np.int16))
                difference.imshow(np.clip(amplified, 0, 255).astype(np.uint8))
        title = f"middle of each image,\nand four times its difference to {name} {last}"
        figure.suptitle(f"script {sample.dataset.script}: {title}", fontsize=13)
