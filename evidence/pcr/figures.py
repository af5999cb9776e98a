"""The values of the page, a function for each section; numbers come from the rows."""

import itertools
import statistics

import numpy as np
from scipy import stats

from pcrshard.fidelity.tuner import Similarity, choose

from ..finetuning import figures as finetuning
from ..imagenet import figures as imagenet
from ..lab import SCANS
from ..pages import Estimate, NotMeasured, estimate, paired
from ..plots import label
from .runs import known, replay_key, replayed

SHORT = 8  # epochs, where only runs of one length are compared with each other
TOLERANCE = 0.01  # of accuracy, below full fidelity's
THRESHOLD = 0.8
# Table 1: factors at scans 1, 2 and 5, and the mean image in bytes.
TABLE1 = {
    "imagenet": (16, 7, 2, 110e3),
    "ham10000": (30, 15, 3, 250e3),
    "cars": (14, 6, 2, 110e3),
    "faces_1024": (7, 4, 3, 80e3),
}
# Table 2: images/s on one core at scans 1, 2, 5, 10 and of the baseline source.
TABLE2 = {
    "imagenet": (433, 412, 340, 146, 419),
    "ham10000": (465, 438, 275, 96, 240),
    "cars": (266, 240, 225, 127, 268),
    "faces_1024": (239, 213, 195, 129, 286),
}
NAMES = {"imagenet": "ImageNet", "ham10000": "HAM10000", "cars": "Cars", "faces_1024": "CelebAHQ"}
SWEEP = (0.25, 0.5, 1, 2, 4, 8, 16)


def short(lab, task):
    """Epochs of the short runs."""
    return task.epochs if lab.quick else SHORT


def short_tasks(lab):
    """The tasks that have short runs."""
    return [task for task in lab.tasks if lab.quick or task.name != "flowers"]


def limit_of(lab):
    """MB/s of the limited runs."""
    return 20.0 if lab.quick else 1.0


