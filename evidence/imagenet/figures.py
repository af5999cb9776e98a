"""Tables and pictures of the page, from marks and guesses."""

import math
import statistics
from collections import defaultdict

from .. import plots
from ..pages import Estimate
from ..plots import BLACK, BLUE, GRAY, GREEN, ORANGE
from .photographs import points

SHADES = {"standard": BLUE, "q95": ORANGE, "source": BLACK, "resized": GREEN}
SCRIPTS = ("standard", "q95")
MAIN = 224
# Of normal deviations.
Z = 1.96
# Points below the source that are called alike.
TOLERANCE = 1
# Numbers of classes in ImageNet's order of synsets.
DOGS = range(151, 269)
ANIMALS = range(398)
# What a class is called, from fine to coarse.
LABELS = {
    "1,000 classes": lambda number: number,
    "dog, other animal, or thing": lambda number: (number in ANIMALS) + (number in DOGS),
    "animal or thing": lambda number: int(number in ANIMALS),
}


def share(marks, kinds="1"):
    """Per cent of photographs with these marks, and the 95 % interval of Wilson."""
    hits = sum(mark in kinds for mark in marks) / len(marks)
    # Deviations squared, over the photographs.
    prior = Z * Z / len(marks)

    middle = hits + prior / 2
    spread = hits * (1 - hits) + prior / 4
    half = math.sqrt(prior * spread)

    low = (middle - half) / (1 + prior)
    high = (middle + half) / (1 + prior)
    return Estimate(100 * hits, 100 * low, 100 * high)


def gap(marks, other):
    """One point's accuracy minus another's, over the same photographs."""
    pairs = [100 * ((a == "1") - (b == "1")) for a, b in zip(marks, other, strict=False)]
    mean = statistics.fmean(pairs)
    half = Z * statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else 0.0
    return Estimate(mean, mean - half, mean + half)


class Seen:
    """All rows, and the bytes of each point."""

    def __init__(self, lab):
        self.cases = defaultdict(lambda: defaultdict(str))
        for row in sorted(lab.rows(), key=lambda row: row["block"]):
            for point, marks in row["marks"].items():
                self.cases[row["network"], row["crop"], row["smoothing"]][point] += marks
        crops = sorted({crop for _, crop, _ in self.cases})
        self.main = MAIN if MAIN in crops else next(iter(crops), None)
        self.networks = [n for n in ("lite0", "lite2") if (n, self.main, False) in self.cases]
        sizes = lab.load("bytes")
        self.images = sizes and sizes["images"]
        self.bytes = sizes and sizes["bytes"]
        self.costs = lab.load("cpu")

    def plain(self, network):
        """Marks at the main crop."""
        return self.cases[network, self.main, False]

    def cheapest(self, marks, script):
        """The first point of a script whose mean is within TOLERANCE of the source's."""
        names = [point.name for point in points() if point.store == script and point.name in marks]
        full = marks["source full"]
        return next((name for name in names if gap(marks[name], full).mean >= -TOLERANCE), None)

    def fewer(self, name):
        """Times fewer bytes than the source."""
        return self.bytes["source full"] / self.bytes[name]


def seen(lab):
    """The rows, or ``None``."""
    found = Seen(lab)
    return found if found.networks and found.bytes else None


def _curves(ax, found, network, across, smooth_across=None):
    """Accuracy against bytes or time, by script; smoothed where a script can be."""
    smoothed = found.cases.get((network, found.main, True))
    for store, shade in SHADES.items():
        names = [point.name for point in points() if point.store == store]
        marks = found.plain(network)
        options = {"color": shade, "capsize": 2, "ms": 4, "lw": 1.2}
        x = [across[name] for name in names]
        plots.errors(ax, x, [share(marks[name]) for name in names], label=store, **options)
        if smoothed and store in SCRIPTS:
            x = [(smooth_across or across)[name] for name in names[:-1]]
            shares = [share(smoothed[name]) for name in names[:-1]]
            plots.errors(ax, x, shares, fmt="x:", label=f"{store}, smoothed", **options)


def _draw(lab, found):
    kilobytes = {name: size / 1e3 for name, size in found.bytes.items()}
    with plots.figure(lab.figure("bytes"), len(found.networks), height=5, legend=3) as axes:
        for ax, network in zip(axes, found.networks, strict=True):
            _curves(ax, found, network, kilobytes)
            title = f"EfficientNet-{network.title()}, {len(found.plain(network)['source full'])}"
            ax.set(title=f"{title} photographs", xlabel="kB a photograph, read", ylim=(0, 100))
            ax.set_xscale("log")
        axes[0].set_ylabel("top-1 (%), 95 % interval")
    if found.costs:
        costs = found.costs["milliseconds"]
        smooth = {
            name.removesuffix(" smooth"): ms for name, ms in costs.items() if "smooth" in name
        }
        with plots.figure(lab.figure("decode"), legend=3) as (ax,):
            _curves(ax, found, found.networks[0], costs, smooth)
            xlabel = "CPU milliseconds to decode a photograph to the crop"
            ax.set(xlabel=xlabel, ylabel="top-1 (%), 95 % interval", ylim=(0, 100))


def _point_rows(found, network):
    marks = found.plain(network)
    smoothed = found.cases.get((network, found.main, True), {})
    for point in points():
        name = point.name
        yield {
            "name": name,
            "kb": found.bytes[name] / 1e3,
            "ms": found.costs["milliseconds"][name] if found.costs else None,
            "top1": share(marks[name]),
            "top5": share(marks[name], "15"),
            "minus": gap(marks[name], marks["source full"]),
            "smooth": gap(smoothed[name], marks[name]) if name in smoothed else None,
        }


