"""MS-SSIM against accuracy (Fig. 13): every scan, script, task and network that there is."""

import json
import os
import statistics
from typing import NamedTuple

import numpy as np

from pcrshard.fidelity.measure import measure
from pcrshard.fidelity.tuner import confidence

from . import finetuning, finetuning_page, imagenet, imagenet_coarse
from .accuracy import collect, final
from .imagenet_page import MAIN, gathered, share
from .report import Experiment, colour, figure, finish, markdown
from .scanscripts import measure_scripts

FULL = "full"
MARKERS = {"standard": "o", "q95": "s"}
Q95 = "msssim-q95"


class Point(NamedTuple):
    """A script's scan: its MS-SSIM, and accuracies, one a seed, or one with its interval."""

    script: str
    scan: str
    msssim: float
    mean: float
    low: float
    high: float


def _point(script, scan, msssim, values):
    return Point(script, scan, msssim, *confidence(values))


def q95_likeness(lab):
    """MS-SSIM of the tasks at each scan of ``q95``; measured once."""
    report = lab.load(Q95)
    if report is None and not lab.existing:
        rows = {
            task.name: measure(
                lab.dataset(task.name, "val", "q95"), num_images=3 if lab.quick else 24, rounds=1
            )
            for task in lab.tasks
        }
        report = lab.save(
            Q95, {name: [row.msssim for row in found] for name, found in rows.items()}
        )
    return report["results"] if report else {}


def measure_correlation(lab):
    """{group: points and their line}; a group is a network on a task."""
    report = lab.load("msssim")
    if report is None:
        return None
    likeness = {task.name: report["results"][task.name]["msssim"] for task in lab.tasks}
    groups = _small(lab, likeness) | _finetuned(lab, likeness) | _pretrained(lab)
    return {name: _fitted(points) for name, points in groups.items() if len(points) > 2}


def _small(lab, likeness):
    """Runs of the small network from scratch: both scripts."""
    q95 = q95_likeness(lab)
    scripts = measure_scripts(lab)
    found = {}
    for task, rows in collect(lab, lab.tasks).items():
        points = [
            _point("standard", scan, _likeness(likeness[task], scan), final(row))
            for scan, row in rows.items()
        ]
        if task in q95 and task in scripts:
            points += [
                _point("q95", scan, q95[task][int(scan) - 1], final(row))
                for scan, row in scripts[task]["q95"].items()
            ]
        found[f"small_cnn, {task}"] = points
    return found


def _likeness(values, scan):
    return 1.0 if scan == FULL else values[int(scan) - 1]


def _finetuned(lab, likeness):
    """Fine-tuned tails of Lite0."""
    tasks = finetuning_page.gathered(finetuning.known(lab).values())
    return {
        f"Lite0 tuned, {task}": [
            _point("standard", scan, _likeness(likeness[task], scan), finetuning_page.last(runs))
            for scan, runs in kinds.items()
            if scan == FULL or scan.isdigit()
        ]
        for task, kinds in tasks.items()
    }


def _pretrained(lab):
    """Networks of ImageNet on its photographs, never trained again."""
    path = os.path.join(lab.out, imagenet.ROWS)
    report = lab.load(imagenet_coarse.NAME)
    if report is None or not os.path.exists(path):
        return {}
    with open(path) as file:
        cases = gathered(map(json.loads, file))
    found = {}
    for network, crop, smoothing in cases:
        if crop != MAIN or smoothing:
            continue
        points = []
        for name, msssim in report["results"]["msssim"].items():
            script, scan = name.split()
            points.append(Point(script, scan, msssim, *share(cases[network, crop, False][name])))
        found[f"{network.title()}, ImageNet"] = points
    return found


def _fitted(points):
    x = [point.msssim for point in points]
    y = [point.mean for point in points]
    row = {"points": [list(point) for point in points], "slope": None, "r": None}
    if statistics.pstdev(y) > 0:
        row["slope"], row["intercept"] = statistics.linear_regression(x, y)
        row["r"] = statistics.correlation(x, y)
        row["rank"] = statistics.correlation(_ranks(x), _ranks(y))
    return row


