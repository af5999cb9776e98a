"""The one door to matplotlib: pictures of sizes and scans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import MissingDependency, StorageError
from ..format.scan import FULL, Scan
from ..jpeg.pixels import Pixels
from .costs import ScanCost, human_bytes

_BLUE, _GREY = "#2b6cb0", "#4a5568"


class Picture(NamedTuple):
    """One image at one scan, for :func:`plot_contact_sheet`."""

    key: str
    scan: Scan
    num_bytes: int
    msssim: float
    pixels: Pixels


def pyplot_module() -> Any:
    """matplotlib.pyplot, drawing to files; raises MissingDependency."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependency(
            "matplotlib is not installed: pip install 'pcrshard[train]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_scan_costs(costs: Sequence[ScanCost], path: str, *, title: str) -> None:
    """Bars of bytes per sample at each scan, saved as PNG."""
    pyplot = pyplot_module()
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    draw_scan_costs(axes, costs)
    axes.set_title(title)
    save_figure(figure, path)


def save_figure(figure: Any, path: str) -> None:
    """Save a figure as PNG and close it; raises StorageError."""
    try:
        figure.savefig(path, dpi=100)
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot save the picture: {error}", url=path) from error
    finally:
        pyplot_module().close(figure)


def draw_scan_costs(axes: Any, costs: Sequence[ScanCost]) -> None:
    """The bars, with the saving written on each."""
    bars = axes.bar(
        [str(c.scan) for c in costs], [c.bytes_per_sample / 1000 for c in costs], color=_BLUE
    )
    axes.bar_label(bars, [f"{c.saving:.1f}x" for c in costs], padding=2, color=_GREY)
    axes.set_xlabel("read up to scan (label: times fewer bytes than full)")
    axes.set_ylabel("bytes per sample (kB)")
    axes.spines[["top", "right"]].set_visible(False)


def plot_ladder(
    images: Sequence[tuple[str, int, Pixels]], costs: Sequence[ScanCost], path: str, *, title: str
) -> None:
    """One image at several scans above the bars of :func:`plot_scan_costs`, saved as PNG.

    Args:
        images: (label, bytes, (H, W, 3) uint8) of each rung.
        costs: Of the whole dataset.
        path: Target file.
        title: Above the figure.
    """
    pyplot = pyplot_module()
    figure = pyplot.figure(figsize=(12, 7), layout="constrained")
    mosaic = [[f"image{i}" for i in range(len(images))], ["bars"] * len(images)]
    axes = figure.subplot_mosaic(mosaic, height_ratios=[1, 1.4])
    for i, (label, size, pixels) in enumerate(images):
        axes[f"image{i}"].imshow(pixels)
        axes[f"image{i}"].set_title(f"{label}\n{human_bytes(size)}", fontsize=10)
        axes[f"image{i}"].axis("off")
    draw_scan_costs(axes["bars"], costs)
    figure.suptitle(title)
    save_figure(figure, path)


def plot_fidelity(
    scans: Sequence[object],
    kilobytes: Sequence[float],
    msssim: Sequence[float],
    path: str,
    *,
    title: str,
) -> None:
    """Draw MS-SSIM over bytes per sample, one point a scan, saved as PNG."""
    pyplot = pyplot_module()
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    axes.plot(kilobytes, msssim, "o-", color="#2b6cb0")
    for scan, x, y in zip(scans, kilobytes, msssim, strict=True):
        axes.annotate(str(scan), (x, y), textcoords="offset points", xytext=(5, -12), fontsize=9)
    axes.set_xlabel("kB per sample, cumulative")
    axes.set_ylabel("mean MS-SSIM against full fidelity")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def plot_contact_sheet(rows: Sequence[Sequence[Picture]], path: str, *, title: str) -> None:
    """Draw one image a row, its scans from left to right, full fidelity last; below each its difference to the last, times four about gray."""
    pyplot = pyplot_module()
    columns = len(rows[0])
    figure, axes = pyplot.subplots(
        2 * len(rows),
        columns,
        figsize=(2.3 * columns, 4.9 * len(rows)),
        layout="constrained",
        squeeze=False,
    )
    for r, pictures in enumerate(rows):
        reference = pictures[-1].pixels.astype(np.int16)
        for c, picture in enumerate(pictures):
            above, below = axes[2 * r][c], axes[2 * r + 1][c]
            above.imshow(picture.pixels)
            scan = FULL if picture.scan == FULL else f"scan {picture.scan}"
            above.set_title(
                f"{scan}: {human_bytes(picture.num_bytes)}\nMS-SSIM {picture.msssim:.3f}",
                fontsize=9,
            )
            below.imshow(np.clip(128 + 4 * (picture.pixels - reference), 0, 255).astype(np.uint8))
            above.axis("off")
            below.axis("off")
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)
