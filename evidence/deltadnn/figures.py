"""What the page computes of the runs."""

import statistics

import numpy as np

from ..pages import NotMeasured


class Run:
    """A training and what was measured of its checkpoints; the row's fields are attributes."""

    def __init__(self, row, once):
        self.__dict__.update(row)
        self.title = f"{row['name']}, seed {row['seed']}"
        self.epochs = sorted(row["pairs"].values(), key=lambda pair: pair["epoch"])
        self.exact = {each["epoch"]: each["accuracy"] for each in row["rows"] if "accuracy" in each}
        self.rivals = row.get("rivals")
        self.once = once.get(row["name"], {})

    @property
    def last(self):
        """What Algorithm 1 found on the last epoch's delta."""
        return self.epochs[-1]["ours"]

    def column(self, field):
        """A field of each bound of the last epoch's table."""
        return np.array([row[field] for row in self.last["table"]])

    def mean_change(self, chain):
        """The mean change of accuracy, in points, over the restored versions of a chain."""
        restored = chain.get("accuracy", {}).items()
        losses = [self.exact[int(epoch)] - value for epoch, value in restored]
        return points(statistics.fmean(losses)) if losses else None


def at(table, bound):
    """The ratio at a bound."""
    return next(row["ratio"] for row in table if row["bound"] == bound)


def points(loss):
    """A loss of accuracy as the paper prints it: a change in points."""
    return f"{-100 * loss + 0.0:+.2f}"  # never -0.00


def ratio(store):
    """Ratio of a store, keyframes and manifest included."""
    return store["raw_bytes"] / store["stored_bytes"]


def version_ratio(store):
    """Mean ratio of the versions that are deltas."""
    deltas = [file["bytes"] for file in store["files"] if not file["keyframe"]]
    return store["raw_bytes"] / len(store["files"]) / statistics.fmean(deltas)


def keyframe_share(store):
    """Of a store's bytes, those of keyframes."""
    keyframes = [file["bytes"] for file in store["files"] if file["keyframe"]]
    return sum(keyframes) / store["stored_bytes"]


def mean_of(runs, field):
    """A field of each bound, over the seeds."""
    return np.mean([run.column(field) for run in runs], axis=0)


def trained(lab):
    """Runs by the name of their network, in the order of the recipes."""
    found, once = {}, lab.load("once") or {}
    for row in lab.rows():
        found.setdefault(row["name"], []).append(Run(row, once))
    if not found:
        raise NotMeasured
    return found


def every(lab):
    """All runs."""
    return [run for group in trained(lab).values() for run in group]


def compute(_):
    """The functions that the page calls, by name."""
    calls = (at, points, ratio, version_ratio, keyframe_share, mean_of)
    return {call.__name__: call for call in calls}


SECTIONS = (trained, every, compute)
