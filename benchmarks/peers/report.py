"""Tables and figures of what run.py measured: report.py FIGURES.json FOLDER (needs matplotlib).

Writes one figure a question into FOLDER, and prints the tables in Markdown.
"""

import json
import os
import statistics
import sys

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

OURS = "#2b6cb0"
SMALL = "#c05621"  # pictures of 256 pixels: fewer pixels to begin with
OTHERS = "#a0aec0"


class Runs:
    """The medians of the rounds."""

    def __init__(self, path):
        with open(path) as file:
            self.data = json.load(file)

    def values(self, question, figure, **conditions):
        """The figure of each peer in each round."""
        found = {}
        for run in self.data["runs"]:
            if run["question"] == question and conditions.items() <= run.items():
                found.setdefault(run["peer"], []).append(figure(run))
        return found

    def medians(self, *what, **conditions):
        found = self.values(*what, **conditions)
        return {peer: statistics.median(values) for peer, values in found.items()}


def per_cpu(run):
    return run["images"] / run["cpu"]


def per_second(run):
    return run["images"] / run["wall"]


def colour(peer):
    if "pcr" in peer:
        return OURS
    return SMALL if "256" in peer else OTHERS


def draw(path, medians, title, unit, largest_first=True):
    """Bars, the best at the top."""
    ranked = sorted(medians, key=medians.get, reverse=not largest_first)
    figure, axes = pyplot.subplots(figsize=(8, 0.32 * len(ranked) + 1.1), layout="constrained")
    values = [medians[peer] for peer in ranked]
    bars = axes.barh(ranked, values, color=[colour(peer) for peer in ranked])
    digits = 0 if max(values) > 20 else 2
    axes.bar_label(bars, [f"{value:,.{digits}f}" for value in values], padding=3, fontsize=8)
    axes.set_xlim(0, max(values) * 1.12)
    axes.set_xlabel(unit)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def table(title, columns, best_first):
    """Rows of all peers that some column has; ranked by the first."""
    print(f"\n{title}\n")
    print("| | " + " | ".join(columns) + " |")
    print("|---|" + "---|" * len(columns))
    first = next(iter(columns.values()))
    peers = sorted(first, key=first.get, reverse=best_first)
    for peer in peers:
        cells = [column.get(peer) for column in columns.values()]
        shown = ["" if cell is None else f"{cell:,.{0 if cell >= 20 else 2}f}" for cell in cells]
        print(f"| {peer} | " + " | ".join(shown) + " |")


def main():
    source, folder = sys.argv[1:]
    runs = Runs(source)
    cpu = {w: runs.medians("cpu", per_cpu, workers=w) for w in (1, 2)}
    wall = {w: runs.medians("cpu", per_second, workers=w) for w in (1, 2)}
    columns = {
        "images a CPU second, 1 worker": cpu[1],
        "2 workers": cpu[2],
        "images a second, 1 worker": wall[1],
        "with 2": wall[2],
    }
    columns = {name: column for name, column in columns.items() if column}
    table("Decoding, from the page cache", columns, best_first=True)
    title = "224 px random crops from the page cache, one worker or thread"
    draw(os.path.join(folder, "peers-cpu.png"), cpu[1] or cpu[2], title, "images a CPU second")

    links = {rate: runs.medians("link", per_second, rate=rate) for rate in (20e6, 80e6)}
    first = runs.medians("link", lambda run: run["first"], rate=20e6)
    sent = runs.medians("link", lambda run: run["bytes"] / 1e6, rate=20e6)
    columns = {
        "images a second at 20 MB/s": links[20e6],
        "at 80 MB/s": links[80e6],
        "first batch after, s": first,
        "MB an epoch": sent,
    }
    columns = {name: column for name, column in columns.items() if column}
    if links[20e6]:
        table("Over a link", columns, best_first=True)
        title = "Over a link of 20 MB/s, two workers"
        draw(os.path.join(folder, "peers-link.png"), links[20e6], title, "images a second")

    memory = runs.medians("memory", lambda run: run["peak_bytes"] / 1e6)
    if memory:
        table("Peak memory of all processes, two workers", {"MB": memory}, best_first=False)
        title = "Peak memory of all processes (PSS), two workers"
        draw(os.path.join(folder, "peers-memory.png"), memory, title, "MB", largest_first=False)

    prepared = [run for run in runs.data["runs"] if run["question"] == "prepare"]
    seconds = {run["form"]: run["cpu"] for run in prepared}
    sizes = {run["form"]: run["bytes"] / 1e6 for run in prepared}
    table("Preparing", {"CPU s": seconds, "MB": sizes}, best_first=False)
    rounds = runs.values("cpu", per_cpu, workers=1)
    print("\nrounds:", {peer: len(values) for peer, values in rounds.items()})


if __name__ == "__main__":
    main()
