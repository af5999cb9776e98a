"""Tables and pictures of the page: the medians of the rounds, ranked by the first column."""

import statistics
from collections import defaultdict

from .. import plots

# Pictures of 256 pixels have fewer pixels to begin with.
OURS, SMALL, OTHERS = "#2b6cb0", "#c05621", "#a0aec0"
OUTCOMES = {
    "not finished": "#4a5568",
    "wrong pictures, nothing said": "#c53030",
    "stops, names no file": "#d69e2e",
    "stops, names shard and sample": "#2f855a",
    "same pictures": "#e2e8f0",
}
MB = 1e6
SLOW, FAST = {"rate": 20e6}, {"rate": 80e6}
LONG = {"data": "data-link"}
SHORT = {"data": "data"}


def _per_cpu(run):
    return run["images"] / run["cpu"]


def _per_second(run):
    return run["images"] / run["wall"]


def _after_first(run):
    return (run["images"] - 32) / (run["wall"] - run["first"])


def _of(key, unit=1.0):
    return lambda run: run[key] / unit


def _runs(lab, question, **conditions):
    """The runs of each peer."""
    found = defaultdict(list)
    for run in lab.rows():
        if run["question"] == question and conditions.items() <= run.items():
            found[run["peer"]].append(run)
    return found


def _medians(lab, figure, question, **conditions):
    found = _runs(lab, question, **conditions)
    return {
        peer: statistics.median(map(figure, runs))
        for peer, runs in found.items()
        if figure(runs[0]) is not None
    }


