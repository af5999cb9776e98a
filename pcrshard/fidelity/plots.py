"""Figures saved as files; the only importer of matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import MissingDependency, StorageError
from ..format.scan import Scan
from .advice import ScanFidelity

# Least distance of labels, as a fraction of the width or the height of a plot.
_LABEL_SIZE = (0.03, 0.05)


def figure_class() -> Any:
    """Return matplotlib's ``Figure``.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency(
            "matplotlib is not installed: pip install 'pcrshard[fidelity]'"
        ) from error
    return Figure


@contextmanager
def saved_figure(path: str, width: float, height: float) -> Iterator[Any]:
    """Yield a new figure of this size in inches, and save it on exit.

    Raises:
        MissingDependency: matplotlib is not installed.
        StorageError: The picture cannot be written.
    """
    figure = figure_class()(figsize=(width, height), layout="constrained")
    yield figure
    try:
        figure.savefig(path, dpi=100)
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot save the picture: {error}", url=path) from error


def plot_fidelity(
    rows: Sequence[ScanFidelity],
    path: str,
    *,
    title: str,
    name: str = "scan",
    enough: float | None = None,
    recommended: Scan | None = None,
) -> None:
    """Plot MS-SSIM against bytes per sample, one point per scan, saved as PNG.

    Args:
        rows: Figures of each scan, from :func:`measure`.
        path: Target file.
        title: Text above the figure.
        name: What a scan is called: ``"level"`` where it is a quality.
        enough: Minimum MS-SSIM, drawn as a line.
        recommended: The recommended scan, which is marked.
    """
    points = [(row.bytes_per_image / 1000, row.msssim) for row in rows]
    with saved_figure(path, 8, 4) as figure:
        axes = figure.subplots()
        axes.plot(*zip(*points, strict=True), "o-", color="#2b6cb0")
        bounds = [row.msssim_interval or (row.msssim, row.msssim) for row in rows]
        sizes = [size for size, _ in points]
        axes.fill_between(sizes, *zip(*bounds, strict=True), color="#2b6cb0", alpha=0.15, lw=0)
        if enough is not None:
            axes.axhline(enough, color="#b91c1c", linewidth=1, linestyle="--")
            axes.annotate(
                f"enough: {enough:g}",
                (1, enough),
                (-4, -4),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                va="top",
                fontsize=9,
                color="#b91c1c",
            )
        for row, point in zip(rows, points, strict=True):
            if row.scan == recommended:
                axes.plot(*point, "o", markersize=12, fillstyle="none", color="#b91c1c")
        # To the lower right: the curve rises.
        for text, point in _labels(rows, points):
            axes.annotate(text, point, (4, -12), textcoords="offset points", fontsize=9)
        axes.set_xlabel("kB per sample, cumulative")
        axes.set_ylabel("mean MS-SSIM against full fidelity")
        axes.spines[["top", "right"]].set_visible(False)
        marked = "" if recommended is None else f"\nrecommended: {name} {recommended}"
        axes.set_title(title + marked, fontsize=11)
        axes.margins(y=0.12)
        axes.grid(alpha=0.3)


def _labels(
    rows: Sequence[ScanFidelity], points: Sequence[tuple[float, float]]
) -> list[tuple[str, tuple[float, float]]]:
    """Return a label for each point, and one for points so close that labels would collide."""
    least = [
        part * (max(values) - min(values))
        for part, values in zip(_LABEL_SIZE, zip(*points, strict=True), strict=True)
    ]
    groups: list[list[int]] = []
    for place, point in enumerate(points):
        before = points[groups[-1][-1]] if groups else point
        if groups and all(b - a < most for a, b, most in zip(before, point, least, strict=True)):
            groups[-1].append(place)
        else:
            groups.append([place])
    labels = []
    for group in groups:
        scans = [str(rows[place].scan) for place in group]
        text = scans[0] if len(scans) == 1 else f"{scans[0]}-{scans[-1]}"
        labels.append((text, points[group[0]]))
    return labels
