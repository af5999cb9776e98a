"""The one door to matplotlib: pictures of sizes and scans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import MissingDependency, StorageError
from ..format.scan import Scan
from ..jpeg.pixels import Pixels
from .costs import ScanCost, human_bytes, name_scan

_BLUE = "#2b6cb0"
_GREY = "#4a5568"


class Picture(NamedTuple):
    """One image at one scan, for :func:`plot_contact_sheet`."""

    scan: Scan
    num_bytes: int
    msssim: float
    pixels: Pixels


def pyplot_module() -> Any:
    """matplotlib.pyplot, drawing to files.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependency(
            "matplotlib is not installed: pip install 'pcrshard[train]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_scan_costs(
    costs: Sequence[ScanCost],
    path: str,
    *,
    title: str,
) -> None:
    """Draw bars of the bytes per sample at each scan, saved as PNG."""
    figure, axes = _figure(8, 4.5)
    _draw_bars(axes, costs)
    axes.set_title(title)
    _save(figure, path)


def _figure(width: float, height: float) -> Any:
    return pyplot_module().subplots(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: str) -> None:
    try:
        figure.savefig(path, dpi=100)
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot save the picture: {error}", url=path) from error
    finally:
        pyplot_module().close(figure)


def _label(
    axes: Any,
    across: str,
    up: str,
) -> None:
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_bars(axes: Any, costs: Sequence[ScanCost]) -> None:
    """The bars, with the saving written on each."""
    scans, _, sizes, savings = zip(*costs, strict=True)
    bars = axes.bar(list(map(str, scans)), [size / 1000 for size in sizes], color=_BLUE)
    axes.bar_label(bars, [f"{saving:.1f}x" for saving in savings], padding=2, color=_GREY)
    _label(axes, "read up to scan (label: times fewer bytes than full)", "bytes per sample (kB)")


def plot_ladder(
    images: Sequence[tuple[str, int, Pixels]],
    costs: Sequence[ScanCost],
    path: str,
    *,
    title: str,
) -> None:
    """Draw one image at several scans above the bars of :func:`plot_scan_costs`, saved as PNG.

    Args:
        images: Label, bytes and (H, W, 3) uint8 pixels of each rung.
        costs: Costs of the whole dataset.
        path: Target file.
        title: Text above the figure.
    """
    figure = pyplot_module().figure(figsize=(12, 7), layout="constrained")
    rungs = range(len(images))
    axes = figure.subplot_mosaic([[*rungs], ["bars"] * len(rungs)], height_ratios=[1, 1.4])
    for rung, (label, num_bytes, pixels) in enumerate(images):
        _draw_image(axes[rung], pixels, f"{label}\n{human_bytes(num_bytes)}", fontsize=10)
    _draw_bars(axes["bars"], costs)
    figure.suptitle(title)
    _save(figure, path)


def _draw_image(
    axes: Any,
    pixels: Pixels,
    title: str = "",
    fontsize: int = 9,
) -> None:
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
    """Draw MS-SSIM over bytes per sample, one point a scan, saved as PNG.

    Args:
        scans: Labels of the points.
        kilobytes: kB per sample at each scan.
        msssim: Mean MS-SSIM at each scan.
        path: Target file.
        title: Text above the figure.
    """
    figure, axes = _figure(8, 4)
    axes.plot(kilobytes, msssim, "o-", color=_BLUE)
    for scan, *point in zip(scans, kilobytes, msssim, strict=True):
        axes.annotate(
            str(scan),
            point,
            textcoords="offset points",
            xytext=(5, -12),
            fontsize=9,
        )
    _label(axes, "kB per sample, cumulative", "mean MS-SSIM against full fidelity")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.3)
    _save(figure, path)


def plot_contact_sheet(
    images: Sequence[Sequence[Picture]],
    path: str,
    *,
    title: str,
) -> None:
    """Draw images at several scans, saved as PNG.

    Below each picture is its difference to full fidelity, times four about gray.

    Args:
        images: Each image's pictures from left to right, full fidelity last.
        path: Target file.
        title: Text above the figure.
    """
    rows = len(images)
    columns = len(images[0])
    figure = pyplot_module().figure(figsize=(2.3 * columns, 4.9 * rows), layout="constrained")
    axes = figure.subplots(2 * rows, columns, squeeze=False)
    for row, pictures in enumerate(images):
        for column, picture in enumerate(pictures):
            upper, lower = axes[2 * row : 2 * row + 2, column]
            _draw_image(upper, picture.pixels, _caption(picture))
            _draw_image(lower, _difference(picture.pixels, pictures[-1].pixels))
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def _difference(pixels: Pixels, reference: Pixels) -> Pixels:
    difference = 128 + 4 * (pixels - reference.astype(np.int16))
    return np.clip(difference, 0, 255).astype(np.uint8)


def _caption(picture: Picture) -> str:
    name = name_scan(picture.scan)
    return f"{name}: {human_bytes(picture.num_bytes)}\nMS-SSIM {picture.msssim:.3f}"