def _ranks(values):
    """Place of each value; equal ones share theirs."""
    ordered = np.sort(values)
    first = np.searchsorted(ordered, values, "left")
    return ((first + np.searchsorted(ordered, values, "right")) / 2).tolist()


def draw_correlation(results, path):
    count = min(4, len(results))
    fig, axes = figure(count, -(-len(results) // count), height=2.9 * -(-len(results) // count))
    for ax in axes.flat[len(results) :]:
        ax.set_axis_off()
    for ax, (name, row) in zip(axes.flat, results.items(), strict=False):
        _draw_group(ax, name, row)
    for line in axes:
        line[0].set_ylabel("accuracy (%)")
    finish(fig, path)


def _draw_group(ax, name, row):
    points = [Point(*point) for point in row["points"]]
    for point in points:
        kind = int(point.scan) if point.scan.isdigit() else point.scan
        error = [[100 * (point.mean - point.low)], [100 * (point.high - point.mean)]]
        where = (point.msssim, 100 * point.mean, error)
        ax.errorbar(*where, fmt=MARKERS[point.script], ms=4, capsize=2, color=colour(kind))
    if row["slope"] is not None:
        xs = np.array([min(point.msssim for point in points), 1.0])
        ys = 100 * (row["intercept"] + row["slope"] * xs)
        ax.plot(xs, ys, color="#a0aec0", lw=1, zorder=0)
        ax.set_title(f"{name}\nr = {row['r']:.2f}", fontsize=9)
    ax.set_xlabel("MS-SSIM", fontsize=9)
    ax.tick_params(labelsize=8)


def text_correlation(results):
    rows = []
    for name, row in results.items():
        cells = ["", "", ""]
        if row["r"] is not None:
            cells = [f"{row['r']:.2f}", f"{row['rank']:.2f}", f"{row['slope']:+.1f}"]
        high = [Point(*point) for point in row["points"] if point[2] >= 0.9]
        rows.append([name, len(row["points"]), *cells, *_above(high)])
    return (
        "The paper: a linear relation between MS-SSIM and final accuracy within a task (Cars). "
        "Ours: every scan, script, task and network that was run: `small_cnn` from scratch, "
        "the fine-tuned tail of Lite0, and networks of ImageNet that were never trained again; "
        "circles are `standard`, squares `q95`, intervals 95 %. The slope is in points of accuracy "
        "per 0.01 of MS-SSIM, over all points, and then over those of 0.9 and more, "
        "where a user would choose. With four or five points a high correlation is easily had by "
        f"chance. {_verdict(results)}\n\n"
        + markdown(
            ["network, task", "points", "r", "rank r", "slope", "points from 0.9", "r", "slope"],
            rows,
        )
    )


def _above(points):
    y = [point.mean for point in points]
    if len(points) < 3 or statistics.pstdev(y) == 0:
        return [len(points), "", ""]
    x = [point.msssim for point in points]
    slope = statistics.linear_regression(x, y).slope
    return [len(points), f"{statistics.correlation(x, y):.2f}", f"{slope:+.1f}"]


def _verdict(results):
    slopes = {name: row["slope"] for name, row in results.items() if row["slope"] is not None}
    if len(slopes) < 2:
        return ""
    low = min(slopes, key=slopes.get)
    high = max(slopes, key=slopes.get)
    weak = [name for name, row in results.items() if row["r"] is not None and row["r"] < 0.8]
    said = f"It does not show (r below 0.8) for {', '.join(weak)}. " if weak else ""
    return (
        f"{said}The slope is the task's own, from {slopes[low]:+.1f} ({low}) to "
        f"{slopes[high]:+.1f} ({high}): MS-SSIM ranks scans within a task, and says nothing about "
        "how many points they cost."
    )


EXPERIMENTS = [
    Experiment(
        "correlation",
        "MS-SSIM against accuracy (Fig. 13)",
        measure_correlation,
        draw_correlation,
        text_correlation,
    )
]
