"""Draw the pictures of a page, 800 pixels wide, as the page's ``plots.yaml`` describes them.

A picture names the rows of a section that it shows and the fields to use:

    epochs:                     # epochs.png
      data: epochs.groups       # rows; a field may hold one value or a list of points
      panel: task               # one pair of axes for each value
      by: scan                  # one line for each value
      x: numbers
      y: curve                  # an Estimate is drawn with its interval
      kind: line                # line, points, bar, barh, step, area or scatter
      set: {xlabel: epoch}      # arguments of Axes.set; ``panels`` overrides them by panel

``layers`` draws several kinds into the same axes: each overrides the fields above.
"""

import contextlib
import dataclasses
import math
import os

import numpy as np
import yaml

from .pages import Estimate, estimate, lookup

SCAN_COLORS = {"1": "#b83280", "2": "#dd6b20", "5": "#2b6cb0", "10": "#2f855a", "full": "#2f855a"}
CYCLE = ["#2b6cb0", "#dd6b20", "#2f855a", "#805ad5", "#e53e3e", "#a0aec0", "#b83280", "#38b2ac"]
OTHERS = {"tuner": "#1a202c"}
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
    "savefig.dpi": 100,
}


def described(folder):
    """The pictures of a page, by name: its ``plots.yaml``."""
    path = os.path.join(folder, "plots.yaml")
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        return yaml.safe_load(file)


def sections(plot):
    """The names of the sections whose rows a picture shows."""
    layers = [plot, *plot.get("layers", ())]
    return {layer["data"].partition(".")[0] for layer in layers if "data" in layer}


@dataclasses.dataclass
class Series:
    """The points of one line, or of one color of bars."""

    layer: dict
    panel: str
    name: object
    shade: object  # what the color stands for
    color: str = ""
    number: int = 0  # among the ``count`` series of the picture
    count: int = 1
    x: list = dataclasses.field(default_factory=list)
    y: list = dataclasses.field(default_factory=list)
    notes: list = dataclasses.field(default_factory=list)

    @property
    def label(self):
        """How legends name it."""
        return label(self.name) if is_scan(self.layer["by"]) else str(self.name)

    @property
    def interval(self):
        """Means, and distances to both ends of the intervals, or ``None``: (points,), (2, points).

        Of numbers without an interval the distances are 0.
        """
        exact = [Estimate(v, v, v) if not isinstance(v, Estimate) else v for v in self.y]
        mean, low, high = np.array([each[:3] for each in exact], float).T
        known = any(isinstance(value, Estimate) for value in self.y)
        return mean, np.stack([mean - low, high - mean]) if known else None

    def slots(self, names):
        """Where this series' bars stand beside the others' over their names, and their width."""
        width = 0.8 / self.count
        shift = (self.number - (self.count - 1) / 2) * width
        return [names.index(name) + shift for name in self.x], 0.95 * width


def is_scan(field):
    """Whether a field, as ``group.scan``, holds scans."""
    return str(field).rpartition(".")[2] == "scan"


def label(scan):
    """``scan 5`` or ``full``."""
    return f"scan {scan}" if str(scan).isdigit() else str(scan)


