"""The figure of ``pcrshard checkpoint show``: ratio and error of each tensor of a version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import StorageError
from ..fidelity.plots import pyplot_module

# More bars than this cannot be read; the largest tensors are drawn.
MAX_TENSORS = 60
_INCHES_PER_BAR = 0.24
_COLOURS = {"lossless": "#a0aec0", "linear": "#2b6cb0", "log": "#c05621"}
_MEANINGS = {
    "lossless": "bit for bit",
    "linear": "within an absolute error",
    "log": "within a relative error",
}


def plot_tensors(
    rows: Sequence[dict[str, Any]],
    path: str,
    *,
    title: str,
) -> None:
    """Draw bars of ratio and error for each tensor, saved as PNG.

    Args:
        rows: Of the tensors: ``path``, ``raw_bytes``, ``stored_bytes``, ``bound_kind``, and
            ``error`` (measured, as a share of the bound) or ``bound_std`` (what is allowed, as a
            share of the tensor's standard deviation).
        path: The picture.
        title: Its title.

    Raises:
        MissingDependency: matplotlib is not installed.
        StorageError: The picture cannot be written.
    """
    drawn = sorted(rows, key=lambda row: -row["raw_bytes"])[:MAX_TENSORS]
    if len(drawn) < len(rows):
        title = f"{title}: the largest {len(drawn)} of {len(rows)} tensors"
    pyplot = pyplot_module()
    size = (11, 1.6 + _INCHES_PER_BAR * len(drawn))
    figure, panels = pyplot.subplots(1, 2, figsize=size, layout="constrained", sharey=True)
    _draw_ratios(panels[0], drawn)
    _draw_errors(panels[1], drawn)
    _draw_legend(figure, drawn)
    figure.suptitle(title)
    _save(figure, path)


def _save(figure: Any, path: str) -> None:
    pyplot = pyplot_module()
    try:
        figure.savefig(path, dpi=100)
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot save the picture: {error}", url=path) from error
    finally:
        pyplot.close(figure)


def _draw_ratios(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    # A tensor that is equal to its reference takes no bytes at all.
    ratios = [row["raw_bytes"] / max(row["stored_bytes"], 1) for row in rows]
    _draw_bars(axes, rows, ratios, [f"{ratio:.3g}x" for ratio in ratios])
    axes.set_xscale("log")
    axes.set_xlim(min([0.8, *ratios]), max(ratios, default=1) * 3)
    axes.set_yticks(range(len(rows)), [row["path"] for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("times smaller (log scale)")


def _draw_errors(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    measured = any("error" in row for row in rows)
    name = "error" if measured else "bound_std"
    errors = [row.get(name, 0.0) for row in rows]
    texts = [f"{row[name]:.3g}" if name in row else "not compared" for row in rows]
    _draw_bars(axes, rows, errors, texts)
    axes.set_xlim(0, max([1e-9, *errors]) * 1.3)
    axes.tick_params(axis="y", left=False)
    if measured:
        axes.axvline(1, color="#c53030", linewidth=1)
        axes.set_xlabel("largest error, as a share of the bound (red)")
    else:
        axes.set_xlabel("error allowed, as a share of the deviation (orange: of each value)")


def _draw_legend(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    rectangle = pyplot_module().Rectangle
    kinds = [kind for kind in _COLOURS if any(row["bound_kind"] == kind for row in rows)]
    handles = [rectangle((0, 0), 1, 1, color=_COLOURS[kind]) for kind in kinds]
    labels = [_MEANINGS[kind] for kind in kinds]
    place = "outside lower center"
    figure.legend(handles, labels, loc=place, ncols=3, frameon=False, fontsize=9)


def _draw_bars(
    axes: Any,
    rows: Sequence[dict[str, Any]],
    values: Sequence[float],
    texts: Sequence[str],
) -> None:
    colours = [_COLOURS[row["bound_kind"]] for row in rows]
    bars = axes.barh(range(len(rows)), values, 0.7, color=colours)
    axes.bar_label(bars, texts, padding=3, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
