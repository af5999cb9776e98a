"""Tables and pictures of the page: tails and whole networks tuned at each scan, linear probes."""

import statistics
from collections import defaultdict

import numpy as np

from .. import plots
from ..imagenet.figures import gap, share
from ..pages import estimate, paired
from ..plots import BLACK, label

FULL = "full"
TUNER = "tuner"
NAMES = {FULL: "full fidelity", TUNER: "ScanTuner", "mixed": "mixed", "mostly 2": "mostly 2"}
ORDER = ("1", "2", "mostly 2", "5", "mixed", TUNER, FULL)
TESTED = ("1", "1 smoothed", "2", "2 smoothed", "5", FULL)
SHADES = {TUNER: BLACK, "mixed": "#805ad5", "mostly 2": "#c05621"}


def name(trained):
    """As it stands in tables."""
    return NAMES.get(trained, f"scan {trained}")


class Trained:
    """Runs of a task by what they were trained on, in their order, and by seed."""

    def __init__(self, rows):
        found = defaultdict(dict)
        for row in sorted(rows, key=lambda row: row["seed"]):
            found[str(row["kind"])][row["seed"]] = row
        self.kinds = {trained: found[trained] for trained in ORDER if trained in found}

    def final(self, trained, tested=FULL):
        """Final accuracies by seed."""
        return {seed: run["accuracy"][tested] for seed, run in self.kinds[trained].items()}

    def mean(self, trained, tested=FULL):
        """The mean of these, in per cent."""
        return 100 * statistics.fmean(self.final(trained, tested).values())

    def minus(self, trained):
        """Final accuracy minus full fidelity's, of paired seeds."""
        return None if trained == FULL else paired(self.final(trained), self.final(FULL))

    def read(self, trained):
        """Mean megabytes of a run, tunings included."""
        runs = self.kinds[trained].values()
        return (
            statistics.fmean(sum(epoch["bytes"] for epoch in run["epochs"]) for run in runs) / 1e6
        )

    def fewer(self, trained):
        """Times fewer bytes than at full fidelity."""
        return self.read(FULL) / self.read(trained)


def tasks_of(rows):
    """{task: runs} of what has runs at full fidelity."""
    names = sorted({row["task"] for row in rows})
    found = {task: Trained(row for row in rows if row["task"] == task) for task in names}
    return {task: trained for task, trained in found.items() if FULL in trained.kinds}


def _draw(path, panels, columns):
    """Accuracy against the bytes read so far, epoch by epoch."""
    with plots.figure(path, len(panels), height=4.5, legend=columns) as axes:
        for ax, (title, found) in zip(axes, panels.items(), strict=True):
            for trained, runs in found.kinds.items():
                epochs = [run["epochs"] for run in runs.values()]
                curves = [[epoch["accuracy"] for epoch in run] for run in epochs]
                steps = np.mean([[epoch["bytes"] for epoch in run] for run in epochs], axis=0)
                style = "s--" if trained in SHADES else "o-"
                color = SHADES.get(trained) or plots.color(trained)
                shade = trained in (FULL, "2") and len(runs) > 2
                options = {"color": color, "lw": 1.5, "label": name(trained)}
                plots.curve(ax, np.cumsum(steps) / 1e6, curves, shade, style, **options)
            ax.set(title=title, xlabel="MB read")
            ax.set_xscale("log", subs=range(2, 10))
            ax.xaxis.get_major_locator().set_params(subs=(1, 3))
            ax.xaxis.set_major_formatter("{x:g}")
            ax.xaxis.set_minor_formatter("")
        axes[0].set_ylabel("accuracy at full fidelity (%)")


def tails(lab):
    tasks = tasks_of(lab.rows())
    if not tasks:
        return None
    _draw(lab.figure("tails"), tasks, 6)
    rows, cross = [], []
    for task, found in tasks.items():
        for trained, runs in found.kinds.items():
            rows.append(
                {
                    "task": task,
                    "name": name(trained),
                    "seeds": len(runs),
                    "read": found.read(trained),
                    "fewer": found.fewer(trained),
                    "final": estimate(found.final(trained).values()),
                    "minus": found.minus(trained),
                }
            )
            if trained != TUNER:
                cells = " | ".join(f"{found.mean(trained, tested):.1f}" for tested in TESTED)
                cross.append({"task": task, "name": name(trained), "cells": cells})
    return {"rows": rows, "cross": cross}


def link(lab):
    results = lab.load("link")
    if not results:
        return None
    rows = [
        {
            "task": task,
            "name": name(scan),
            "mb": epoch["bytes"] / 1e6,
            "seconds": epoch["seconds"],
            "speed": epoch["images"] / epoch["seconds"],
            "busy": 100 * epoch["cpu_seconds"] / epoch["seconds"],
            "times": row["epochs"][FULL]["seconds"] / epoch["seconds"],
        }
        for task, row in results.items()
        for scan, epoch in row["epochs"].items()
    ]
    return {"rows": rows, "rate": next(iter(results.values()))["link"] / 1e6}


