"""What the page computes of the training runs; its other numbers come from the rows."""

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

TOLERANCE = 0.01  # of accuracy, below full fidelity's


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

    @property
    def limit(self):
        """MB/s: a power of two below the bandwidth at which reading takes three times as long as
        computing.
        """
        return 2.0 ** int(np.floor(np.log2(self.bytes / self.cpu_ms / 3e3)))

    def times(self, bandwidth):
        """Seconds to the end of each epoch at a bandwidth."""
        return [number * self.seconds(bandwidth, 1) for number in self.numbers]

    def reaches(self, target):
        """Epochs until the mean curve reaches an accuracy in percent; ``None`` if it does not."""
        before = 0.0
        for epoch, (value, *_) in enumerate(self.curve):
            if value >= target:
                return epoch + (1.0 if value == before else (target - before) / (value - before))
            before = value
        return None


def select(lab, task, scan, epochs, *, script="standard", seeds=None, full=None, bandwidth=None):
    """Runs of a kind that there are, or ``None``."""
    wanted = {"task": task, "scan": scan, "epochs": epochs, "script": script}
    wanted["bandwidth"] = bandwidth
    found = {
        run["spec"]["seed"]: run for run in lab.rows() if wanted.items() <= run["spec"].items()
    }
    found = {seed: found[seed] for seed in seeds or lab.seeds if seed in found}
    sizes = lab.load("bytes") or {}
    return Group(wanted, found, sizes[task][script].get(str(scan), 0), full) if found else None


def loses_nothing(group, full):
    """Whether the mean final accuracy is within TOLERANCE of full's."""
    return paired(group.final, full.final, 1).mean >= -TOLERANCE


def static(lab):
    """{task: {scan: runs}} of the tasks with runs at full fidelity."""
    found = {}
    for task in lab.tasks:
        full = select(lab, task.name, "full", task.epochs)
        if full is not None:
            groups = {
                str(scan): select(lab, task.name, scan, task.epochs, full=full)
                for scan in SCANS[:-1]
            }
            found[task.name] = {scan: group for scan, group in groups.items() if group}
            found[task.name]["full"] = full
    if not found:
        raise NotMeasured
    return found


def _networks(lab):
    """{network and task: (script, scan, MS-SSIM, accuracy) of each point}: the small network from
    scratch, the fine-tuned tails of Lite0, and ImageNet's networks, never trained again.
    """
    likeness = {task: [*row["msssim"], 1.0] for task, row in lab.read("msssim").items()}
    q95, of_scripts = lab.load("msssim-q95") or {}, _scripts_of(lab)
    found = {}
    for task, groups in static(lab).items():
        points = [(scan, group.accuracy) for scan, group in groups.items()]
        found[f"small_cnn, {task}"] = _placed(points, likeness[task])
        if task in q95 and task in of_scripts:
            found[f"small_cnn, {task}"] += [
                ("q95", scan, q95[task][scan - 1], group.accuracy)
                for scan, group in of_scripts[task][1]["q95"].items()
            ]
    for task, trained in finetuning.tasks_of(lab.beside("finetuning").rows()).items():
        kinds = [scan for scan in trained.kinds if scan == "full" or scan.isdigit()]
        points = [(scan, estimate(trained.final(scan).values())) for scan in kinds]
        found[f"Lite0 tuned, {task}"] = _placed(points, likeness[task])
    beside = lab.beside("imagenet")
    guesses = beside.load("guesses")
    seen = guesses and imagenet.Seen(beside)
    for network in seen.networks if guesses else ():
        found[f"{network.title()}, ImageNet"] = [
            (*name.split(), value, imagenet.share(seen.plain(network)[name]))
            for name, value in guesses["msssim"].items()
        ]
    return found


def _placed(points, likeness):
    """(scan, accuracy) of ``standard`` with the MS-SSIM."""
    return [
        ("standard", scan, likeness[-1 if scan == "full" else int(scan) - 1], accuracy)
        for scan, accuracy in points
    ]


class Fit:
    """The line of MS-SSIM and accuracy; empty for two points, or for equal ones."""

    r = rank = slope = None

    def __init__(self, points):
        x, y = ([point[2] for point in points], [point[3].mean for point in points])
        if len(points) > 2 and max(y) > min(y):
            self.line = stats.linregress(x, y)
            self.r, self.slope = self.line.rvalue, self.line.slope / 100
            self.rank = stats.spearmanr(x, y).statistic  # equal values share their rank

    def at(self, x):
        """The line's accuracy at an MS-SSIM."""
        return float(self.line.intercept + self.line.slope * x)


