"""Plots of sizes and scans; the only importer of matplotlib."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..errors import MissingDependency, StorageError
from ..format.scan import Scan
from ..jpeg.pixels import Pixels
from .costs import ScanCost, human_bytes, name_scan

_BLUE = "#2b6cb0"
_GRAY = "#4a5568"


class Picture(NamedTuple):
    """One image at one scan, for :func:`plot_contact_sheet`."""

    scan: Scan
    num_bytes: int
    msssim: float
    pixels: Pixels


def pyplot_module() -> Any:
    """Return matplotlib.pyplot, set up to draw to files.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependency(
            "matplotlib is not installed: pip install 'pcrshard[fidelity]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def check_target(path: str) -> None:
    """Raise early if a figure could not be saved to this path, before any work is done.

    Raises:
        MissingDependency: matplotlib is not installed.
        StorageError: The folder does not exist, or matplotlib cannot write the format.
    """
    pyplot_module()
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    if not os.path.isdir(os.path.dirname(path) or "."):
        raise StorageError("cannot save the picture: there is no such folder", url=path)
    suffix = os.path.splitext(path)[1][1:]
    if suffix and suffix not in FigureCanvasAgg.filetypes:
        raise StorageError(f"cannot save the picture as {suffix!r}, use .png", url=path)


@contextmanager
def saved_figure(path: str, width: float, height: float) -> Iterator[Any]:
    """Yield a new figure of this size in inches, and save it on exit.

    Raises:
        MissingDependency: matplotlib is not installed.
        StorageError: The picture cannot be written.
    """
    pyplot = pyplot_module()
    # Whatever style the caller's program has set, grids and dark colors are for its own figures.
    with pyplot.style.context("default"):
        figure = pyplot.figure(figsize=(width, height), layout="constrained")
        try:
            yield figure
            try:
                figure.savefig(path, dpi=100)
            except (OSError, ValueError) as error:
                raise StorageError(f"cannot save the picture: {error}", url=path) from error
        finally:
            pyplot.close(figure)


def plot_scan_costs(costs: Sequence[ScanCost], path: str, *, title: str) -> None:
    """Draw bars of the bytes per sample at each scan, saved as PNG."""
    with saved_figure(path, 8, 4.5) as figure:
        axes = figure.subplots()
        _draw_bars(axes, costs)
        axes.set_title(title)


def _draw_bars(axes: Any, costs: Sequence[ScanCost]) -> None:
    """Draw the bars, each labeled with its saving."""
    bars = axes.bar(
        [str(cost.scan) for cost in costs],
        [cost.bytes_per_sample / 1000 for cost in costs],
        color=_BLUE,
    )
    axes.bar_label(bars, [f"{cost.saving:.1f}x" for cost in costs], padding=2, color=_GRAY)
    axes.set_xlabel("read up to scan (label: times fewer bytes than full)")
    axes.set_ylabel("bytes per sample (kB)")
    axes.spines[["top", "right"]].set_visible(False)


def plot_ladder(
    images: Sequence[tuple[str, int, Pixels]],
    costs: Sequence[ScanCost],
    path: str,
    *,
    title: str,
) -> None:
    """Draw one image at several scans above the bars of :func:`plot_scan_costs`, saved as PNG.

    Args:
        images: Label, bytes and (H, W, 3) uint8 pixels of the image at each scan.
        costs: Costs of the whole dataset.
        path: Target file.
        title: Text above the figure.
    """
    with saved_figure(path, 12, 7) as figure:
        columns = range(len(images))
        axes = figure.subplot_mosaic([[*columns], ["bars"] * len(images)], height_ratios=[1, 1.4])
        for column, (label, num_bytes, pixels) in enumerate(images):
            _draw_image(axes[column], pixels, f"{label}\n{human_bytes(num_bytes)}", fontsize=10)
        _draw_bars(axes["bars"], costs)
        figure.suptitle(title)


def _draw_image(axes: Any, pixels: Pixels, title: str = "", fontsize: int = 9) -> None:
    axes.imshow(pixels)
    axes.set_title(title, fontsize=fontsize)
    axes.axis("off")


def plot_fidelity(
    scans: Sequence[object],
    kilobytes: Sequence[float],
    msssim: Sequence[float],
    path: str,
    *,
    title: str,
) -> None:
    """Plot MS-SSIM against bytes per sample, one point per scan, saved as PNG.

    Args:
        scans: Labels of the points.
        kilobytes: kB per sample at each scan.
        msssim: Mean MS-SSIM at each scan.
        path: Target file.
        title: Text above the figure.
    """
    with saved_figure(path, 8, 4) as figure:
        axes = figure.subplots()
        axes.plot(kilobytes, msssim, "o-", color=_BLUE)
        for scan, *point in zip(scans, kilobytes, msssim, strict=True):
            axes.annotate(str(scan), point, textcoords="offset points", xytext=(5, -12), fontsize=9)
        axes.set_xlabel("kB per sample, cumulative")
        axes.set_ylabel("mean MS-SSIM against full fidelity")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(title, fontsize=11)
        axes.grid(alpha=0.3)


def plot_contact_sheet(images: Sequence[Sequence[Picture]], path: str, *, title: str) -> None:
    """Draw images at several scans, saved as PNG.

    Below each picture is its difference from full fidelity, times four around gray.

    Args:
        images: Each image's pictures from left to right, full fidelity last.
        path: Target file.
        title: Text above the figure.
    """
    rows = len(images)
    columns = len(images[0])
    with saved_figure(path, 2.3 * columns, 4.9 * rows) as figure:
        axes = figure.subplots(2 * rows, columns, squeeze=False)
        for row, pictures in enumerate(images):
            full = pictures[-1].pixels.astype(np.int16)
            for column, picture in enumerate(pictures):
                upper, lower = axes[2 * row : 2 * row + 2, column]
                size = human_bytes(picture.num_bytes)
                caption = f"{name_scan(picture.scan)}: {size}\nMS-SSIM {picture.msssim:.3f}"
                _draw_image(upper, picture.pixels, caption)
                difference = 128 + 4 * (picture.pixels - full)
                _draw_image(lower, np.clip(difference, 0, 255).astype(np.uint8))
        figure.suptitle(title, fontsize=10)
