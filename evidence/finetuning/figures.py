"""What the page computes of the runs: networks tuned at each scan, in part or as a whole."""

import statistics
from collections import defaultdict

import numpy as np

from ..pages import NotMeasured, estimate, paired

ORDER = ("1", "2", "level at 2", "mostly 2", "5", "level at 5", "mixed", "tuner", "full")


class Trained:
    """Runs of a task by what they were trained on, in their order, and by seed."""

    def __init__(self, rows):
        found = defaultdict(dict)
        for row in sorted(rows, key=lambda row: row["seed"]):
            found[str(row["kind"])][row["seed"]] = row
        self.kinds = {trained: found[trained] for trained in ORDER if trained in found}

    def final(self, trained, tested="full"):
        """Final accuracies by seed."""
        return {seed: run["accuracy"][tested] for seed, run in self.kinds[trained].items()}

    def mean(self, trained, tested="full"):
        """The mean of these, in percent."""
        return 100 * statistics.fmean(self.final(trained, tested).values())

    def minus(self, trained):
        """Final accuracy minus full fidelity's, of paired seeds."""
        return None if trained == "full" else paired(self.final(trained), self.final("full"))

    def minus_by_seed(self, trained):
        """The same difference of each seed, in points."""
        full = self.final("full")
        return [100 * (value - full[seed]) for seed, value in self.final(trained).items()]

    def read(self, trained):
        """Mean megabytes of a run, tunings included."""
        return float(self.curve(trained)[0][-1])

    def curve(self, trained):
        """Megabytes read up to each epoch and accuracy after it, both means over seeds."""
        runs = [run["epochs"] for run in self.kinds[trained].values()]
        steps = np.mean([[epoch["bytes"] for epoch in run] for run in runs], axis=0)
        accuracies = [[epoch["accuracy"] for epoch in run] for run in runs]
        curve = [estimate(values) for values in zip(*accuracies, strict=True)]
        shown = len(runs) > 2 and trained in ("full", "2")
        return np.cumsum(steps) / 1e6, curve if shown else [point.mean for point in curve]

    def fewer(self, trained):
        """Times fewer bytes than at full fidelity."""
        return self.read("full") / self.read(trained)

    def cosines(self):
        """{scan: {epoch: mean cosines by seed}} of ScanTuner's tunings."""
        found = defaultdict(lambda: defaultdict(list))
        for run in self.kinds["tuner"].values():
            for tuning in run["tunings"]:
                for scan, mean, *_ in tuning["cosines"]:
                    found[scan][tuning["epoch"]].append(mean)
        return found


def tasks_of(rows, kind="full"):
    """{task: runs} of what has runs of a kind."""
    names = sorted({row["task"] for row in rows})
    found = {task: Trained(row for row in rows if row["task"] == task) for task in names}
    return {task: trained for task, trained in found.items() if kind in trained.kinds}


def tails(lab):
    """{task: runs} of the last block and layer."""
    tasks = tasks_of(lab.rows())
    if not tasks:
        raise NotMeasured
    return tasks


def tunings(lab):
    """The same, where ScanTuner has trained."""
    tasks = {task: found for task, found in tails(lab).items() if "tuner" in found.kinds}
    if not tasks:
        raise NotMeasured
    return tasks


def levels(lab):
    """What a level has where a scan costs as much: by task, and the mean of all tasks and scans by
    seed.
    """
    rows, by_seed = [], defaultdict(list)
    for task, found in tasks_of(lab.rows("levels"), "level at 5").items():
        for scan in ("2", "5"):
            level, plain = found.final(f"level at {scan}"), found.final(scan)
            gain, share = paired(level, plain), found.read(f"level at {scan}") / found.read(scan)
            row = {"task": task, "scan": scan, "gain": gain, "bytes": share}
            rows.append(row | {"level": found.mean(f"level at {scan}"), "plain": found.mean(scan)})
            for seed in level.keys() & plain.keys():
                by_seed[seed].append(level[seed] - plain[seed])
    if not rows:
        raise NotMeasured
    means = {seed: statistics.fmean(changes) for seed, changes in by_seed.items()}
    return {"rows": rows, "mean": paired(means, dict.fromkeys(means, 0.0))}


def networks(lab):
    """{network: its tasks' runs and what a run takes} of networks trained in all their layers."""
    rows = lab.rows("layers")
    found = {}
    for name in dict.fromkeys(row["network"] for row in rows):
        runs = [row for row in rows if row["network"] == name]
        speeds = [run["images"] / run["training_cpu_seconds"] for run in runs]
        found["lite0" if "Lite0" in name else "resnet"] = {
            "name": name,
            "tasks": tasks_of(runs),
            "epochs": len(runs[0]["epochs"]),
            "seconds": statistics.fmean(run["cpu_seconds"] for run in runs),
            "speed": statistics.median(speeds),
        }
    return found


SECTIONS = (tails, levels, tunings, networks)