class Group:
    """Runs of one kind, by seed; ``full`` are those at full fidelity that it is compared with."""

    def __init__(self, spec, runs, size, full=None):
        self.task, self.scan, self.script = spec["task"], spec["scan"], spec["script"]
        self.runs = runs
        self.bytes = size
        self.full = full
        first = next(iter(runs.values()))
        self.numbers = list(range(1, len(first["rows"]) + 1))
        self.images = first["images"] // len(self.numbers)
        self.cpu_ms = 1000 * statistics.median(
            run["rows"][-1]["cpu_seconds"] / run["images"] for run in runs.values()
        )

    @property
    def name(self):
        """How tables call what was trained on."""
        names = {"tuner": "ScanTuner", "full": "full fidelity"}
        return names.get(self.scan, f"scan {self.scan}, static")

    @property
    def label(self):
        return label(self.scan)

    @property
    def seeds(self):
        return len(self.runs)

    @property
    def accuracies(self):
        """(seeds, epochs)."""
        return np.array([[row["accuracy"] for row in run["rows"]] for run in self.runs.values()])

    @property
    def curve(self):
        """The mean accuracy at each epoch."""
        return [estimate(column) for column in self.accuracies.T]

    @property
    def final(self):
        """The last accuracy, by seed."""
        return {seed: run["rows"][-1]["accuracy"] for seed, run in self.runs.items()}

    @property
    def accuracy(self):
        return estimate(self.final.values())

    @property
    def spread(self):
        """The mean of the final accuracies, with their minimum and maximum."""
        values = [100 * value for value in self.final.values()]
        return Estimate(statistics.fmean(values), min(values), max(values))

    @property
    def late(self):
        """Accuracy over the second half of the epochs."""
        return estimate(self.accuracies[:, len(self.numbers) // 2 :].mean(1))

    @property
    def minus(self):
        """Final accuracy minus full fidelity's."""
        return None if self.scan == "full" else paired(self.final, self.full.final)

    def rate(self, bandwidth):
        """Return images per second at this MB/s: X = W / E[s], capped by compute (Theorem 4.1)."""
        return min(1e6 * bandwidth / self.bytes, 1000 / self.cpu_ms)

    def seconds(self, bandwidth, epochs=None):
        """Of some epochs, or of all, at a bandwidth."""
        return (epochs or len(self.numbers)) * self.images / self.rate(bandwidth)

    def reaches(self, target):
        """Epochs until the mean curve reaches an accuracy in percent; ``None`` if it does not."""
        before = 0.0
        for epoch, (value, *_) in enumerate(self.curve):
            if value >= target:
                return epoch + (1.0 if value == before else (target - before) / (value - before))
            before = value
        return None


def select(lab, task, scan, epochs, *, script="standard", seeds=None, full=None, **others):
    """Runs of a kind that there are, or ``None``."""
    wanted = {"coarse": [], "smoothing": False, "bandwidth": None} | others
    wanted |= {"task": task, "scan": scan, "epochs": epochs, "script": script}
    found = {
        run["spec"]["seed"]: run
        for run in known(lab).values()
        if wanted.items() <= run["spec"].items()
    }
    found = {seed: found[seed] for seed in seeds or lab.seeds if seed in found}
    sizes = lab.load("bytes") or {}
    return Group(wanted, found, sizes[task][script].get(str(scan), 0), full) if found else None


def loses_nothing(group, full):
    """Whether the mean final accuracy is within TOLERANCE of full's."""
    return paired(group.final, full.final, 1).mean >= -TOLERANCE


def _scans(lab, task, epochs, **how):
    """{scan: runs} of a task, if it has runs at full fidelity."""
    full = select(lab, task.name, "full", epochs, **how)
    if full is None:
        return {}
    groups = {str(s): select(lab, task.name, s, epochs, full=full, **how) for s in SCANS[:-1]}
    return {scan: group for scan, group in groups.items() if group} | {"full": full}


def _static(lab):
    """{task: {scan: runs}} of what there is."""
    found = {task.name: _scans(lab, task, task.epochs) for task in lab.tasks}
    found = {task: groups for task, groups in found.items() if groups}
    if not found:
        raise NotMeasured
    return found


def sizes(lab):
    rows, points = [], []
    for name, row in lab.read("sizes").items():
        means = row["means"]
        if name in TABLE1:
            times = [f"{times}x" for times in TABLE1[name][:3]]
            rows.append((NAMES[name], "paper", times, TABLE1[name][3]))
        times = [f"{means[-2] / means[scan - 1]:.1f}x" for scan in (1, 2, 5)]
        rows.append((NAMES.get(name, name), "ours", times, means[-1]))
        for scan, (low, median, high) in enumerate(row["quartiles"][:-1], 1):
            size = Estimate(median / 1e3, low / 1e3, high / 1e3)
            title = f"{NAMES.get(name, name)} ({row['images']})"
            points.append({"set": title, "scan": scan, "kb": size})
    return {"rows": rows, "points": points}


def decode(lab):
    rows = []
    for name, ours in lab.read("decode").items():
        paper = {"paper": list(TABLE2[name])} if name in TABLE2 else {}
        rows += [
            {"name": NAMES.get(name, name), "who": who, "rates": rates,
             "scans": ["1", "2", "5", "10", "B"], "ratio": rates[3] / rates[4]}
            for who, rates in (paper | ours).items()
        ]  # fmt: skip
    return {"rows": rows}


def bandwidth(lab):
    results = lab.read("bandwidth")
    rows = []
    for scan, row in results["scans"].items():
        limits, measured = map(list, zip(*row["points"], strict=True))
        predicted = [min(1e6 * limit / row["bytes"], row["unlimited"]) for limit in limits]
        knee = row["bytes"] * row["unlimited"] / 1e6
        line = [(0, 0), (8, 8e6 / row["bytes"])]
        if knee < 8:
            line[1:] = [(knee, row["unlimited"]), (8, row["unlimited"])]
        x, y = map(list, zip(*line, strict=True))
        cells = [f"{a:.0f} / {b:.0f}" for a, b in zip(measured, predicted, strict=True)]
        rows.append(
            {**row, "scan": scan, "name": label(scan), "limits": limits, "measured": measured,
             "cells": cells, "x": x, "y": y}
        )  # fmt: skip
    return {"rows": rows, "task": results["task"]}


def gradients(lab):
    results = lab.read("gradients")
    rows, curves = [], []
    for task, found in results["tasks"].items():
        for epoch, scans in found["epochs"]:
            mean = [0, *(scan[1] for scan in scans)]
            rows.append({"task": task, "epoch": epoch, "mean": mean})
            for (scan, *interval), saving in zip(scans, found["savings"], strict=False):
                value = Estimate(*interval[:3]) if scan in SCANS else interval[0]
                name = f"{scan} ({saving:.1f}x)"
                curves.append({"task": task, "scan": scan, "name": name, "x": epoch, "y": value})
    return {"rows": rows, "curves": curves, "images": results["images"]}


def time(lab):
    rows = []
    for task, groups in _static(lab).items():
        full = groups["full"]
        # A power of two below the bandwidth at which full fidelity reads three times as long
        # as it computes.
        limit = 2.0 ** np.floor(np.log2(full.bytes / full.cpu_ms / 3e3))
        target = full.accuracy.mean
        base = full.seconds(limit, full.reaches(target))
        for group in groups.values():
            epochs = group.reaches(target)
            seconds = epochs and group.seconds(limit, epochs)
            gain = f"{seconds:.0f} s, {base / seconds:.1f}x" if seconds else "not reached"
            x = [number * group.seconds(limit, 1) for number in group.numbers]
            title = f"{task} at {limit:g} MB/s"
            rows.append({"group": group, "title": title, "x": x, "gain": gain})
    return {"rows": rows}


def coarse(lab):
    rows = []
    for kind in ("fine", "coarse"):
        for task in short_tasks(lab):
            labels = list(task.coarse) if kind == "coarse" else []
            groups = _scans(lab, task, short(lab, task), coarse=labels)
            if len(groups) < len(SCANS):
                raise NotMeasured
            title = f"{task.name}\ncoarse: {task.coarse_name}"
            finals = [group.accuracy for group in groups.values()]
            rows.append(
                {"task": task.name, "kind": f"{kind} labels", "groups": groups, "title": title,
                 "labels": kind, "x": list(groups), "y": finals}
            )  # fmt: skip
    return {"rows": rows}


def epochs(lab):
    static = _static(lab)
    curves = [group for groups in static.values() for group in groups.values()]
    rows = [{"task": task, "groups": groups} for task, groups in static.items()]
    return {"rows": rows, "curves": curves}


def msssim(lab):
    results = lab.read("msssim")
    rows = [
        {"name": NAMES.get(name, name), "images": row["images"], "y": row["msssim"],
         "at": [0, *row["msssim"]], "x": list(range(1, len(row["msssim"]) + 1))}
        for name, row in results.items()
    ]  # fmt: skip
    return {"rows": rows}


def _networks(lab):
    """{network and task: (script, scan, MS-SSIM, accuracy) of each point}: the small network from
    scratch, the fine-tuned tails of Lite0, and ImageNet's networks, never trained again.
    """
    likeness = {task: row["msssim"] for task, row in lab.read("msssim").items()}
    q95, scripts_ = lab.load("msssim-q95") or {}, _script_groups(lab)

    def at(task, scan):
        return 1.0 if scan == "full" else likeness[task][int(scan) - 1]

    found = {}
    for task, groups in _static(lab).items():
        found[f"small_cnn, {task}"] = points = [
            ("standard", scan, at(task, scan), group.accuracy) for scan, group in groups.items()
        ]
        if task in q95 and task in scripts_:
            points += [
                ("q95", scan, q95[task][scan - 1], group.accuracy)
                for scan, group in scripts_[task][1]["q95"].items()
            ]
    for task, trained in finetuning.tasks_of(lab.beside("finetuning").rows()).items():
        found[f"Lite0 tuned, {task}"] = [
            ("standard", scan, at(task, scan), estimate(trained.final(scan).values()))
            for scan in trained.kinds
            if scan == "full" or scan.isdigit()
        ]
    beside = lab.beside("imagenet")
    seen, guesses = imagenet.Seen(beside), beside.load("guesses")
    for network in seen.networks if guesses else ():
        found[f"{network.title()}, ImageNet"] = [
            (*name.split(), value, imagenet.share(seen.plain(network)[name]))
            for name, value in guesses["msssim"].items()
        ]
    return {name: points for name, points in found.items() if len(points) > 2}


def _fit(points):
    """(r, rank r, slope, intercept) of MS-SSIM and accuracy; nothing of two points, or of equal
    ones. Equal values share their rank.
    """
    x, y = ([point[2] for point in points], [point[3].mean for point in points])
    if len(points) < 3 or statistics.pstdev(y) == 0:
        return None, None, None, None
    rank = float(stats.spearmanr(x, y).statistic)
    return statistics.correlation(x, y), rank, *statistics.linear_regression(x, y)


def correlation(lab):
    rows, points, lines = [], {"standard": [], "q95": []}, []
    for name, found in _networks(lab).items():
        r, rank, slope, intercept = _fit(found)
        above = [point for point in found if point[2] >= 0.9]
        above_r, _, above_slope, _ = _fit(above)
        rows.append(
            {"name": name, "points": len(found), "r": r, "rank": rank,
             "slope": slope and slope / 100, "above": len(above), "above_r": above_r,
             "above_slope": above_slope and above_slope / 100}
        )  # fmt: skip
        title = name if r is None else f"{name}\nr = {r:.2f}"
        for script, scan, x, y in found:
            points[script].append({"title": title, "scan": scan, "x": x, "y": y})
        if slope:
            x = [min(point[2] for point in found), 1.0]
            y = [intercept + slope * each for each in x]
            lines.append({"title": title, "x": x, "y": y})
    return {"rows": rows, "lines": lines, **points}


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
        replays = replayed(lab)
        self.runs, self.seconds, self.real = {}, {}, {}
        for name in ("full", 5, 2, 1, "tuner"):
            group = select(lab, task.name, name, task.epochs)
            runs = group.runs.values() if group else ()
            keys = [replay_key(run["spec"], limit) for run in runs]
            if keys and all(key in replays for key in keys):
                self.runs[name] = group
                self.seconds[name] = np.array([replays[key] for key in keys])
                self.real[name] = select(lab, task.name, name, task.epochs, bandwidth=limit)
        seeds = lab.seeds if lab.quick else range(10)
        self.picked = {s: select(lab, task.name, s, task.epochs, seeds=seeds) for s in picked}
        self.reports = _reports(lab, task)
        # What full's accuracy is taken to be: the lower end of its interval.
        self.interval = self.picked["full"].accuracy if self.picked["full"] else None

    def whole(self, name):
        """Times shorter for all epochs."""
        return self.seconds["full"][:, -1].mean() / self.seconds[name][:, -1].mean()

    def gain(self, name):
        """Times shorter to full's accuracy; ``None`` if it is not reached."""
        base, seconds = (self._reach(each) for each in ("full", name))
        return base / seconds if base and seconds else None

    def _reach(self, name):
        times = [0.0, *self.seconds[name].mean(0)]
        epochs = self.runs[name].reaches(self.interval.low)
        return epochs and float(np.interp(epochs, np.arange(len(times)), times))

    def inside(self, name):
        """Whether the mean final accuracy is in full's interval or above it."""
        return "yes" if self.runs[name].accuracy.mean >= self.interval.low else "no"

    def real_seconds(self, name):
        """Seconds of the real runs, by seed."""
        group = self.real[name]
        return {s: run["rows"][-1]["seconds"] for s, run in group.runs.items()} if group else {}

    def real_cell(self, name):
        """Seconds of the real runs, and whether their accuracies are those without a limit."""
        group = self.real[name]
        if group is None:
            return None
        free = self.runs[name].runs
        equal = sum(
            [row["accuracy"] for row in run["rows"]] == [r["accuracy"] for r in free[s]["rows"]]
            for s, run in group.runs.items()
        )
        seconds = ", ".join(f"{each:.0f}" for each in self.real_seconds(name).values())
        return f"{seconds} s; equal at every epoch in {equal} of {group.seeds}"


def _limited_tasks(lab):
    found = [_Limited(lab, lab.task(number), limit_of(lab)) for number in (1, 2)]
    return [limited for limited in found if "full" in limited.runs]


def autotune(lab):
    rows, picked = [], []
    tasks = _limited_tasks(lab)
    if not tasks:
        raise NotMeasured
    for limited in tasks:
        for name, group in limited.runs.items():
            seconds, gain = limited.seconds[name], limited.gain(name)
            sure = name in ("full", "tuner")
            rows.append(
                {
                    "group": group,
                    "inside": limited.inside(name),
                    "seconds": estimate(seconds[:, -1], 1),
                    "whole": limited.whole(name),
                    "gain": gain or "not reached",
                    "real": limited.real_cell(name),
                    "x": seconds.mean(0),
                    "y": [point if sure else point.mean for point in group.curve],
                }
            )
        for seed, reports in limited.reports:
            seen = [Similarity(*each) for each in reports[-1][2]]
            others = [choose(seen, threshold) for threshold in (0.9, 0.95, 0.98)]
            cosines = {s.scan: f"{s.mean:.2f} (> {s.lower:.2f})" for s in seen}
            cells = [cosines.get(scan, "") for scan in (1, 2, 4, 5, 6)]
            picked.append({"cells": [limited.task.name, seed, reports[-1][1], *others, *cells]})
    return {"rows": rows, "picks": picked, "limit": limit_of(lab), "threshold": THRESHOLD}


def rates(lab):
    results = lab.read("rates")
    rows = [
        {"model": model, "free": row["unlimited"], "scans": list(map(label, row["limited"])),
         "limited": list(row["limited"].values()),
         "cells": [f"{v:.0f} ({v / row['limited']['full']:.1f}x)" for v in row["limited"].values()]}
        for model, row in results["models"].items()
    ]  # fmt: skip
    return {"rows": rows, "task": results["task"], "limit": results["bandwidth"]}


def sweep(lab):
    replayed_ = {
        (limited.task.name, scan): seconds[:, -1].mean()
        for limited in _limited_tasks(lab)
        for scan, seconds in limited.seconds.items()
    }
    rows, points = [], []
    for task, groups in _static(lab).items():
        for group in groups.values():
            seen, line = replayed_.get((task, group.scan)), group.seconds(limit_of(lab))
            if seen:
                points.append({"group": group, "x": 1.0, "y": seen})
            x = np.geomspace(SWEEP[0], SWEEP[-1], 25)
            rows.append(
                {
                    "group": group,
                    "gains": [group.rate(w) / groups["full"].rate(w) for w in SWEEP],
                    "seen": seen and f"{seen:.0f} s / {line:.0f} s",
                    "x": x,
                    "y": [group.seconds(w) for w in x],
                }
            )
    return {"rows": rows, "points": points}


def _at_equal_time(on, off):
    """Accuracy of each seed at the CPU time that the cheaper kind takes for all its epochs: pairs
    (on, off).
    """
    budget = min(row.cpu_ms * row.images * len(row.numbers) for row in (on, off))
    found = []
    for row in (on, off):
        epochs = budget / (row.cpu_ms * row.images)
        values = [float(np.interp(epochs, row.numbers, curve)) for curve in row.accuracies]
        found.append(dict(zip(row.runs, values, strict=True)))
    return found


def _own(group):
    return {seed: run["accuracy_at_own_scan"] for seed, run in group.runs.items()}


def smoothing(lab):
    rows, points = [], []
    for task in short_tasks(lab):
        for place, scan in enumerate((1, 2, 5)):
            seeds = (*lab.seeds, 3, 4) if scan == 1 else lab.seeds
            off, on = (
                select(lab, task.name, scan, short(lab, task), seeds=seeds, smoothing=smooth)
                for smooth in (False, True)
            )
            if on is None or off is None:
                raise NotMeasured
            row = {
                "task": task.name,
                "scan": label(scan),
                "pairs": ", ".join(f"{100 * (on.final[s] - off.final[s]):+.1f}" for s in on.runs),
                "equal": paired(on.final, off.final),
                "timed": paired(*_at_equal_time(on, off)),
                "own": paired(_own(on), _own(off)),
                "ratio": on.cpu_ms / off.cpu_ms,
            }
            rows.append(row)
            points += [
                {"task": task.name, "what": "equal epochs", "x": place - 0.1, "y": row["equal"]},
                {"task": task.name, "what": "equal CPU time", "x": place + 0.1, "y": row["timed"]},
            ]
    return {"rows": rows, "points": points}


def _script_groups(lab):
    """{task: (full, {script: {scan: runs}})} up to the first prefix that loses nothing."""
    found = {}
    for task, groups in _static(lab).items():
        full = groups["full"]
        scripts = {"standard": {}, "q95": {}}
        for script, prefixes in scripts.items():
            for scan in itertools.count(1):
                group = select(lab, task, scan, len(full.numbers), script=script, full=full)
                if group is None:
                    break
                prefixes[scan] = group
                if loses_nothing(group, full):
                    break
        if scripts["q95"]:
            found[task] = full, scripts
    return found


def scripts(lab):
    rows, levels = [], []
    for task, (full, found) in _script_groups(lab).items():
        groups = [group for prefixes in found.values() for group in prefixes.values()]
        rows += [{"group": full, "script": None}]
        rows += [{"group": group, "script": group.script} for group in groups]
        x = [0, max(group.bytes for group in groups)]
        levels.append({"task": task, "x": [each / 1e3 for each in x], "y": [full.spread] * 2})
    points = [
        {**row, "kb": row["group"].bytes / 1e3, "scan": row["group"].scan}
        for row in rows
        if row["script"]
    ]
    if not rows:
        raise NotMeasured
    return {"rows": rows, "points": points, "levels": levels, "tolerance": 100 * TOLERANCE}


def _share(rows):
    """Of the time of some steps, that spent waiting, in percent."""
    total = sum(row[1] + row[2] for row in rows)
    return 100 * sum(row[1] for row in rows) / total if total else 0.0


def wait(lab):
    results = lab.read("wait")
    rows, sizes_, per_shard = results["rows"], results["sizes"], results["per_shard"]
    drop = results["phases"][0][0]
    back = drop + results["phases"][1][0]
    low = [row for row in rows if drop <= row[0] < back]
    first = next((i for i, row in enumerate(low) if row[1] > 0.05 * row[2]), 0)
    decided = next((i for i in range(first, len(low)) if low[i][3] != low[first - 1][3]), None)
    # Scan 10 and full differ by metadata; where that is little, scan 10 counts.
    near = {"full", *(n for n, size in enumerate(sizes_[:-1], 1) if size > 0.98 * sizes_[-1])}
    back_at = next((row[0] for row in rows if row[0] > back and row[3] in near), None)
    shares = [
        {"n": n, "share": _share(low[first + n * per_shard // results["batch"] :])}
        for n in (0, 3, 4, 5, 6)
    ]
    shards = decided and (decided - first) * results["batch"] / per_shard
    signals = {
        "bandwidth (MB/s)": [results["top"] * row[4] / 1e6 for row in rows],
        "kB per image read": [sizes_[-1 if row[3] == "full" else row[3] - 1] / 1e3 for row in rows],
        "waiting (% of 10 steps)": [_share(rows[max(0, i - 9) : i + 1]) for i in range(len(rows))],
    }
    times = [row[0] for row in rows]
    return {
        "before": _share([row for row in rows if row[0] < drop]),
        "decided": "never" if decided is None else f"{shards:.1f} shards",
        "changes": sum(a[3] != b[3] for a, b in itertools.pairwise(low)),
        "returned": "not within the run" if back_at is None else f"{back_at - back:.1f} s",
        "after": _share([row for row in rows if back_at and row[0] > back_at]),
        "shards": shares,
        "per_shard": per_shard,
        "batch": results["batch"],
        "signals": [{"what": what, "x": times, "y": values} for what, values in signals.items()],
    }


SECTIONS = (
    sizes, decode, bandwidth, gradients, time, coarse, epochs, msssim, correlation,
    autotune, rates, sweep, smoothing, scripts, wait,
)  # fmt: skip
