"""What the page computes of the runs: columns of medians over the rounds, by peer."""

import statistics
from collections import defaultdict

from ..pages import NotMeasured

FIGURES = {
    "per_cpu": lambda run: run["images"] / run["cpu"],
    "per_second": lambda run: run["images"] / run["wall"],
    "after_first": lambda run: (run["images"] - 32) / (run["wall"] - run["first"]),
    "mb": lambda run: run["bytes"] / 1e6,
    "first_mb": lambda run: run["first_bytes"] / 1e6,
    "held_mb": lambda run: run["held"] / 1e6,
    "peak_mb": lambda run: run["peak_bytes"] / 1e6,
}


class Questions:
    """The runs of all rounds."""

    def __init__(self, rows):
        self.rows = rows

    def runs(self, question, **conditions):
        """The runs of each peer."""
        found = defaultdict(list)
        for run in self.rows:
            if run["question"] == question and conditions.items() <= run.items():
                found[run["peer"]].append(run)
        return found

    def medians(self, figure, question, **conditions):
        """A field of the runs, or one of FIGURES, by peer."""
        value = FIGURES.get(figure, lambda run: run[figure])
        return {
            peer: statistics.median(map(value, runs))
            for peer, runs in self.runs(question, **conditions).items()
            if value(runs[0]) is not None
        }

    def further(self, short, long, **conditions):
        """Images per second beyond a short epoch, which excludes startup and read-ahead."""
        walls, counts = (
            [self.medians(field, "link", data=data, **conditions) for data in (long, short)]
            for field in ("wall", "images")
        )
        return {
            peer: (counts[0][peer] - counts[1][peer]) / (walls[0][peer] - walls[1][peer])
            for peer in walls[0].keys() & walls[1].keys()
            # Not where the short epochs have waited for something else.
            if walls[0][peer] > walls[1][peer]
        }


def ask(lab):
    """The runs, as the page asks for them."""
    return Questions(lab.rows())


def once(lab):
    """The runs that are not made again: caches, resuming, damage."""
    rows = lab.rows("once")
    if not rows:
        raise NotMeasured
    return Questions(rows)


def _has_place(run):
    return "shard=" in run["error"] and "key=" in run["error"]


def corrupt(lab):
    """What each peer does with a damaged shard."""
    rows = []
    for peer, runs in once(lab).runs("corrupt").items():
        stops = [run for run in runs if run["error"]]
        named = "shard, sample, scan" if all(map(_has_place, stops)) else "no file"
        lost = [run["lost_if_skipped"] for run in runs if run.get("lost_if_skipped") is not None]
        rows.append(
            {
                "peer": peer,
                "wrong": sum(run["wrong"] > 0 for run in runs),
                "stops": len(stops),
                "named": named if stops else "",
                "lost": max(lost, default=""),
            }
        )
    return rows


SECTIONS = (ask, once, corrupt)
