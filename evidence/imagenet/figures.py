"""What the page computes of marks and guesses."""

import math
import statistics
from collections import defaultdict

from ..pages import Estimate, NotMeasured
from .photographs import POINTS, SCANS

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
    """Percent of photographs with these marks, and the 95 % interval of Wilson."""
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
        self.main = 64 if lab.quick else 224
        self.networks = [n for n in ("lite0", "lite2") if (n, self.main, False) in self.cases]
        self.bytes = lab.read("bytes")["bytes"]

    def plain(self, network):
        """Marks at the main crop."""
        return self.cases[network, self.main, False]

    def cheapest(self, marks, script):
        """The first point of a script whose mean is within TOLERANCE of the source's."""
        names = [scan.name for scan in SCANS if scan.store == script and scan.name in marks]
        full = marks["source full"]
        within = (name for name in names if gap(marks[name], full).mean >= -TOLERANCE)
        return next(within, "source full")

    def fewer(self, name):
        """Times fewer bytes than the source."""
        return self.bytes["source full"] / self.bytes[name]


def _findings(found, network, costs):
    """Of a network: the first scans that are enough, and comparisons of points."""
    marks = found.plain(network)
    smoothed = found.cases.get((network, found.main, True), {})
    rows = []
    for point in POINTS:
        name = point.name
        changed = smoothed.get(name)
        rows.append(
            {
                "store": point.store,
                "name": name,
                "kb": found.bytes[name] / 1e3,
                "ms": costs.get(name),
                "smooth_ms": costs.get(f"{name} smooth"),
                "top1": share(marks[name]),
                "top5": share(marks[name], "15"),
                "minus": gap(marks[name], marks["source full"]),
                "smoothed": changed and share(changed),
                "smooth": changed and gap(changed, marks[name]),
            }
        )
    best = {script: found.cheapest(marks, script) for script in ("standard", "q95")}
    resized = next(row for row in rows if row["name"] == "resized full")
    no_larger = [row for row in rows if row["kb"] <= resized["kb"] and row is not resized]
    rival = max(no_larger, key=lambda row: row["top1"])["name"]
    return {
        "count": len(marks["source full"]),
        "rows": rows,
        **{script: {"name": name, "times": found.fewer(name)} for script, name in best.items()},
        "scripts": gap(marks["q95 4"], marks["standard 4"]),
        "scripts_times": found.bytes["standard 4"] / found.bytes["q95 4"],
        "resized_times": found.fewer("resized full"),
        "rival": {"name": rival, "gap": gap(marks[rival], marks["resized full"])},
    }


def networks(lab):
    """The findings of each network at the main crop."""
    found = Seen(lab)
    costs = (lab.load("cpu") or {"milliseconds": {}})["milliseconds"]
    return {network: _findings(found, network, costs) for network in found.networks}


def crops(lab):
    """Rows of each network and crop, at the points that other crops have."""
    found = Seen(lab)
    header = next((list(m) for (_, crop, _), m in found.cases.items() if crop != found.main), None)
    if header is None:
        raise NotMeasured
    rows, helped = [], []
    for (network, crop, smoothing), marks in sorted(found.cases.items()):
        if smoothing:
            change = gap(marks["standard 1"], found.cases[network, crop, False]["standard 1"])
            helped.append(f"{network} at {crop} {change:+.1f}")
            continue
        name = found.cheapest(marks, "standard")
        rows.append(
            {
                "network": network,
                "crop": crop,
                "count": len(marks["source full"]),
                "cells": [share(marks[point]) for point in header],
                "scan": name.split()[1],
                "fewer": found.fewer(name),
            }
        )
    return {"rows": rows, "header": header, "helped": helped}


def coarse(lab):
    """By the name of classes: accuracy at each point, and minus the source's."""
    found, guesses = Seen(lab), lab.read("guesses")
    rows = []
    for label, name in LABELS.items():
        wanted = [name(int(number)) for number in guesses["labels"].split()]
        marks = {
            point: "".join(
                "1" if name(int(guess)) == right else "0"
                for guess, right in zip(told.split(), wanted, strict=True)
            )
            for point, told in guesses["guesses"].items()
        }
        minus = {point: gap(each, marks["source full"]) for point, each in marks.items()}
        within = [scan.name for scan in SCANS if minus[scan.name].mean >= -TOLERANCE]
        best = min(within, key=found.bytes.get)
        rows.append(
            {
                "label": label,
                "top1": {point: share(each) for point, each in marks.items()},
                "minus": minus,
                "constant": 100 * max(map(wanted.count, wanted)) / len(wanted),
                "best": best,
                "times": found.fewer(best),
            }
        )
    return rows


def smaller(lab):
    """Each scan of the pictures resized once: bytes, decode time and each network's accuracy."""
    return [
        {
            "name": name,
            "store": f"{name.split()[0]}, resized",
            "kb": found["bytes"] / 1e3,
            "ms": found["milliseconds"],
            "top1": {network: share(found[network]) for network in ("lite0", "lite2")},
        }
        for name, found in lab.read("resized")["points"].items()
    ]


SECTIONS = (networks, crops, coarse, smaller)
