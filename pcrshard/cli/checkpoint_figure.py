"""The figure of ``pcrshard checkpoint show``: compression ratio and error bound per tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..fidelity.plots import saved_figure

if TYPE_CHECKING:
    from ..checkpoint import DeltaStore

# More bars than this are unreadable, so only the largest tensors are drawn.
MAX_TENSORS = 60
_INCHES_PER_BAR = 0.24
# Color and label of each kind of error bound.
_KINDS = {
    "lossless": ("#a0aec0", "bit for bit"),
    "linear": ("#2b6cb0", "within an absolute error"),
    "log": ("#c05621", "within a relative error"),
}
Row = dict[str, Any]


def bounds_of(store: DeltaStore, version: int, rows: Sequence[Row]) -> list[Row]:
    """Add ``bound_std`` to each tensor's row: its error bound as a fraction of its std.

    A logarithmic grid bounds each value's relative error, so its bound is returned unchanged.
    """
    from ..checkpoint.reader import read_tensors
    from ..errorbound import FLOAT_TYPES

    _, state = store.read(lambda manifest: read_tensors(store.io, manifest, version))

    def fraction(row: Row) -> float:
        bound = float(row["error_bound"])
        if row["bound_kind"] != "linear":
            return bound
        tensor = state[row["path"]]
        values = FLOAT_TYPES[tensor.spec.dtype].widen(tensor.restore())
        std = float(values[np.isfinite(values)].std())
        return bound / std if std else 0.0

    return [row | {"bound_std": fraction(row)} for row in rows]


def plot_tensors(rows: Sequence[Row], path: str, *, title: str) -> None:
    """Plot the compression ratio and error bound of each tensor as bars, and save them as PNG.

    Args:
        rows: One per tensor, with ``path``, ``raw_bytes``, ``stored_bytes``, ``bound_kind``, and
            ``bound_std`` (the bound as a fraction of the tensor's std).
        path: Target file.
        title: Text above the figure.

    Raises:
        MissingDependency: matplotlib is not installed.
        StorageError: The picture cannot be written.
    """
    drawn = sorted(rows, key=lambda row: -row["raw_bytes"])[:MAX_TENSORS]
    if len(drawn) < len(rows):
        title = f"{title}: the largest {len(drawn)} of {len(rows)} tensors"
    # A tensor equal to its reference takes no bytes.
    ratios = [row["raw_bytes"] / max(row["stored_bytes"], 1) for row in drawn]
    errors = [row["bound_std"] for row in drawn]

    with saved_figure(path, 11, 1.6 + _INCHES_PER_BAR * len(drawn)) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, values, labels in (
            (left, ratios, [f"{ratio:.3g}x" for ratio in ratios]),
            (right, errors, [f"{error:.3g}" for error in errors]),
        ):
            for kind, (color, meaning) in _KINDS.items():
                rows_of_kind = [i for i, row in enumerate(drawn) if row["bound_kind"] == kind]
                lengths = [values[i] for i in rows_of_kind]
                bars = axes.barh(rows_of_kind, lengths, 0.7, color=color, label=meaning)
                axes.bar_label(bars, [labels[i] for i in rows_of_kind], padding=3, fontsize=8)
            axes.spines[["top", "right"]].set_visible(False)
        left.set_xscale("log")
        left.set_xlim(min([0.8, *ratios]), max(ratios, default=1) * 3)
        left.set_yticks(range(len(drawn)), [row["path"] for row in drawn], fontsize=8)
        left.set_ylim(len(drawn) - 0.4, -0.6)
        left.set_xlabel("times smaller (log scale)")
        right.set_xlim(0, max([1e-9, *errors]) * 1.3)
        right.tick_params(axis="y", left=False)
        right.set_xlabel("error bound, as a fraction of the std (orange: of each value)")
        handles, meanings = left.get_legend_handles_labels()
        figure.legend(
            handles, meanings, loc="outside lower center", ncols=3, frameon=False, fontsize=9
        )
        figure.suptitle(title)
