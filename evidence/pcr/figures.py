"""Tables and pictures of the page, a function for each section; numbers come from the rows."""

import itertools
import statistics

import numpy as np

from pcrshard.fidelity.tuner import Similarity, choose

from .. import plots
from ..lab import SCANS
from ..pages import estimate, met, paired
from ..plots import BLACK, BLUE, GRAY, GREEN, ORANGE, label
from . import correlation as correlation_
from .runs import known, replay_key, replayed

SHORT = 8  # epochs, where only runs of one length are compared with each other
TOLERANCE = 0.01  # of accuracy, below full fidelity's
THRESHOLD = 0.8
# Table 1: factors at scans 1, 2 and 5, and the mean image in kB.
TABLE1 = {
    "imagenet": (16, 7, 2, 110),
    "ham10000": (30, 15, 3, 250),
    "cars": (14, 6, 2, 110),
    "faces_1024": (7, 4, 3, 80),
}
# Table 2: images/s on one core at scans 1, 2, 5, 10 and of the baseline source.
TABLE2 = {
    "imagenet": (433, 412, 340, 146, 419),
    "ham10000": (465, 438, 275, 96, 240),
    "cars": (266, 240, 225, 127, 268),
    "faces_1024": (239, 213, 195, 129, 286),
}
NAMES = {"imagenet": "ImageNet", "ham10000": "HAM10000", "cars": "Cars", "faces_1024": "CelebAHQ"}
SETS = {
    "imagenet": "ImageNet\n(260)",
    "ham10000": "HAM10000\n(36)",
    "cars": "Cars, cropped\n(99)",
    "faces_1024": "CelebA-HQ\n(32)",
}
SWEEP = (0.25, 0.5, 1, 2, 4, 8, 16)


def short(lab, task):
    """Epochs of the short runs."""
    return task.epochs if lab.quick else SHORT


class Group:
    """Runs of one kind, by seed."""

    def __init__(self, found, size):
        self.runs = found
        self.bytes = size
        first = next(iter(found.values()))
        self.images = first["images"] // len(first["rows"])
        self.cpu_ms = 1000 * statistics.median(
            run["rows"][-1]["cpu_seconds"] / run["images"] for run in found.values()
        )

    @property
    def curves(self):
        """Accuracies: (seeds, epochs)."""
        return [[row["accuracy"] for row in run["rows"]] for run in self.runs.values()]

    @property
    def final(self):
        """The last accuracy, by seed."""
        return {seed: run["rows"][-1]["accuracy"] for seed, run in self.runs.items()}

    def rate(self, bandwidth):
        """Return images per second at this MB/s: X = W / E[s], capped by compute (Theorem 4.1)."""
        return min(1e6 * bandwidth / self.bytes, 1000 / self.cpu_ms)

    def seconds(self, bandwidth, epochs=None):
        """Of some epochs, or of all, at a bandwidth."""
        return (epochs or len(self.curves[0])) * self.images / self.rate(bandwidth)

    def reaches(self, target):
        """Epochs until the mean curve reaches an accuracy in per cent; ``None`` if it does not."""
        return first_reached(plots.band(self.curves)[0], target)


def first_reached(curve, target):
    """Epochs until a curve reaches a value, linear between epochs."""
    for epoch, value in enumerate(curve):
        if value >= target:
            before = curve[epoch - 1] if epoch else 0.0
            return epoch + (1.0 if value == before else (target - before) / (value - before))
    return None


def select(lab, task, scan, epochs, *, script="standard", seeds=None, **others):
    """Runs of a kind that there are, or ``None``."""
    wanted = {"coarse": [], "smoothing": False, "bandwidth": None} | others
    wanted |= {"task": task, "scan": scan, "epochs": epochs, "script": script}
    found = {}
    for run in known(lab).values():
        spec = run["spec"]
        if all(spec[name] == value for name, value in wanted.items()):
            found[spec["seed"]] = run
    found = {seed: found[seed] for seed in seeds or lab.seeds if seed in found}
    sizes = lab.load("bytes") or {}
    return Group(found, sizes[task][script].get(str(scan), 0)) if found else None


def loses_nothing(group, full):
    """Whether the mean final accuracy is within TOLERANCE of full's."""
    return paired(group.final, full.final, 1).mean >= -TOLERANCE


def _static(lab, tasks=None, scans=SCANS, **how):
    """{task: {scan: runs}} of what there is."""
    found = {}
    for task in tasks or lab.tasks:
        groups = {scan: select(lab, task.name, scan, task.epochs, **how) for scan in scans}
        groups = {scan: group for scan, group in groups.items() if group}
        if "full" in groups:
            found[task.name] = groups
    return found


