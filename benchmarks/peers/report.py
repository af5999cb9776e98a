"""Tables and figures of what run.py measured: report.py FIGURES.json FOLDER (needs matplotlib).

Writes one figure a question into FOLDER, and prints the tables in Markdown.
"""

import collections
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
OUTCOMES = {
    "not finished": "#4a5568",
    "wrong pictures, nothing said": "#c53030",
    "stops, names no file": "#d69e2e",
    "stops, names shard and sample": "#2f855a",
    "same pictures": "#e2e8f0",
}
MEGABYTE = 1e6


class Runs:
    """The medians of the rounds."""

    def __init__(self, path):
        with open(path) as file:
            self.data = json.load(file)

    def of(self, question, **conditions):
        """The runs of each peer."""
        found = {}
        for run in self.data["runs"]:
            if run["question"] == question and conditions.items() <= run.items():
                found.setdefault(run["peer"], []).append(run)
        return found

    def counts(self, question):
        """How many runs there are of each peer under each condition."""
        conditions = ("peer", "workers", "rate", "data", "place", "form")
        found = collections.Counter(
            tuple(run.get(name) for name in conditions)
            for run in self.data["runs"]
            if run["question"] == question
        )
        return found.values()

    def medians(self, question, figure, **conditions):
        found = self.of(question, **conditions)
        return {
            peer: statistics.median(map(figure, runs))
            for peer, runs in found.items()
            if figure(runs[0]) is not None
        }


def per_cpu(run):
    return run["images"] / run["cpu"]


def per_second(run):
    return run["images"] / run["wall"]


def after_first(run):
    return (run["images"] - 32) / (run["wall"] - run["first"])


def of(key, unit=1.0):
    return lambda run: run[key] / unit


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
    axes.bar_label(bars, [number(value) for value in values], padding=3, fontsize=8)
    finish(figure, axes, path, title, unit, max(values))


def draw_pairs(path, first, second, names, title, unit):
    """Two bars for each peer, ranked by the second, the lowest at the top."""
    ranked = sorted(second, key=second.get, reverse=True)
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(ranked) + 1.2), layout="constrained")
    highest = max(*first.values(), *second.values())
    for offset, values, alpha, name in ((0.2, first, 0.4, names[0]), (-0.2, second, 1.0, names[1])):
        places = [place + offset for place in range(len(ranked))]
        lengths = [values[peer] for peer in ranked]
        colours = [colour(peer) for peer in ranked]
        bars = axes.barh(places, lengths, 0.38, color=colours, alpha=alpha)
        labels = [f"{number(length)} {name}" for length in lengths]
        axes.bar_label(bars, labels, padding=3, fontsize=8)
    axes.set_yticks(range(len(ranked)), ranked)
    finish(figure, axes, path, title, unit, highest * 1.15)


