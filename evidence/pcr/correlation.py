"""MS-SSIM against accuracy: every scan, script, task and network that there is."""

import statistics

import numpy as np

from .. import plots
from ..finetuning.figures import tasks_of
from ..imagenet.figures import Seen, share
from ..pages import estimate

MARKERS = {"standard": "o", "q95": "s"}


def _likeness(values, scan):
    return 1.0 if scan == "full" else values[int(scan) - 1]


def _small(lab, likeness, static, scripts):
    """Runs of the small network from scratch: both scripts."""
    q95 = lab.load("msssim-q95") or {}
    for task, groups in static.items():
        points = [
            ("standard", scan, _likeness(likeness[task], scan), estimate(group.final.values()))
            for scan, group in groups.items()
        ]
        if task in q95 and task in scripts:
            points += [
                ("q95", scan, q95[task][scan - 1], estimate(group.final.values()))
                for scan, group in scripts[task][1]["q95"].items()
            ]
        yield f"small_cnn, {task}", points


def _finetuned(lab, likeness):
    """Fine-tuned tails of Lite0."""
    for task, found in tasks_of(lab.beside("finetuning").rows()).items():
        scans = [scan for scan in found.kinds if scan == "full" or scan.isdigit()]
        yield (
            f"Lite0 tuned, {task}",
            [
                (
                    "standard",
                    scan,
                    _likeness(likeness[task], scan),
                    estimate(found.final(scan).values()),
                )
                for scan in scans
            ],
        )


def _pretrained(lab):
    """Networks of ImageNet on its photographs, never trained again."""
    beside = lab.beside("imagenet")
    seen, guesses = Seen(beside), beside.load("guesses")
    for network in seen.networks if guesses else ():
        points = []
        for name, msssim in guesses["msssim"].items():
            script, scan = name.split()
            points.append((script, scan, msssim, share(seen.plain(network)[name])))
        yield f"{network.title()}, ImageNet", points


def _fit(points):
    """(r, slope) of MS-SSIM and accuracy; nothing of two points, or of equal ones."""
    x, y = ([point[2] for point in points], [point[3].mean for point in points])
    if len(points) < 3 or statistics.pstdev(y) == 0:
        return None, None
    return statistics.correlation(x, y), statistics.linear_regression(x, y)


def _ranks(values):
    """Place of each value; equal ones share theirs."""
    ordered = np.sort(values)
    first = np.searchsorted(ordered, values, "left")
    return ((first + np.searchsorted(ordered, values, "right")) / 2).tolist()


def correlation(lab, static, scripts):
    likeness = lab.load("msssim")
    if likeness is None or not static:
        return None
    likeness = {task: likeness[task]["msssim"] for task in static}
    groups = dict([
        *_small(lab, likeness, static, scripts),
        *_finetuned(lab, likeness),
        *_pretrained(lab),
    ])  # fmt: skip
    groups = {name: points for name, points in groups.items() if len(points) > 2}
    rows = []
    for name, points in groups.items():
        r, line = _fit(points)
        high = [point for point in points if point[2] >= 0.9]
        above_r, above = _fit(high)
        x, y = [point[2] for point in points], [point[3].mean for point in points]
        rows.append(
            {
                "name": name,
                "points": len(points),
                "r": r,
                "rank": line and statistics.correlation(_ranks(x), _ranks(y)),
                "slope": line and line.slope / 100,
                "above": len(high),
                "above_r": above_r,
                "above_slope": above and above.slope / 100,
                "line": line,
            }
        )
    _draw(lab.figure("correlation"), groups, rows)
    weak = [row["name"] for row in rows if row["r"] is not None and row["r"] < 0.8]
    fitted = sorted((row for row in rows if row["line"]), key=lambda row: row["slope"])
    said = {"low": fitted[0], "high": fitted[-1]} if fitted else {"low": None, "high": None}
    return {"rows": rows, "weak": ", ".join(weak), **said}


def _draw(path, groups, rows):
    count = min(4, len(groups))
    lines = -(-len(groups) // count)
    with plots.figure(path, count, lines, height=2.9 * lines) as axes:
        for ax in axes[len(groups) :]:
            ax.set_axis_off()
        for ax, row in zip(axes, rows, strict=False):
            for script, scan, msssim, accuracy in groups[row["name"]]:
                options = {"fmt": MARKERS[script], "ms": 4, "capsize": 2}
                plots.errors(ax, [msssim], [accuracy], color=plots.color(scan), **options)
            if row["line"]:
                xs = np.array([min(point[2] for point in groups[row["name"]]), 1.0])
                slope, intercept = row["line"]
                ax.plot(xs, intercept + slope * xs, color=plots.GRAY, lw=1, zorder=0)
                ax.set_title(f"{row['name']}\nr = {row['r']:.2f}", fontsize=9)
            ax.set_xlabel("MS-SSIM", fontsize=9)
            ax.tick_params(labelsize=8)
        for ax in axes[::count]:
            ax.set_ylabel("accuracy (%)")