def _minus_full(groups, scan, values=lambda group: group.final):
    """Final accuracy minus full fidelity's."""
    return None if scan == "full" else paired(values(groups[scan]), values(groups["full"]))


def sizes(lab):
    results = lab.load("sizes")
    if results is None:
        return None
    with plots.figure(lab.figure("sizes"), len(results), height=4, sharey=True) as axes:
        for ax, (name, row) in zip(axes, results.items(), strict=True):
            q1, median, q3 = np.array(row["quartiles"][:-1]).T / 1000
            scans = range(1, len(median) + 1)
            shades = [plots.color(scan, len(median)) for scan in scans]
            ax.bar(scans, median, color=shades)
            spread = (median - q1, q3 - median)
            ax.errorbar(scans, median, spread, fmt="none", ecolor=BLACK, capsize=2, lw=1)
            ax.set(title=SETS.get(name, name), xlabel="read up to scan", xticks=scans[::3])
        axes[0].set(ylabel="kB per image\n(median and quartiles)", yscale="log")
    rows = []
    for name, row in results.items():
        means = row["means"]
        if name in TABLE1:
            scans = [f"{times}x" for times in TABLE1[name][:3]]
            rows.append(
                {"name": NAMES[name], "who": "paper", "scans": scans, "kb": TABLE1[name][3]}
            )
        scans = [f"{means[-2] / means[scan - 1]:.1f}x" for scan in (1, 2, 5)]
        rows.append(
            {"name": NAMES.get(name, name), "who": "ours", "scans": scans, "kb": means[-1] / 1000}
        )
    return {"rows": rows}


def decode(lab):
    results = lab.load("decode")
    if results is None:
        return None
    with plots.figure(lab.figure("decode"), len(results), height=4, legend=3, sharey=True) as axes:
        for ax, (name, rates) in zip(axes, results.items(), strict=True):
            groups = dict(zip(("native core", "libjpeg-turbo 2.1"), rates.values(), strict=True))
            shown = groups | ({"paper (2021)": TABLE2[name]} if name in TABLE2 else {})
            ax.set_prop_cycle(color=(BLUE, ORANGE, GRAY))
            plots.bars(ax, shown, ("1", "2", "5", "10", "B"))
            ax.set(title=NAMES.get(name, name), xlabel="scan; B: baseline", yscale="log")
        axes[0].set_ylabel("images/s on one core")
    rows = []
    for name, ours in results.items():
        paper = {"paper": TABLE2[name]} if name in TABLE2 else {}
        for who, rates in (paper | ours).items():
            ratio = rates[3] / rates[4]
            row = {"name": NAMES.get(name, name), "who": who, "rates": rates, "ratio": ratio}
            rows.append(row)
    return {"rows": rows}


def bandwidth(lab):
    results = lab.load("bandwidth")
    if results is None:
        return None
    rows, ratios = [], []
    with plots.figure(lab.figure("bandwidth"), legend=2) as (ax,):
        x = np.linspace(0, 8, 200)
        for scan, row in results["scans"].items():
            line = np.minimum(1e6 * x / row["bytes"], row["unlimited"])
            text = f"{label(scan)}: min(W / E[s], compute)"
            ax.plot(x, line, color=plots.color(scan), lw=1.2, label=text)
            ax.plot(*zip(*row["points"], strict=True), "o", color=plots.color(scan))
            cells = []
            for limit, measured in row["points"]:
                predicted = min(1e6 * limit / row["bytes"], row["unlimited"])
                ratios.append(measured / predicted)
                cells.append(f"{measured:.0f} / {predicted:.0f}")
            text = " | ".join(cells)
            kilobytes = row["bytes"] / 1000
            rows.append(
                {"scan": label(scan), "kb": kilobytes, "cells": text, "free": row["unlimited"]}
            )
        ax.set(
            xlabel="bandwidth W (MB/s); dots: epochs limited by a token bucket",
            ylabel=f"images/s trained ({results['task']})",
            xlim=(0, 8),
            ylim=0,
        )
    return {
        "rows": rows,
        "task": results["task"],
        "low": min(ratios),
        "high": max(ratios),
        "median": statistics.median(ratios),
    }