def draw_outcomes(path, outcomes, places):
    """A square for each peer and place, in the colour of what came of it."""
    order = list(OUTCOMES)
    peers = sorted(outcomes, key=lambda peer: (min(map(order.index, outcomes[peer])), peer))
    figure, axes = pyplot.subplots(figsize=(8, 0.3 * len(peers) + 1.6), layout="constrained")
    for row, peer in enumerate(reversed(peers)):
        for column, outcome in enumerate(outcomes[peer]):
            axes.barh(row, 0.94, 0.8, left=column + 0.03, color=OUTCOMES[outcome])
    axes.set_yticks(range(len(peers)), reversed(peers))
    axes.set_xticks([c + 0.5 for c in range(len(places))], [f"{p:.0%} in" for p in places])
    axes.set_ylim(-0.6, len(peers) - 0.4)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    shown = {each for row in outcomes.values() for each in row}
    keys = [name for name in OUTCOMES if name in shown]
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=OUTCOMES[name]) for name in keys]
    figure.legend(handles, keys, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    axes.set_title("16 bytes of one shard inverted, at three places", fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def finish(figure, axes, path, title, unit, highest):
    axes.margins(y=0.01)
    axes.set_xlim(0, highest * 1.12)
    axes.set_xlabel(unit)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def number(value):
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.{0 if value >= 20 or value < 0.005 else 1 if value >= 10 else 2}f}"


def table(title, columns, best_first):
    """Rows of all peers that the first column has, ranked by it."""
    print(f"\n{title}\n")
    print("| | " + " | ".join(columns) + " |")
    print("|---|" + "---|" * len(columns))
    first = next(iter(columns.values()))
    for peer in sorted(first, key=first.get, reverse=best_first):
        shown = [number(column.get(peer, "")) for column in columns.values()]
        print(f"| {peer} | " + " | ".join(shown) + " |")


def report_cpu(runs, folder):
    cpu = {w: runs.medians("cpu", per_cpu, workers=w) for w in (1, 2)}
    wall = {w: runs.medians("cpu", per_second, workers=w) for w in (1, 2)}
    columns = {
        "images a CPU second, 1 worker": cpu[1],
        "2 workers": cpu[2],
        "images a second, 1 worker": wall[1],
        "2 workers ": wall[2],
    }
    table("Decoding, from the page cache", columns, best_first=True)
    title = "224 px random crops from the page cache, one worker or thread"
    draw(os.path.join(folder, "peers-cpu.png"), cpu[1], title, "images a CPU second")


def report_link(runs, folder):
    short = {rate: runs.of("link", rate=rate, data="data") for rate in (20e6, 80e6)}
    long = {rate: runs.of("link", rate=rate, data="data-link") for rate in (20e6, 80e6)}
    whole = runs.medians("link", per_second, rate=20e6, data="data-link")
    columns = {
        "3,120 images": whole,
        "after the first batch": runs.medians("link", after_first, rate=20e6, data="data-link"),
        "each further image": further(short[20e6], long[20e6]),
        "780 images": runs.medians("link", per_second, rate=20e6, data="data"),
        "first batch after, s": runs.medians("link", of("first"), rate=20e6, data="data-link"),
        "MB": runs.medians("link", of("bytes", MEGABYTE), rate=20e6, data="data-link"),
        "780 images at 80 MB/s": runs.medians("link", per_second, rate=80e6, data="data"),
    }
    table("Over a link", columns, best_first=True)
    title = "3,120 photographs over a link of 20 MB/s, two workers or threads, start-up included"
    draw(os.path.join(folder, "peers-link.png"), whole, title, "images a second")


def further(short, long):
    """Images a second beyond those of the short epoch: what start-up and read-ahead leave out."""
    found = {}
    for peer in long.keys() & short.keys():
        images = long[peer][0]["images"] - short[peer][0]["images"]
        walls = (statistics.median(map(of("wall"), each[peer])) for each in (long, short))
        seconds = next(walls) - next(walls)
        if seconds > 0:  # not where the short epochs have waited for something else
            found[peer] = images / seconds
    return found


def report_memory(runs, folder):
    memory = runs.medians("memory", of("peak_bytes", MEGABYTE))
    table("Peak memory", {"MB": memory}, best_first=False)
    title = "Peak memory of all processes (PSS), two workers or threads"
    draw(os.path.join(folder, "peers-memory.png"), memory, title, "MB", largest_first=False)


def report_cache(runs, folder):
    seconds = runs.medians("cache", of("wall"))
    sent = runs.medians("cache", of("bytes", MEGABYTE))
    before = runs.medians("cache", of("first_bytes", MEGABYTE))
    columns = {
        "second epoch, MB": sent,
        "first epoch, MB": before,
        "second epoch, s": seconds,
        "first epoch, s": runs.medians("cache", of("first_epoch")),
        "on disk at the end, MB": runs.medians("cache", of("held", MEGABYTE)),
    }
    table("With half of the photographs' bytes on disk", columns, best_first=False)
    title = "Two epochs over a link, with 41 MB on local disk"
    path = os.path.join(folder, "peers-cache.png")
    draw_pairs(path, before, sent, ("first", "second"), title, "MB fetched in each epoch")


def report_resume(runs, folder):
    first = runs.medians("resume", of("first"))
    usual = runs.medians("resume", of("first_of_whole"))
    latest = {peer: found[-1] for peer, found in runs.of("resume").items()}
    columns = {
        "first batch after, s": first,
        "of an epoch's start, s": usual,
        "same order": {peer: "yes" if run["exact"] else "no" for peer, run in latest.items()},
        "lost": {peer: str(run["lost"]) for peer, run in latest.items()},
        "repeated": {peer: str(run["repeated"]) for peer, run in latest.items()},
        "MB": remote_only(latest, "bytes"),
        "MB of an epoch": remote_only(latest, "bytes_of_whole"),
    }
    table("Resuming in another process", columns, best_first=False)
    title = "A new process: seconds to the first batch, at the start and in the middle of an epoch"
    path = os.path.join(folder, "peers-resume.png")
    draw_pairs(path, usual, first, ("at the start", "in the middle"), title, "seconds")


def remote_only(latest, key):
    return {
        peer: number(run[key] / MEGABYTE) if run["streams"] else "local"
        for peer, run in latest.items()
    }


def report_corrupt(runs, folder):
    found = runs.of("corrupt")
    places = sorted({run["place"] for each in found.values() for run in each})
    outcomes = {}
    for peer, each in found.items():
        at = {run["place"]: run for run in each}
        outcomes[peer] = [outcome(at[place]) if place in at else "not finished" for place in places]
    wrong = {peer: sum(run["wrong"] > 0 for run in each) for peer, each in found.items()}
    columns = {
        "wrong pictures, of 3": wrong,
        "stops, of 3": {p: sum(bool(run["error"]) for run in each) for p, each in found.items()},
        "what it names": {p: named(each) for p, each in found.items()},
        "lost if skipped": {p: skipped(each) for p, each in found.items()},
    }
    table("A shard with 16 bytes inverted", columns, best_first=False)
    draw_outcomes(os.path.join(folder, "peers-corrupt.png"), outcomes, places)


def outcome(run):
    if run["error"]:
        return "stops, names shard and sample" if has_place(run) else "stops, names no file"
    return "wrong pictures, nothing said" if run["wrong"] else "same pictures"


def has_place(run):
    return "shard=" in run["error"] and "key=" in run["error"]


def named(runs):
    stopped = [run for run in runs if run["error"]]
    if not stopped:
        return ""
    return "shard, sample, scan" if all(map(has_place, stopped)) else "no file"


def skipped(runs):
    lost = [run["lost_if_skipped"] for run in runs if run.get("lost_if_skipped") is not None]
    return str(max(lost)) if lost else ""


def report_prepare(runs, folder):
    prepared = [run for run in runs.data["runs"] if run["question"] == "prepare"]
    seconds = {run["form"]: run["cpu"] for run in prepared}
    sizes = {run["form"]: run["bytes"] / MEGABYTE for run in prepared}
    table("Preparing", {"CPU s": seconds, "MB": sizes}, best_first=False)
    title = "Preparing 780 photographs, one process, its imports included"
    path = os.path.join(folder, "peers-prepare.png")
    draw(path, seconds, title, "CPU seconds", largest_first=False)


def main():
    source, folder = sys.argv[1:]
    runs = Runs(source)
    for question, report in (
        ("cpu", report_cpu),
        ("link", report_link),
        ("memory", report_memory),
        ("cache", report_cache),
        ("resume", report_resume),
        ("corrupt", report_corrupt),
        ("prepare", report_prepare),
    ):
        if runs.of(question):
            report(runs, folder)
            counts = runs.counts(question)
            print(f"\n{question}: {min(counts)} to {max(counts)} runs of a peer and condition")


if __name__ == "__main__":
    main()
