"""Figures saved as files; the only importer of matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import MissingDependency, StorageError
from .advice import ScanFidelity


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


def plot_fidelity(rows: Sequence[ScanFidelity], path: str, *, title: str) -> None:
    """Plot MS-SSIM against bytes per sample, one point per scan, saved as PNG.

    Args:
        rows: Figures of each scan, from :func:`measure`.
        path: Target file.
        title: Text above the figure.
    """
    points = [(row.bytes_per_image / 1000, row.msssim) for row in rows]
    with saved_figure(path, 8, 4) as figure:
        axes = figure.subplots()
        axes.plot(*zip(*points, strict=True), "o-", color="#2b6cb0")
        for row, point in zip(rows, points, strict=True):
            axes.annotate(str(row.scan), point, (5, -12), textcoords="offset points", fontsize=9)
        axes.set_xlabel("kB per sample, cumulative")
        axes.set_ylabel("mean MS-SSIM against full fidelity")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(title, fontsize=11)
        axes.grid(alpha=0.3)