def number(value):
    """With as many digits as tell."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.{0 if value >= 20 or value < 0.005 else 1 if value >= 10 else 2}f}"


def _table(*columns, best_first=False):
    """Rows of all peers that the first column has, ranked by it."""
    ranked = sorted(columns[0], key=columns[0].get, reverse=best_first)
    rows = [
        {"peer": peer, "cells": " | ".join(number(column.get(peer, "")) for column in columns)}
        for peer in ranked
    ]
    return {"rows": rows} if rows else None


def _color(peer):
    return OURS if "pcr" in peer else SMALL if "256" in peer else OTHERS


def _bars(path, title, unit, best_first, *groups):
    """Bars, the best at the top: of (values, name, alpha), ranked by the last."""
    ranked = sorted(groups[-1][0], key=groups[-1][0].get, reverse=not best_first)
    width = 0.8 / len(groups)
    with plots.figure(path, height=(0.18 * len(groups) + 0.14) * len(ranked) + 1.2) as (ax,):
        for shift, (values, name, alpha) in zip((0.2, -0.2), groups, strict=False):
            places = [place + shift * (len(groups) - 1) for place in range(len(ranked))]
            lengths = [values[peer] for peer in ranked]
            colors = [_color(peer) for peer in ranked]
            drawn = ax.barh(places, lengths, width, color=colors, alpha=alpha)
            labels = [f"{number(length)} {name}" for length in lengths]
            ax.bar_label(drawn, labels, padding=3, fontsize=8)
        ax.set_yticks(range(len(ranked)), ranked)
        ax.set(title=title, xlabel=unit)
        ax.margins(x=0.15, y=0.01)
        ax.grid(axis="y", visible=False)


def cpu(lab):
    cpu, wall = (
        [_medians(lab, figure, "cpu", workers=workers) for workers in (1, 2)]
        for figure in (_per_cpu, _per_second)
    )
    title = "224 px random crops from the page cache, one worker or thread"
    _bars(lab.figure("cpu"), title, "images per CPU second", True, (cpu[0], "", 1))
    return _table(*cpu, *wall, best_first=True)


def link(lab):
    long, short = ({"question": "link", **SLOW, **data} for data in (LONG, SHORT))
    whole = _medians(lab, _per_second, **long)
    title = "3,120 photographs over a 20 MB/s link, two workers or threads"
    _bars(lab.figure("link"), title, "images/s, startup included", True, (whole, "", 1))
    columns = [
        _medians(lab, _after_first, **long),
        _further(_runs(lab, **short), _runs(lab, **long)),
        _medians(lab, _per_second, **short),
        _medians(lab, _of("first"), **long),
        _medians(lab, _of("bytes", MB), **long),
        _medians(lab, _per_second, "link", **FAST, **SHORT),
    ]
    return _table(whole, *columns, best_first=True)


def _further(short, long):
    """Return images per second beyond the short epoch, which excludes startup and read-ahead."""
    found = {}
    for peer in long.keys() & short.keys():
        images = long[peer][0]["images"] - short[peer][0]["images"]
        walls = [statistics.median(map(_of("wall"), each[peer])) for each in (long, short)]
        if walls[0] > walls[1]:  # not where the short epochs have waited for something else
            found[peer] = images / (walls[0] - walls[1])
    return found


def memory(lab):
    found = _medians(lab, _of("peak_bytes", MB), "memory")
    title = "Peak memory of all processes (PSS), two workers or threads"
    _bars(lab.figure("memory"), title, "MB", False, (found, "", 1))
    return _table(found)


def cache(lab):
    second, first, held = (
        _medians(lab, _of(key, MB), "cache") for key in ("bytes", "first_bytes", "held")
    )
    seconds, before = (_medians(lab, _of(key), "cache") for key in ("wall", "first_epoch"))
    title = "Two epochs over a link, with 41 MB on local disk"
    groups = ((first, "first", 0.4), (second, "second", 1))
    _bars(lab.figure("cache"), title, "MB fetched in each epoch", False, *groups)
    return _table(second, first, seconds, before, held)


def resume(lab):
    first, usual = (_medians(lab, _of(key), "resume") for key in ("first", "first_of_whole"))
    latest = {peer: runs[-1] for peer, runs in _runs(lab, "resume").items()}
    title = "A new process: seconds to the first batch of an epoch"
    groups = ((usual, "at the start", 0.4), (first, "in the middle", 1))
    _bars(lab.figure("resume"), title, "seconds", False, *groups)
    same = {peer: "yes" if run["exact"] else "no" for peer, run in latest.items()}
    lost, repeated = (
        {peer: run[key] for peer, run in latest.items()} for key in ("lost", "repeated")
    )
    sent = [
        {p: number(run[key] / MB) if run["streams"] else "local" for p, run in latest.items()}
        for key in ("bytes", "bytes_of_whole")
    ]
    return _table(first, usual, same, lost, repeated, *sent)


def _has_place(run):
    return "shard=" in run["error"] and "key=" in run["error"]


def _outcome(run):
    if run["error"]:
        return "stops, names shard and sample" if _has_place(run) else "stops, names no file"
    return "wrong pictures, nothing said" if run["wrong"] else "same pictures"


def corrupt(lab):
    found = _runs(lab, "corrupt")
    places = sorted({run["place"] for runs in found.values() for run in runs})
    columns = [{}, {}, {}, {}]
    outcomes = {}
    for peer, runs in found.items():
        at = {run["place"]: _outcome(run) for run in runs}
        outcomes[peer] = [at.get(place, "not finished") for place in places]
        stops = [run for run in runs if run["error"]]
        named = "shard, sample, scan" if all(map(_has_place, stops)) else "no file"
        lost = [run["lost_if_skipped"] for run in runs if run.get("lost_if_skipped") is not None]
        wrong = sum(run["wrong"] > 0 for run in runs)
        row = (wrong, len(stops), named if stops else "", max(lost, default=""))
        for column, value in zip(columns, row, strict=True):
            column[peer] = value
    _draw_outcomes(lab.figure("corrupt"), outcomes, places)
    return _table(*columns)


def _draw_outcomes(path, outcomes, places):
    """Draw a square for each peer and position, colored by its outcome."""
    order = list(OUTCOMES)
    peers = sorted(
        outcomes, key=lambda peer: (min(map(order.index, outcomes[peer])), peer), reverse=True
    )
    with plots.figure(path, height=0.3 * len(peers) + 1.6, legend=2) as (ax,):
        for column in range(len(places)):
            for outcome, color in OUTCOMES.items():
                rows = [r for r, peer in enumerate(peers) if outcomes[peer][column] == outcome]
                if rows:
                    ax.barh(rows, 0.94, 0.8, column + 0.03, color=color, label=outcome)
        ax.set_yticks(range(len(peers)), peers)
        ax.set_xticks([c + 0.5 for c in range(len(places))], [f"{p:.0%} in" for p in places])
        ax.set(title="16 bytes of one shard inverted, at three places", frame_on=False)
        ax.grid(visible=False)


def prepare(lab):
    prepared = [run for run in lab.rows() if run["question"] == "prepare"]
    seconds = {run["form"]: run["cpu"] for run in prepared}
    title = "Preparing 780 photographs, one process, its imports included"
    _bars(lab.figure("prepare"), title, "CPU seconds", False, (seconds, "", 1))
    return _table(seconds, {run["form"]: run["bytes"] / MB for run in prepared})


def imread(lab):
    found = lab.load("imread")
    if found is None:
        return None
    rows = []
    for name, rates in found["rates"].items():
        cells = [
            f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"
            for values in rates.values()
        ]
        version = found["versions"][name]
        first = statistics.median(next(iter(rates.values())))
        rows.append({"name": f"{name} {version}", "cells": " | ".join(cells), "first": first})
    return {"rows": sorted(rows, key=lambda row: -row["first"])}


SECTIONS = (
    cpu,
    link,
    memory,
    cache,
    resume,
    corrupt,
    prepare,
    imread,
)
