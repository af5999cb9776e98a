"""Draw a picture of a page, 800 pixels wide, as a YAML block of the page describes it.

    set: {xlabel: epoch}      # arguments of Axes.set; ``panels`` overrides them by panel
    legend: 4                 # columns of one legend above; or arguments of Axes.legend
    kind: line                # line, points, bar or barh
    series:
    - panel: flowers          # one pair of axes for each panel
      scan: 5                 # its color and name; or ``name`` and ``color``
      x: [1, 2, 3]
      y: [[70, 68, 72], ...]  # numbers, or a mean with both ends of its interval

What is the same in all series may stand beside ``series``. Other keys: ``columns`` (of panels),
``height`` (inches), ``sharex``, ``sharey``; of a series ``fmt``, ``style`` (of the artist), and
``notes`` at its points; of bars ``form`` (of the numbers on them).
"""

import math

import numpy as np

SCAN_COLORS = {"1": "#b83280", "2": "#dd6b20", "5": "#2b6cb0", "10": "#2f855a", "full": "#2f855a"}
CYCLE = ["#2b6cb0", "#dd6b20", "#2f855a", "#805ad5", "#e53e3e", "#a0aec0", "#b83280", "#38b2ac"]
STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "axes.titlesize": 11,
    "savefig.dpi": 100,
}
DEFAULTS = {"kind": "line", "panel": "", "style": {}}


def label(scan):
    """``scan 5`` or ``full``."""
    return f"scan {scan}" if str(scan).isdigit() else str(scan)


def draw(path, plot):
    """Save one picture.

    Args:
        path: The PNG file.
        plot: Its description.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    series = [DEFAULTS | plot | one for one in plot["series"]]
    for one in series:
        one["name"] = str(one.get("name", label(one.get("scan"))))
    names = list(dict.fromkeys(one["name"] for one in series))
    panels = list(dict.fromkeys(one["panel"] for one in series))
    columns = plot.get("columns", len(panels))
    shared = {name: plot[name] for name in ("sharex", "sharey") if name in plot}
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            math.ceil(len(panels) / columns), columns, figsize=(8, plot.get("height", 4.2)),
            squeeze=False, layout="constrained", **shared,
        )  # fmt: skip
        for ax in axes.flat[len(panels) :]:
            ax.set_axis_off()
        for one in series:
            one["color"] = one.get("color") or _color(one, names)
            ticks = dict.fromkeys(
                x for each in series if each["panel"] == one["panel"] for x in each["x"]
            )
            slots = (list(ticks), names.index(one["name"]), len(names))
            _draw_series(axes.flat[panels.index(one["panel"])], one, slots)
        for panel, ax in zip(panels, axes.flat, strict=False):
            _dress(ax, plot, panel)
        for ax in axes[:, 1:].flat:
            if ax.get_ylabel() == plot.get("set", {}).get("ylabel"):
                ax.set_ylabel("")
        for ax in axes[:-1].flat if plot.get("sharex") else ():
            ax.set_xlabel("")
        _add_legend(figure, axes, plot)
        figure.savefig(path)
        pyplot.close(figure)


def _color(one, names):
    if "scan" not in one:
        return CYCLE[names.index(one["name"]) % len(CYCLE)]
    from matplotlib import colormaps

    scan = str(one["scan"])
    return SCAN_COLORS.get(scan) or colormaps["viridis"]((int(scan) - 1) / 9)


def _draw_series(ax, one, slots):
    """Draw a line, points or bars.

    Args:
        ax: The axes.
        one: The series.
        slots: The names below the axes' bars, and which of how many bars over each name is this
            series'.
    """
    x, y = one["x"], np.array(one["y"], float)
    spread = None
    if y.ndim == 2:
        y, low, high = y.T[:3]
        spread = np.stack([y - low, high - y])
    if all(isinstance(value, int) for value in x):
        ax.locator_params(axis="x", integer=True)
    options = {"color": one["color"], "label": one["name"]} | one["style"]
    if one["kind"] == "line":
        ax.plot(x, y, one.get("fmt", "o-"), **{"ms": 3} | options)
        if spread is not None:
            ax.fill_between(x, y - spread[0], y + spread[1], color=one["color"], alpha=0.15, lw=0)
    elif one["kind"] == "points":
        ax.errorbar(x, y, spread, **{"fmt": one.get("fmt", "o-"), "capsize": 3} | options)
    else:
        names, number, count = slots
        width = 0.8 / count
        places = [names.index(name) + (number - (count - 1) / 2) * width for name in x]
        _bars(ax, one, (places, y, 0.95 * width, spread, names), options)
    for text, *place in zip(one.get("notes", ()), x, y, strict=False):
        ax.annotate(
            str(text), place, xytext=(4, -12), textcoords="offset points", color=one["color"],
            fontsize=9,
        )  # fmt: skip


def _bars(ax, one, bars, options):
    places, lengths, width, spread, names = bars
    across = one["kind"] == "barh"
    if across:  # the first name at the top
        drawn = ax.barh(places, lengths, width, **options)
        ax.set_yticks(range(len(names)), names)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.margins(x=0.15)
    else:
        drawn = ax.bar(places, lengths, width, yerr=spread, capsize=2, **options)
        ax.set_xticks(range(len(names)), names)
    if "form" in one:
        texts = [format(length, one["form"]) for length in lengths]
        ax.bar_label(drawn, texts, padding=3 if across else 0, fontsize=8 if across else 9)
    ax.grid(axis="y" if across else "x", visible=False)


def _dress(ax, plot, panel):
    """Labels, scales and limits."""
    wanted = {"title": panel} | plot.get("set", {}) | plot.get("panels", {}).get(panel, {})
    for height in wanted.pop("at", ()):
        ax.axhline(height, color="#4a5568", ls="--", lw=1, zorder=1)
    ax.tick_params(labelsize=wanted.pop("ticksize", 10))
    ax.set(**wanted)
    for axis in (ax.xaxis, ax.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")


def _add_legend(figure, axes, plot):
    wanted = plot.get("legend")
    if isinstance(wanted, dict):
        for ax in axes.flat:
            if ax.get_legend_handles_labels()[0]:
                ax.legend(**wanted)
    elif wanted:
        pairs = [zip(*ax.get_legend_handles_labels(), strict=True) for ax in axes.flat]
        shown = {text: handle for each in pairs for handle, text in each}
        figure.legend(shown.values(), shown.keys(), loc="outside upper center", ncols=wanted)