def draw(path, plot, values):
    """Save one picture.

    Args:
        path: The PNG file.
        plot: Its entry of ``plots.yaml``.
        values: The values of the sections, by name.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    series = _all_series(plot, values)
    panels = list(dict.fromkeys(one.panel for one in series))
    columns = plot.get("columns", len(panels))
    shared = {name: plot[name] for name in ("sharex", "sharey") if name in plot}
    size = (8, plot.get("height", 4.2))
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            math.ceil(len(panels) / columns), columns, figsize=size, squeeze=False,
            layout="constrained", **shared,
        )  # fmt: skip
        for ax in axes.flat[len(panels) :]:
            ax.set_axis_off()
        for panel, ax in zip(panels, axes.flat, strict=False):
            ax.set_prop_cycle(color=CYCLE)
            drawn = [one for one in series if one.panel == panel]
            names = list(dict.fromkeys(name for one in drawn for name in one.x))
            for one in drawn:
                KINDS[one.layer["kind"]](ax, one, names)
                for note in zip(one.notes, one.x, one.interval[0], strict=False):
                    _annotate(ax, one.color, *note)
            _dress(ax, plot, panel)
        for ax in axes[:, 1:].flat:
            ax.set_ylabel("")
        for ax in axes[:-1].flat if plot.get("sharex") else ():
            ax.set_xlabel("")
        _add_legend(figure, axes, plot)
        figure.savefig(path)
        pyplot.close(figure)


def _all_series(plot, values):
    defaults = {"kind": "line", "x": "x", "y": "y", "by": None, "panel": None}
    found = {}
    for number, changes in enumerate(plot.get("layers", [{}])):
        layer = defaults | plot | changes
        layer.setdefault("shade", layer["by"])
        for row in lookup(values, layer["data"]):
            keys = ("panel", "by", "shade")
            panel, name, shade = (layer[key] and lookup(row, layer[key]) for key in keys)
            name = layer.get("name", name)
            one = found.setdefault((number, panel, name), Series(layer, panel, name, shade))
            for key in ("x", "y", "notes"):
                value = lookup(row, layer[key]) if key in layer else []
                several = isinstance(value, list | np.ndarray)
                getattr(one, key).extend(value if several else [value])
    names = list(dict.fromkeys(one.name for one in found.values()))
    for one in found.values():
        one.number, one.count = names.index(one.name), len(names)
        one.color = _color(one, names)
    return list(found.values())


def _color(one, names):
    chosen = one.layer.get("colors", {}).get(str(one.name), one.layer.get("color"))
    if chosen or not is_scan(one.layer["shade"]):
        return chosen or CYCLE[names.index(one.name) % len(CYCLE)]
    from matplotlib import colormaps

    scan = str(one.shade)
    return SCAN_COLORS.get(scan) or colormaps["viridis"]((int(scan) - 1) / 9)


def _options(one, **more):
    return {"color": one.color, "label": one.label} | one.layer.get("style", {}) | more


def _line(ax, one, _):
    mean, spread = one.interval
    options = _options(one)
    ax.plot(one.x, mean, options.pop("fmt", "o-"), **{"ms": 3} | options)
    if spread is not None:
        ax.fill_between(
            one.x, mean - spread[0], mean + spread[1], color=one.color, alpha=0.15, lw=0
        )


def _points(ax, one, _):
    mean, spread = one.interval
    x = [str(value) for value in one.x] if one.layer.get("categories") else one.x
    ax.errorbar(x, mean, spread, **{"fmt": "o-", "capsize": 3} | _options(one))


def _bar(ax, one, names):
    mean, spread = one.interval
    places, width = one.slots(names)
    bars = ax.bar(places, mean, width, yerr=spread, capsize=2, **_options(one))
    if "form" in one.layer:
        ax.bar_label(bars, [format(value, one.layer["form"]) for value in mean], fontsize=9)
    ax.set_xticks(range(len(names)), names)
    ax.grid(axis="x", visible=False)


def _barh(ax, one, names):
    """Horizontal bars, the first name at the top."""
    mean, _ = one.interval
    places, height = one.slots(names)
    by_name = [one.layer.get("shades", {}).get(name, one.color) for name in one.x]
    bars = ax.barh(places, mean, height, **_options(one, color=by_name))
    unit = one.layer.get("unit", "")
    ax.bar_label(bars, [number(value) + unit for value in mean], padding=3, fontsize=8)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.margins(x=0.15)
    ax.grid(axis="y", visible=False)


def _step(ax, one, _):
    ax.step(one.x, one.y, where="post", **_options(one))


def _area(ax, one, _):
    ax.fill_between(one.x, one.y, color=one.color, alpha=0.15)
    ax.plot(one.x, one.y, **_options(one))


KINDS = {
    "line": _line,
    "points": _points,
    "bar": _bar,
    "barh": _barh,
    "step": _step,
    "area": _area,
    "scatter": lambda ax, one, _: ax.scatter(one.x, one.y, **{"s": 10} | _options(one)),
}


def number(value):
    """As many digits as are significant."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.{0 if value >= 20 or value < 0.005 else 1 if value >= 10 else 2}f}"


def _annotate(ax, color, note, x, y):
    ax.annotate(
        str(note), (x, y), xytext=(4, -12), textcoords="offset points", color=color, fontsize=9
    )


def _dress(ax, plot, panel):
    """Labels, scales and limits."""
    wanted = ({"title": panel} if panel else {}) | plot.get("set", {})
    wanted |= plot.get("panels", {}).get(panel, {})
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


# Pictures that are drawn by functions.


@contextlib.contextmanager
def figure(path, columns=1, rows=1, height=4.5, legend=0, **options):
    """Yield the axes (columns * rows,) of a figure saved to ``path``; ``legend``: its columns."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        fig, axes = pyplot.subplots(
            rows, columns, figsize=(8, height), layout="constrained", squeeze=False, **options
        )
        yield axes.ravel()
        _add_legend(fig, axes, {"legend": legend})
        fig.savefig(path)
        pyplot.close(fig)


def kind(scan):
    """A scan as JSON keys have it: a number or ``full``."""
    return int(scan) if str(scan).isdigit() else scan


def color(scan, last=10):
    """The color of a scan; those without one of their own stand between."""
    from matplotlib import colormaps

    scan = kind(scan)
    return (
        SCAN_COLORS.get(str(scan))
        or OTHERS.get(scan)
        or colormaps["viridis"]((scan - 1) / max(1, last - 1))
    )


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