def _findings(found, network):
    """Of a network: the first scans that are enough, and comparisons of points."""
    marks = found.plain(network)
    values = {"count": len(marks["source full"]), "rows": list(_point_rows(found, network))}
    for script in SCRIPTS:
        best = found.cheapest(marks, script) or "source full"
        values[script] = {"name": best, "times": found.fewer(best)}
    values["scripts"] = gap(marks["q95 4"], marks["standard 4"])
    values["scripts_times"] = found.bytes["standard 4"] / found.bytes["q95 4"]
    values["resized"] = gap(marks["resized full"], marks["source full"])
    values["resized_times"] = found.fewer("resized full")
    fewer = [p.name for p in points() if found.bytes[p.name] <= found.bytes["resized full"]]
    rival = max((name for name in fewer if name != "resized full"), key=lambda n: share(marks[n]))
    values["rival"] = {"name": rival, "gap": gap(marks[rival], marks["resized full"])}
    smoothed = found.cases.get((network, found.main, True))
    if smoothed:
        values["smoothing"] = gap(smoothed["standard 1"], marks["standard 1"])
    return values


def networks(lab):
    found = seen(lab)
    if found is None:
        return None
    _draw(lab, found)
    agree = lab.load("agreement")
    return {
        "images": found.images,
        "number": lab.rows()[0]["number"].removeprefix("torch."),
        "agree": agree and {"images": agree["images"], "share": 100 * agree["share"]},
        "main": found.main,
        **{network: _findings(found, network) for network in found.networks},
    }


def crops(lab):
    found = seen(lab)
    if found is None or {crop for _, crop, _ in found.cases} == {found.main}:
        return None
    rows, enough, helped = [], [], []
    kept = next(list(marks) for (_, crop, _), marks in found.cases.items() if crop != found.main)
    for (network, crop, smoothing), marks in sorted(found.cases.items()):
        if smoothing:
            change = gap(marks["standard 1"], found.cases[network, crop, False]["standard 1"])
            helped.append(f"{network} at {crop} {change:+.1f}")
            continue
        cells = " | ".join(f"{share(marks[name]):.1fm}" for name in kept)
        count = len(marks["source full"])
        rows.append({"network": network, "crop": crop, "count": count, "cells": cells})
        name = found.cheapest(marks, "standard")
        scan = name.split()[1]
        enough.append(f"{network} at {crop} scan {scan} ({found.fewer(name):.1f}x fewer bytes)")
    return {
        "rows": rows,
        "header": " | ".join(kept),
        "dashes": "| --- " * len(kept),
        "enough": ", ".join(enough),
        "helped": ", ".join(helped),
    }


def coarse_marks(guesses, label):
    """{point: marks} of right guesses when classes are called by a coarser name."""
    name = LABELS[label]
    wanted = [name(int(number)) for number in guesses["labels"].split()]
    return {
        point: "".join(
            "1" if name(int(guess)) == right else "0"
            for guess, right in zip(told.split(), wanted, strict=True)
        )
        for point, told in guesses["guesses"].items()
    }


def coarse(lab):
    found, guesses = Seen(lab), lab.load("guesses")
    if guesses is None or found.bytes is None:
        return None
    labels = {label: coarse_marks(guesses, label) for label in LABELS}
    constant = []
    with plots.figure(lab.figure("coarse"), len(labels), height=4.2, legend=2, sharey=True) as axes:
        for ax, (label, marks) in zip(axes, labels.items(), strict=True):
            for script in SCRIPTS:
                names = [point.name for point in points() if point.store == script]
                x = [found.bytes[name] / 1e3 for name in names]
                options = {"color": SHADES[script], "capsize": 2, "ms": 4, "label": script}
                plots.errors(ax, x, [share(marks[name]) for name in names], **options)
            wanted = [LABELS[label](int(number)) for number in guesses["labels"].split()]
            constant.append(100 * max(map(wanted.count, wanted)) / len(wanted))
            ax.axhline(constant[-1], color=GRAY, ls="--", lw=1)
            ax.set(title=label, xlabel="kB a photograph, read", ylim=(0, 102))
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter("{x:g}")
        axes[0].set_ylabel("accuracy (%), 95 % interval")
    shown = [p for p in points() if p.store in SCRIPTS and p.scan in (1, 2, 3, 4, 5, 6, 8)]
    rows = [
        {
            "name": name.removesuffix(" full"),
            "kb": found.bytes[name] / 1e3,
            "cells": " | ".join(
                f"{share(m[name]):.1fm} ({gap(m[name], m['source full']):+.1f})"
                for m in labels.values()
            ),
        }
        for name in [*(point.name for point in shown), "source full"]
    ]
    first, lost = [], []
    for label, marks in labels.items():
        within = [
            point.name
            for point in points()
            if point.store in SCRIPTS
            and gap(marks[point.name], marks["source full"]).mean >= -TOLERANCE
        ]
        best = min(within, key=found.bytes.get)
        first.append({"label": label, "name": best, "times": found.fewer(best)})
        lost.append(gap(marks["standard 1"], marks["source full"]))
    count = len(guesses["labels"].split())
    return {"rows": rows, "count": count, "constant": constant, "first": first, "lost": lost}


SECTIONS = (
    networks,
    crops,
    coarse,
)