def gradients(lab):
    results = lab.load("gradients")
    if results is None:
        return None
    tasks = results["tasks"]
    with plots.figure(lab.figure("gradients"), len(tasks), height=4.8, sharey=True) as axes:
        for ax, (task, row) in zip(axes, tasks.items(), strict=True):
            epochs = [epoch for epoch, _ in row["epochs"]]
            # (epochs, scans, 3): mean, low and high
            values = np.array([[scan[1:4] for scan in scans] for _, scans in row["epochs"]])
            for number, saving in enumerate(row["savings"]):
                shade = plots.color(number + 1, len(row["savings"]))
                mean, low, high = values[:, number].T
                text = f"{number + 1} ({saving:.1f}x)"
                ax.plot(epochs, mean, "o-", ms=3, color=shade, label=text)
                if number + 1 in SCANS:
                    low, high = low.clip(-1), high.clip(None, 1)
                    ax.fill_between(epochs, low, high, color=shade, alpha=0.12, lw=0)
            ax.axhline(THRESHOLD, color="#4a5568", ls="--", lw=1)
            ax.set(title=task, xlabel="epochs trained", ylim=(-0.1, 1.03))
            options = {"fontsize": 8, "title_fontsize": 8, "title": "scan (bytes saved)"}
            ax.legend(ncols=2, loc="lower left", **options)
        axes[0].set_ylabel("cosine with the full-fidelity gradient")
    rows = [
        {"task": task, "epoch": epoch, "mean": [0, *(scan[1] for scan in scans)]}
        for task, found in tasks.items()
        for epoch, scans in found["epochs"]
    ]
    return {"rows": rows, "images": results["images"]}


def time(lab):
    results = _static(lab)
    if not results:
        return None
    rows = []
    with plots.figure(lab.figure("time"), len(results), height=4.2, legend=4) as axes:
        for ax, (task, groups) in zip(axes, results.items(), strict=True):
            full = groups["full"]
            # A power of two below the bandwidth at which full fidelity reads three times as long
            # as it computes.
            limit = 2.0 ** np.floor(np.log2(full.bytes / full.cpu_ms / 3e3))
            target = estimate(full.final.values()).mean
            base = full.seconds(limit, full.reaches(target))
            for scan, group in groups.items():
                x = np.arange(1, len(group.curves[0]) + 1) * group.seconds(limit, 1)
                plots.curve(ax, x, group.curves, color=plots.color(scan), label=label(scan))
                epochs = group.reaches(target)
                seconds = epochs and group.seconds(limit, epochs)
                rows.append(
                    {
                        "task": task,
                        "scan": label(scan),
                        "seeds": len(group.runs),
                        "final": estimate(group.final.values()),
                        "minus": _minus_full(groups, scan),
                        "gain": f"{seconds:.0f} s, {base / seconds:.1f}x"
                        if seconds
                        else "not reached",
                    }
                )
            ax.set(title=f"{task} at {limit:g} MB/s", xlabel="seconds of training", ylim=(0, 100))
        axes[0].set_ylabel("validation accuracy (%)")
    return {"rows": rows}


def coarse(lab):
    tasks = [task for task in lab.tasks if lab.quick or task.name != "flowers"]
    found = {
        kind_: {
            task.name: {
                scan: select(
                    lab,
                    task.name,
                    scan,
                    short(lab, task),
                    coarse=list(task.coarse) if kind_ == "coarse" else [],
                )
                for scan in SCANS
            }
            for task in tasks
        }
        for kind_ in ("fine", "coarse")
    }
    if None in found["coarse"][tasks[0].name].values():
        return None
    with plots.figure(lab.figure("coarse"), len(tasks), height=4.2) as axes:
        for ax, task in zip(axes, tasks, strict=True):
            for kind_, style in (("fine", "o-"), ("coarse", "s--")):
                groups = found[kind_][task.name]
                finals = [estimate(group.final.values()) for group in groups.values()]
                text = f"{kind_} labels"
                plots.errors(ax, list(map(str, groups)), finals, fmt=style, label=text)
            title = f"{task.name}\ncoarse: {task.coarse_name}"
            ax.set(title=title, xlabel="scan trained on", ylim=(0, 100))
            ax.legend(loc="lower right")
        axes[0].set_ylabel("final accuracy (%), 95 % interval")
    rows = [
        {
            "task": task,
            "kind": kind_,
            "full": estimate(groups["full"].final.values()),
            "minus": {f"s{scan}": _minus_full(groups, scan) for scan in (1, 2, 5)},
        }
        for kind_, tasks_ in found.items()
        for task, groups in tasks_.items()
    ]
    return {"rows": rows}


