"""Pictures 800 pixels wide, in one style."""

import contextlib

import numpy as np

from .pages import estimate

COLORS = {
    1: "#b83280",
    2: "#dd6b20",
    5: "#2b6cb0",
    10: "#2f855a",
    "full": "#2f855a",
    "tuner": "#1a202c",
}
BLUE, ORANGE, GREEN, BLACK, GRAY = "#2b6cb0", "#dd6b20", "#2f855a", "#1a202c", "#a0aec0"
STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "axes.titlesize": 11,
}


@contextlib.contextmanager
def figure(path, columns=1, rows=1, height=4.5, legend=0, **options):
    """Yield the axes (columns * rows,) of a figure saved to ``path``; ``legend``: its columns."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(STYLE)
    fig, axes = pyplot.subplots(
        rows, columns, figsize=(8, height), layout="constrained", squeeze=False, **options
    )
    yield axes.ravel()
    if legend:
        shown = {}
        for ax in axes.ravel():
            handles, labels = ax.get_legend_handles_labels()
            shown = dict(zip(labels, handles, strict=True)) | shown
        fig.legend(shown.values(), shown.keys(), loc="outside upper center", ncols=legend)
    fig.savefig(path, dpi=100)
    pyplot.close(fig)


def kind(scan):
    """A scan as JSON keys have it: a number or ``full``."""
    return int(scan) if str(scan).isdigit() else scan


def color(scan, last=10):
    """The color of a scan; those without one of their own stand between."""
    from matplotlib import colormaps

    scan = kind(scan)
    return COLORS.get(scan) or colormaps["viridis"]((scan - 1) / max(1, last - 1))


def label(scan):
    """``scan 5`` or ``full``."""
    return f"scan {scan}" if str(scan).isdigit() else str(scan)


def band(curves):
    """Mean, low and high in per cent of curves (seeds, epochs), at each epoch: (3, epochs)."""
    return np.array([estimate(column)[:3] for column in zip(*curves, strict=True)]).T


def curve(ax, x, curves, shade=True, style="o-", **options):
    """The mean of curves (seeds, epochs) in per cent, and their 95 % interval shaded."""
    mean, low, high = band(curves)
    (line,) = ax.plot(x, mean, style, ms=3, **options)
    if shade:
        ax.fill_between(
            x, low.clip(0), high.clip(None, 100), color=line.get_color(), alpha=0.15, lw=0
        )


def errors(ax, x, estimates, **options):
    """Points with their intervals."""
    mean, low, high = np.array([each[:3] for each in estimates]).T
    options = {"fmt": "o-", "capsize": 3} | options
    ax.errorbar(x, mean, (mean - low, high - mean), **options)


def bars(ax, groups, names, form=None, **options):
    """Groups of bars: ``{label: values}``, each value over one of the names."""
    width = 0.8 / len(groups)
    for number, (text, values) in enumerate(groups.items()):
        places = np.arange(len(values)) + (number - (len(groups) - 1) / 2) * width
        drawn = ax.bar(places, values, 0.95 * width, label=text, **options)
        if form:
            ax.bar_label(drawn, [format(value, form) for value in values], fontsize=9)
    ax.set_xticks(range(len(names)), names)
    ax.grid(axis="x", visible=False)