def tunings(lab):
    tasks = {task: found for task, found in tasks_of(lab.rows()).items() if TUNER in found.kinds}
    if not tasks:
        return None
    rows = []
    with plots.figure(lab.figure("tunings"), len(tasks), height=4, legend=4, sharey=True) as axes:
        for ax, (task, found) in zip(axes, tasks.items(), strict=True):
            cosines = defaultdict(lambda: defaultdict(list))  # scan, epoch: means by seed
            for seed, run in found.kinds[TUNER].items():
                for tuning in run["tunings"]:
                    for scan, mean, *_ in tuning["cosines"]:
                        cosines[scan][tuning["epoch"]].append(mean)
                    seen = ", ".join(f"{scan}: {mean:.2f}" for scan, mean, *_ in tuning["cosines"])
                    rows.append(
                        {"task": task, "seed": seed, **tuning, "seen": seen,
                         "mb": tuning["bytes"] / 1e6}
                    )  # fmt: skip
            for scan, by_epoch in cosines.items():
                color, epochs = plots.color(scan), sorted(by_epoch)
                means = [statistics.fmean(by_epoch[epoch]) for epoch in epochs]
                ax.plot(epochs, means, "o-", ms=4, color=color, label=label(scan))
                seeds = [by_epoch[epoch] for epoch in epochs]
                ax.plot(epochs, seeds, ".", ms=4, color=color, alpha=0.5)
            ax.axhline(0.9, color="#4a5568", ls="--", lw=1)
            ax.set(title=task, xlabel="epochs trained", xticks=epochs)
        axes[0].set_ylabel("cosine with full fidelity's gradient")
    return {"rows": rows}


def networks(lab):
    """{network: {task: runs}} of networks trained in all their layers."""
    rows = lab.rows("layers")
    names = dict.fromkeys(row["network"] for row in rows)
    return {n: tasks_of([row for row in rows if row["network"] == n]) for n in names}


def _by_seed(found, trained):
    full = found.final(FULL)
    return [100 * (value - full[s]) for s, value in found.final(trained).items() if s in full]


def layers(lab):
    nets = {net: tasks for net, tasks in networks(lab).items() if tasks}
    if not nets:
        return None
    panels = {
        f"{net}\n{task}": found for net, tasks in nets.items() for task, found in tasks.items()
    }
    _draw(lab.figure("layers"), panels, 3)
    values = {}
    for net, tasks in nets.items():
        runs = [run for found in tasks.values() for k in found.kinds.values() for run in k.values()]
        rows = [
            {
                "task": task,
                "name": name(trained),
                "read": found.read(trained),
                "fewer": found.fewer(trained),
                "final": ", ".join(f"{100 * value:.1f}" for value in found.final(trained).values()),
                "minus": None
                if trained == FULL
                else ", ".join(f"{value:+.1f}" for value in _by_seed(found, trained)),
                "cells": " | ".join(f"{found.mean(trained, t):.1f}" for t in ("1", "2", "5", FULL)),
            }
            for task, found in tasks.items()
            for trained in found.kinds
        ]
        values["lite0" if "Lite0" in net else "resnet"] = {
            "rows": rows,
            "epochs": len(runs[0]["epochs"]),
            "seconds": statistics.fmean(run["cpu_seconds"] for run in runs),
            "speed": statistics.median(run["images"] / run["training_cpu_seconds"] for run in runs),
        }
    return values


def transfer(lab):
    results = lab.load("transfer")
    if results is None:
        return None
    rows, remedies = [], []
    with plots.figure(lab.figure("transfer"), len(results), height=4.5) as axes:
        for ax, (task, row) in zip(axes, results.items(), strict=True):
            # Per cent by what was trained on and tested on; empty where it was not measured.
            cell = defaultdict(
                lambda: None, {k: f"{share(m):.1fm}" for k, m in row["marks"].items()}
            )
            for scan, size in row["bytes"].items():
                marks, color = row["marks"], plots.color(scan)
                for trained, marker in ((f"{scan} > full", "o"), (f"{scan} > {scan}", "x")):
                    plots.errors(ax, [size / 1e3], [share(marks[trained])], fmt=marker, color=color)
                minus = gap(marks[f"{scan} > full"], marks["full > full"])
                rows.append(
                    {
                        "task": task,
                        "scan": scan,
                        "fewer": row["bytes"][FULL] / size,
                        "full": cell[f"{scan} > full"],
                        "minus": None if scan == FULL else minus,
                        "own": cell[f"{scan} > {scan}"],
                        "mixed": cell[f"mixed > {scan}"],
                    }
                )
                smoothed, adapted = f"{scan} smoothed", f"{scan} adapted"
                if scan != FULL and f"full > {smoothed}" in marks:
                    ways = ["full > full", f"full > {scan}", f"full > {smoothed}"]
                    ways += [f"full adapted > {adapted}", f"{scan} > {scan}"]
                    ways += [f"{adapted} > {adapted}", f"mixed > {scan}"]
                    cells = " | ".join(cell[way] or "" for way in ways)
                    remedies.append({"task": task, "scan": scan, "cells": cells})
            ax.set(title=f"{task}, {row['images']} pictures", xlabel="kB a picture", xlim=0)
        axes[0].set_ylabel("accuracy (%), 95 % interval")
        text = "o: tested at full fidelity, x: at the scan that was trained on"
        axes[0].figure.supxlabel(text, fontsize="medium")
    return {"rows": rows, "remedies": remedies}


SECTIONS = (
    tails,
    link,
    tunings,
    layers,
    transfer,
)