def epochs(lab):
    results = _static(lab)
    if not results:
        return None
    with plots.figure(lab.figure("epochs"), len(results), height=4, legend=4) as axes:
        for ax, (task, groups) in zip(axes, results.items(), strict=True):
            for scan, group in groups.items():
                x = range(1, len(group.curves[0]) + 1)
                plots.curve(ax, x, group.curves, color=plots.color(scan), label=label(scan))
            ax.set(title=task, xlabel="epoch", ylim=(0, 100))
        axes[0].set_ylabel("validation accuracy (%)")
    rows = []
    for task, groups in results.items():
        late = {
            f"s{scan}": estimate(statistics.fmean(c[len(c) // 2 :]) for c in group.curves)
            for scan, group in groups.items()
        }
        rows.append({"task": task, **late})
    return {"rows": rows}


def msssim(lab):
    results = lab.load("msssim")
    if results is None:
        return None
    with plots.figure(lab.figure("msssim")) as (ax,):
        for name, row in results.items():
            style = "o-" if name in NAMES else "o--"
            text = NAMES.get(name, f"{name} (task)")
            ax.plot(range(1, len(row["msssim"]) + 1), row["msssim"], style, ms=4, label=text)
        ax.axhline(0.95, color=GRAY, lw=1)
        ax.set(xlabel="read up to scan", ylabel="mean MS-SSIM against full fidelity")
        ax.set_xticks(range(1, 11))
        ax.legend(ncols=2)
    rows = [
        {"name": NAMES.get(name, name), "images": row["images"], "at": [0, *row["msssim"]]}
        for name, row in results.items()
    ]
    near = sum(row["msssim"][4] >= 0.95 for row in results.values())
    return {"rows": rows, "met": near, "sets": len(results)}


def picks(lab, task):
    """(the scan that most tunings picked, all scans that were picked and full)."""
    picked = [reports[-1][1] for _, reports in _reports(lab, task)]
    return statistics.mode(picked) if picked else "full", list(dict.fromkeys([*picked, "full"]))


def _reports(lab, task):
    """(seed, reports) of the tuner's runs: whole ones, then short ones of more seeds."""
    found = {}
    for length, seeds in ((task.epochs, lab.seeds), (2, range(len(lab.seeds), 5))):
        group = select(lab, task.name, "tuner", length, seeds=seeds)
        found |= group.runs if group else {}
    return [(seed, run["reports"]) for seed, run in found.items() if run["reports"]]


class _Limited:
    """Runs of a task at a limited bandwidth: replayed seconds and real ones."""

    def __init__(self, lab, task, limit):
        self.task = task
        self.tuned, picked = picks(lab, task)
        seconds = replayed(lab)
        self.runs, self.seconds, self.real = {}, {}, {}
        for name in ("full", 5, 2, 1, "tuner"):
            group = select(lab, task.name, name, task.epochs)
            keys = (
                {s: replay_key(run["spec"], limit) for s, run in group.runs.items()}
                if group
                else {}
            )
            if keys and all(key in seconds for key in keys.values()):
                self.runs[name] = group
                self.seconds[name] = [seconds[key] for key in keys.values()]
                real = select(lab, task.name, name, task.epochs, bandwidth=limit)
                self.real[name] = real.runs if real else {}
        seeds = lab.seeds if lab.quick else range(10)
        self.picked = {s: select(lab, task.name, s, task.epochs, seeds=seeds) for s in picked}
        self.reports = _reports(lab, task)
        # What full's accuracy is taken to be: the lower end of its interval.
        self.interval = (
            estimate(self.picked["full"].final.values()) if self.picked["full"] else None
        )

    def whole(self, name):
        """Times shorter for all epochs."""
        full, other = (
            statistics.fmean(times[-1] for times in self.seconds[each]) for each in ("full", name)
        )
        return full / other

    def gain(self, name):
        """Times shorter to full's accuracy; ``None`` if it is not reached."""
        base, seconds = (self._reach(each) for each in ("full", name))
        return base / seconds if base and seconds else None

    def _reach(self, name):
        times = [0.0, *np.mean(self.seconds[name], axis=0)]
        epochs = self.runs[name].reaches(self.interval.low)
        return epochs and float(np.interp(epochs, np.arange(len(times)), times))

    def inside(self, name):
        """Whether the mean final accuracy is in full's interval or above it."""
        return estimate(self.runs[name].final.values()).mean >= self.interval.low

    def real_gains(self):
        """Times that real runs at the tuned scan took less than those at full fidelity, by seed."""
        full, tuned = ({s: run["rows"][-1]["seconds"] for s, run in self.real[name].items()}
                       for name in ("full", self.tuned))  # fmt: skip
        return [full[seed] / tuned[seed] for seed in full if seed in tuned]


def _kind_name(name):
    return {"tuner": "ScanTuner", "full": "full fidelity"}.get(name, f"scan {name}, static")


def _real_cell(limited, name):
    real, free = limited.real[name], limited.runs[name].runs
    if not real:
        return None
    accuracies = [[[row["accuracy"] for row in run["rows"]] for run in (real[s], free[s])]
                  for s in real]  # fmt: skip
    equal = sum(first == second for first, second in accuracies)
    seconds = ", ".join(f"{run['rows'][-1]['seconds']:.0f}" for run in real.values())
    return f"{seconds} s; equal at every epoch in {equal} of {len(real)}"


def _limited_tasks(lab):
    found = [_Limited(lab, lab.task(n), 20.0 if lab.quick else 1.0) for n in (1, 2)]
    return [limited for limited in found if "full" in limited.runs]


def autotune(lab):
    tasks = _limited_tasks(lab)
    if not tasks:
        return None
    limit = 20.0 if lab.quick else 1.0
    rows, picked = [], []
    with plots.figure(
        lab.figure("autotune"), len(tasks), height=4.5, legend=5, sharey=True
    ) as axes:
        for ax, limited in zip(axes, tasks, strict=True):
            for name, group in limited.runs.items():
                seconds = np.mean(limited.seconds[name], axis=0)
                style = "s--" if name == "tuner" else "o-"
                shade = name in ("full", "tuner")
                options = {"color": plots.color(name), "label": _kind_name(name), "lw": 1.5}
                plots.curve(ax, seconds, group.curves, shade, style, **options)
                gain = limited.gain(name)
                rows.append(
                    {
                        "task": limited.task.name,
                        "name": _kind_name(name),
                        "seeds": len(group.runs),
                        "final": estimate(group.final.values()),
                        "inside": "yes" if limited.inside(name) else "no",
                        "seconds": estimate((t[-1] for t in limited.seconds[name]), 1),
                        "whole": limited.whole(name),
                        "gain": f"{gain:.2f}x" if gain else "not reached",
                        "real": _real_cell(limited, name),
                    }
                )
            xlabel = f"seconds of training at {limit:g} MB/s"
            ax.set(title=limited.task.name, xlabel=xlabel, ylim=(0, 100))
            for seed, reports in limited.reports:
                seen = [Similarity(*each) for each in reports[-1][2]]
                others = [choose(seen, threshold) for threshold in (0.9, 0.95, 0.98)]
                cosines = {s.scan: f"{s.mean:.2f} (> {s.lower:.2f})" for s in seen}
                cells = [cosines.get(scan, "") for scan in (1, 2, 4, 5, 6)]
                cells = [limited.task.name, seed, reports[-1][1], *others, *cells]
                picked.append({"cells": " | ".join(map(str, cells))})
        axes[0].set_ylabel("validation accuracy (%), mean of seeds")
    full = [
        f"{t.task.name} {t.interval.low:.1f} to {t.interval.high:.1f} ({t.interval.count} seeds)"
        for t in tasks
    ]
    shown = [
        f"{t.task.name}, {_kind_name(t.tuned)}, {len(t.picked[t.tuned].runs)} seeds: "
        f"{paired(t.picked[t.tuned].final, t.picked['full'].final):+.1fv}"
        for t in tasks
        if t.tuned != "full"
    ]
    return {
        "rows": rows,
        "picks": picked,
        "limit": limit,
        "threshold": THRESHOLD,
        "intervals": ", ".join(full),
        "shown": "; ".join(shown),
    }


def rates(lab):
    results = lab.load("rates")
    if results is None:
        return None
    rows = []
    with plots.figure(lab.figure("rates")) as (ax,):
        limited = {model: list(row["limited"].values()) for model, row in results["models"].items()}
        plots.bars(ax, limited, list(map(label, SCANS)), ".0f")
        for number, (model, row) in enumerate(results["models"].items()):
            text = f"{model}, no limit, full"
            ax.axhline(row["unlimited"], color=f"C{number}", ls="--", lw=1, label=text)
            cells = [f"{v:.0f} ({v / limited[model][-1]:.1f}x)" for v in limited[model]]
            rows.append({"model": model, "cells": " | ".join(cells), "free": row["unlimited"]})
        ylabel = f"images/s trained ({results['task']}, {results['bandwidth']:g} MB/s)"
        ax.set(xlabel="scan trained on", ylabel=ylabel)
        ax.legend(ncols=2, loc="upper right")
        ax.margins(y=0.25)
    return {"rows": rows, "task": results["task"], "limit": results["bandwidth"]}


def sweep(lab):
    results = _static(lab)
    if not results:
        return None
    points = {
        (limited.task.name, scan): statistics.fmean(times[-1] for times in limited.seconds[scan])
        for limited in _limited_tasks(lab)
        for scan in SCANS
        if scan in limited.seconds
    }
    rows, ratios = [], []
    with plots.figure(lab.figure("sweep"), len(results), height=4, legend=4, sharey=True) as axes:
        x = np.geomspace(SWEEP[0], SWEEP[-1], 60)
        for ax, (task, groups) in zip(axes, results.items(), strict=True):
            for scan, group in groups.items():
                shade = plots.color(scan)
                ax.plot(x, [group.seconds(w) for w in x], color=shade, label=label(scan))
                seen = None
                if (task, scan) in points:
                    ax.plot(1.0, points[task, scan], "o", color=shade)
                    line = group.seconds(20.0 if lab.quick else 1.0)
                    ratios.append(points[task, scan] / line)
                    seen = f"{points[task, scan]:.0f} s / {line:.0f} s"
                gains = [f"{group.rate(w) / groups['full'].rate(w):.2f}x" for w in SWEEP]
                cells = " | ".join(gains)
                rows.append({"task": task, "scan": label(scan), "cells": cells, "seen": seen})
            title = f"{task}, {len(groups['full'].curves[0])} epochs"
            ax.set(title=title, xlabel="bandwidth (MB/s)")
            ax.set_xscale("log", base=2)
            ax.set_yscale("log", base=2)
            ax.set_xticks(SWEEP, [f"{w:g}" for w in SWEEP], fontsize=9)
        ticks = [2**power for power in range(3, 11)]
        axes[0].set_yticks(ticks, list(map(str, ticks)))
        axes[0].set_ylabel("seconds of training")
    low, high = (min(ratios), max(ratios)) if ratios else (None, None)
    return {"rows": rows, "low": low, "high": high}


def _at_equal_time(on, off):
    """Accuracy of each seed at the CPU time that the cheaper kind takes for all its epochs: pairs
    (on, off).
    """
    budget = min(row.cpu_ms * row.images * len(row.curves[0]) for row in (on, off))
    found = []
    for row in (on, off):
        epochs = budget / (row.cpu_ms * row.images)
        places = np.arange(1, len(row.curves[0]) + 1)
        values = [float(np.interp(epochs, places, curve)) for curve in row.curves]
        found.append(dict(zip(row.runs, values, strict=True)))
    return found


def _own(group):
    return {seed: run["accuracy_at_own_scan"] for seed, run in group.runs.items()}


def smoothing(lab):
    tasks = [task for task in lab.tasks if lab.quick or task.name != "flowers"]
    rows = []
    with plots.figure(lab.figure("smoothing"), len(tasks), height=4.2) as axes:
        for ax, task in zip(axes, tasks, strict=True):
            for scan in (1, 2, 5):
                seeds = (*lab.seeds, 3, 4) if scan == 1 else lab.seeds
                off, on = (
                    select(lab, task.name, scan, short(lab, task), seeds=seeds, smoothing=smooth)
                    for smooth in (False, True)
                )
                if on is None or off is None:
                    return None
                pairs = ", ".join(f"{100 * (on.final[s] - off.final[s]):+.1f}" for s in on.runs)
                rows.append(
                    {
                        "task": task.name,
                        "scan": label(scan),
                        "pairs": pairs,
                        "equal": paired(on.final, off.final),
                        "timed": paired(*_at_equal_time(on, off)),
                        "own": paired(_own(on), _own(off)),
                        "ratio": on.cpu_ms / off.cpu_ms,
                    }
                )
            found = rows[-3:]
            for shift, what, mark, shade in (
                (-0.1, "equal", "o", BLUE),
                (0.1, "timed", "s", ORANGE),
            ):
                options = {"fmt": mark, "color": shade}
                text = {"equal": "equal epochs", "timed": "equal CPU time"}[what]
                values = [row[what] for row in found]
                plots.errors(ax, np.arange(3) + shift, values, label=text, **options)
            ax.axhline(0, color=BLACK, lw=1)
            ax.set_xticks(range(3), [row["scan"] for row in found])
            ax.set_title(task.name)
            ax.legend()
        axes[0].set_ylabel("accuracy with smoothing minus without\n(points, 95 % interval)")
    return {"rows": rows}


def _script_groups(lab):
    """{task: (full, {script: {scan: runs}})} up to the first prefix that loses nothing."""
    found = {}
    for task, groups in _static(lab, scans=("full",)).items():
        full = groups["full"]
        scripts = {}
        for script in ("standard", "q95"):
            scripts[script] = {}
            for scan in itertools.count(1):
                group = select(lab, task, scan, len(full.curves[0]), script=script)
                if group is None:
                    break
                scripts[script][scan] = group
                if loses_nothing(group, full):
                    break
        if scripts["q95"]:
            found[task] = full, scripts
    return found


def scripts(lab):
    results = _script_groups(lab)
    if not results:
        return None
    rows = []
    shades = {"standard": BLUE, "q95": ORANGE}
    with plots.figure(lab.figure("scripts"), len(results), height=4.2, legend=3) as axes:
        for ax, (task, (full, found)) in zip(axes, results.items(), strict=True):
            finals = [100 * value for value in full.final.values()]
            ax.axhspan(min(finals), max(finals), color=GREEN, alpha=0.12, lw=0)
            ax.axhline(statistics.fmean(finals), color=GREEN, lw=1, label="full fidelity")
            rows.append(
                {"task": task, "script": None, "scan": "full", "kb": full.bytes / 1e3,
                 "final": estimate(full.final.values()), "minus": None}
            )  # fmt: skip
            for (script, groups), shift in zip(found.items(), ((4, -12), (-9, 6)), strict=True):
                x = [group.bytes / 1e3 for group in groups.values()]
                y = np.array([[100 * v for v in g.final.values()] for g in groups.values()])
                mean = y.mean(axis=1)
                spread = (mean - y.min(axis=1), y.max(axis=1) - mean)
                options = {"color": shades[script], "label": script}
                ax.errorbar(x, mean, spread, fmt="o-", capsize=3, **options)
                for scan, place in zip(groups, zip(x, mean, strict=True), strict=True):
                    offset = {"xytext": shift, "textcoords": "offset points"}
                    ax.annotate(str(scan), place, fontsize=9, color=shades[script], **offset)
                rows += [
                    {"task": task, "script": script, "scan": label(scan), "kb": g.bytes / 1e3,
                     "final": estimate(g.final.values()), "minus": paired(g.final, full.final)}
                    for scan, g in groups.items()
                ]  # fmt: skip
            ax.set(title=task, xlabel="kB per image", xlim=0)
        axes[0].set_ylabel("final accuracy (%), min to max of seeds")
    return {"rows": rows, "tolerance": 100 * TOLERANCE}


def _share(rows):
    """Of the time of some steps, that spent waiting, in per cent."""
    total = sum(row[1] + row[2] for row in rows)
    return 100 * sum(row[1] for row in rows) / total if total else 0.0


def wait(lab):
    results = lab.load("wait")
    if results is None:
        return None
    rows, sizes, per_shard = results["rows"], results["sizes"], results["per_shard"]
    _draw_wait(lab.figure("wait"), results)
    drop = results["phases"][0][0]
    back = drop + results["phases"][1][0]
    low = [row for row in rows if drop <= row[0] < back]
    first = next((i for i, row in enumerate(low) if row[1] > 0.05 * row[2]), 0)
    decided = next((i for i in range(first, len(low)) if low[i][3] != low[first - 1][3]), None)
    # Scan 10 and full differ by metadata; where that is little, scan 10 counts.
    near = {"full", *(n for n, size in enumerate(sizes[:-1], 1) if size > 0.98 * sizes[-1])}
    back_at = next((row[0] for row in rows if row[0] > back and row[3] in near), None)
    found = {
        "before": _share([row for row in rows if row[0] < drop]),
        "decided": "never"
        if decided is None
        else f"{(decided - first) * results['batch'] / per_shard:.1f} shards",
        "changes": sum(a[3] != b[3] for a, b in itertools.pairwise(low)),
        "returned": "not within the run" if back_at is None else f"{back_at - back:.1f} s",
        "after": _share([row for row in rows if back_at and row[0] > back_at]),
    }
    shares = [
        {"n": n, "share": _share(low[first + n * per_shard // results["batch"] :])}
        for n in (0, 3, 4, 5, 6)
    ]
    return {
        **found,
        "shards": shares,
        "per_shard": per_shard,
        "batch": results["batch"],
        "target": shares[1]["share"],
    }


def _draw_wait(path, results):
    rows, sizes = results["rows"], results["sizes"]
    times = [row[0] for row in rows]
    with plots.figure(path, rows=3, height=6, sharex=True) as (top, middle, bottom):
        top.plot(times, [results["top"] * row[4] / 1e6 for row in rows], color=BLACK)
        top.set(ylabel="bandwidth\n(MB/s)", ylim=0)
        read = [sizes[-1 if row[3] == "full" else row[3] - 1] / 1000 for row in rows]
        middle.step(times, read, where="post", color=BLUE)
        ticks = [sizes[scan - 1] / 1000 for scan in (1, 2, 4, 5, 6, 9, 10)]
        middle.set_yticks(ticks, ["scan 1", "2", "4", "5", "6", "9", "full"], fontsize=9)
        middle.set_ylabel("scan read")
        shares = [_share(rows[max(0, i - 9) : i + 1]) for i in range(len(rows))]
        bottom.plot(times, shares, color="#c05621")
        bottom.axhline(5, color=GRAY, ls="--", lw=1)
        bottom.set(ylabel="waiting\n(% of 10 steps)", xlabel="seconds")


def correlation(lab):
    return correlation_.correlation(lab, _static(lab), _script_groups(lab))


def targets(lab):
    rows = [row for limited in _limited_tasks(lab) for row in _autotune_targets(limited)]
    for task, (full, found) in _script_groups(lab).items():
        (a, standard), (b, q95) = (list(groups.items())[-1] for groups in found.values())
        if loses_nothing(standard, full) and loses_nothing(q95, full):
            what = (
                f"{task}: bytes of q95's cheapest prefix within a point of full's accuracy (scan "
                f"{b}) over standard's (scan {a}), {len(q95.runs)} seeds (target: below 1)"
            )
            ratio = q95.bytes / standard.bytes
            rows.append((what, f"{ratio:.2f}", ratio < 1))
    waited = wait(lab)
    if waited:
        what = "BandwidthTuner: waiting from 3 shards after the first wait on, bandwidth / 4"
        rows.append((f"{what} (target: 5 %)", f"{waited['target']:.1f} %", waited["target"] < 5))
        seen = waited["returned"] != "not within the run"
        value = f"after {waited['returned']}" if seen else "not seen"
        rows.append(("BandwidthTuner: returns to full fidelity with the bandwidth", value, seen))
    cells = [{"what": what, "value": value, "met": met(reached)} for what, value, reached in rows]
    return {"rows": cells} if cells else None


def _autotune_targets(limited):
    """(what, value, reached) of the targets that these runs answer."""
    task = limited.task.name
    for name in dict.fromkeys((limited.tuned, "tuner")):
        if name != "full" and name in limited.runs:
            gain = limited.gain(name)
            what = (
                f"{task}, {_kind_name(name)}: time to full fidelity's final accuracy (lower end of "
                "its 95 % interval) shorter, real reads, sleeps for steps (target: 2.0x)"
            )
            yield what, f"{gain:.2f}x" if gain else "not reached", bool(gain and gain >= 2)
            inside = limited.inside(name)
            what = f"{task}, {_kind_name(name)}: mean final accuracy within that interval or above"
            yield what, "yes" if inside else "no", inside
    gains = limited.real_gains()
    if gains:
        what = (
            f"{task}, {_kind_name(limited.tuned)}: whole real runs shorter than at full fidelity, "
            f"{len(gains)} seeds (target: 2.0x)"
        )
        yield what, ", ".join(f"{gain:.2f}x" for gain in gains), min(gains) >= 2
    picked = [reports[-1][1] for _, reports in limited.reports]
    numbers = [10 if scan == "full" else scan for scan in picked]
    same = sum(abs(number - statistics.median_low(numbers)) <= 1 for number in numbers)
    what = f"{task}: ScanTuner picks the same scan, one group either way (target: 5 of 5 seeds)"
    value = f"{same} of {len(picked)}: {', '.join(map(str, picked))}"
    yield what, value, same == len(picked) >= 5
    full = limited.picked["full"]
    gaps = {
        scan: paired(group.final, full.final).mean
        for scan, group in limited.picked.items()
        if scan != "full" and group
    }
    what = (
        f"{task}: static training at the picked scans, final accuracy minus full's, mean of "
        f"{len(full.runs)} seeds (target: -1.0 points)"
    )
    value = ", ".join(f"scan {scan} {gap:+.1f} points" for scan, gap in gaps.items())
    yield what, value, bool(gaps) and all(gap >= -1 for gap in gaps.values())


SECTIONS = {
    "targets": targets,
    "sizes": sizes,
    "decode": decode,
    "bandwidth": bandwidth,
    "gradients": gradients,
    "time": time,
    "coarse": coarse,
    "epochs": epochs,
    "msssim": msssim,
    "correlation": correlation,
    "autotune": autotune,
    "rates": rates,
    "sweep": sweep,
    "smoothing": smoothing,
    "scripts": scripts,
    "wait": wait,
}