def correlation(lab):
    """(name, points, those from 0.9 on, the lines of both) of each network and task."""
    found = {
        name: (points, [point for point in points if point[2] >= 0.9])
        for name, points in _networks(lab).items()
        if len(points) > 2
    }
    return [(name, *both, *map(Fit, both)) for name, both in found.items()]


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
        replays = [row for row in lab.rows("replays") if row["bandwidth"] == limit]
        self.runs, self.seconds, self.real = {}, {}, {}
        for name in ("full", 5, 2, 1, "tuner"):
            group = select(lab, task.name, name, task.epochs)
            runs = group.runs.values() if group else ()
            specs = [run["spec"] for run in runs]
            seconds = [row["seconds"] for row in replays if row["spec"] in specs]
            if specs and len(seconds) == len(specs):
                self.runs[name] = group
                self.seconds[name] = np.array(seconds)
                self.real[name] = select(lab, task.name, name, task.epochs, bandwidth=limit)
        self.reports = _reports(lab, task)
        # What full's accuracy is taken to be: the lower end of its interval.
        seeds = lab.seeds if lab.quick else range(10)
        full = select(lab, task.name, "full", task.epochs, seeds=seeds)
        self.interval = full and full.accuracy

    def total(self, name):
        """Seconds of all epochs."""
        return estimate(self.seconds[name][:, -1], 1)

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
        seconds = [run["rows"][-1]["seconds"] for run in group.runs.values()]
        seconds = ", ".join(f"{each:.0f}" for each in seconds)
        return f"{seconds} s; equal at every epoch in {equal} of {group.seeds}"


def _limited_tasks(lab):
    found = [_Limited(lab, lab.task(number), limit_of(lab)) for number in (1, 2)]
    return [limited for limited in found if "full" in limited.runs]


def autotune(lab):
    """The limited runs, and what the tuner picked: rows of cells."""
    tasks, picked = _limited_tasks(lab), []
    if not tasks:
        raise NotMeasured
    for limited in tasks:
        for seed, reports in limited.reports:
            seen = [Similarity(*each) for each in reports[-1][2]]
            others = [choose(seen, threshold) for threshold in (0.9, 0.95, 0.98)]
            cosines = {s.scan: f"{s.mean:.2f} (> {s.lower:.2f})" for s in seen}
            cells = [cosines.get(scan, "") for scan in (1, 2, 4, 5, 6)]
            picked.append([limited.task.name, seed, reports[-1][1], *others, *cells])
    return {"tasks": tasks, "picks": picked, "limit": limit_of(lab)}


def sweep(lab):
    """{(task, scan): seconds} of the limited runs."""
    return {
        (limited.task.name, scan): float(seconds[:, -1].mean())
        for limited in _limited_tasks(lab)
        for scan, seconds in limited.seconds.items()
    }


def _scripts_of(lab):
    """{task: (full, {script: {scan: runs}})} up to the first prefix that loses nothing."""
    found = {}
    for task, groups in static(lab).items():
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
    """(task, runs at full fidelity, (script, runs) of the prefixes) of each task."""
    rows = [
        (task, full, [(name, group) for name in found for group in found[name].values()])
        for task, (full, found) in _scripts_of(lab).items()
    ]
    if not rows:
        raise NotMeasured
    return rows


def drop(lab):
    """How the tuner of bandwidth takes the drop to a quarter, and the return."""
    results = lab.read("wait")
    rows, sizes, per_shard = results["rows"], results["sizes"], results["per_shard"]
    at, waited, worked = np.array([row[:3] for row in rows]).T
    scans = [row[3] for row in rows]

    def share(steps):
        """Of the time of some steps, that spent waiting, in percent."""
        total = waited[steps].sum() + worked[steps].sum()
        return 100 * waited[steps].sum() / total if total else 0.0

    begin = results["phases"][0][0]
    end = begin + results["phases"][1][0]
    start, stop = np.searchsorted(at, (begin, end))
    first = next((i for i in range(start, stop) if waited[i] > 0.05 * worked[i]), start)
    decided = next((i for i in range(first, stop) if scans[i] != scans[first - 1]), None)
    # Scan 10 and full differ by metadata; where that is little, scan 10 counts.
    near = {"full", *(n for n, size in enumerate(sizes[:-1], 1) if size > 0.98 * sizes[-1])}
    back = next((t for t, scan in zip(at, scans, strict=True) if t > end and scan in near), None)
    step = results["batch"] / per_shard
    return {
        "before": share(at < begin),
        "decided": "never" if decided is None else f"{(decided - first) * step:.1f} shards",
        "changes": sum(a != b for a, b in itertools.pairwise(scans[start:stop])),
        "returned": "not within the run" if back is None else f"{back - end:.1f} s",
        "after": 0.0 if back is None else share(at > back),
        "shards": [
            {"n": n, "share": share(slice(first + int(n / step), stop))} for n in (0, 3, 4, 5, 6)
        ],
        "waiting": [float(share(slice(max(0, i - 9), i + 1))) for i in range(len(rows))],
    }


SECTIONS = (static, correlation, autotune, sweep, scripts, drop)
