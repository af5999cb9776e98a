"""Tables and pictures of the page, from what was measured and simulated."""

import statistics

from .. import plots
from ..plots import BLUE, ORANGE, label

NEAR = 0.05
EPOCHS = 90


def ratio(row):
    """Return the ratio of simulated to real images per second."""
    return row["simulated"]["images_per_second"] / row["real"]["images_per_second"]


def by_setup(rows):
    """The rounds of each set-up, in the order of their ratios."""
    found = {}
    for row in rows:
        found.setdefault(row["name"], []).append(row)
    return [sorted(rounds, key=ratio) for rounds in found.values()]


def _within(ratios):
    return sum(abs(each - 1) <= NEAR for each in ratios)


def validation(lab):
    results = lab.load("validation")
    if results is None:
        return None
    setups = by_setup(results["rows"])
    medians = [rounds[len(rounds) // 2] for rounds in setups]
    with plots.figure(lab.figure("validation"), legend=2) as (ax,):
        for shift, who, color in ((-0.2, "real", BLUE), (0.2, "simulated", ORANGE)):
            rates = [row[who]["images_per_second"] for row in medians]
            places = [place + shift for place in range(len(rates))]
            bars = ax.barh(places, rates, 0.36, color=color, label=who)
            ax.bar_label(bars, [f"{rate:.0f}" for rate in rates], fontsize=9, padding=2)
        ax.set_yticks(range(len(medians)), [row["name"] for row in medians])
        ax.invert_yaxis()
        ax.set_xlabel("images/s")
        ax.margins(x=0.1)
    rows = []
    for row, rounds in zip(medians, setups, strict=True):
        workers = f"threads: {row['threads']}" if row["threads"] else row["workers"]
        equal = row["real"]["requests"] == row["simulated"]["requests"]
        rows.append(
            {
                **row,
                "shape": f"{row['nodes']} x {row['processes'] // row['nodes']} x {workers}",
                "ratio": ratio(row),
                "low": ratio(rounds[0]),
                "high": ratio(rounds[-1]),
                "stalls": [100 * row[who]["stall"] for who in ("real", "simulated")],
                "equal": "equal" if equal else "differ",
            }
        )
    ratios, all_ratios = (list(map(ratio, found)) for found in (medians, results["rows"]))
    return {
        "rows": rows,
        "times": min(map(len, setups)),
        "near": _within(ratios),
        "setups": len(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "near_runs": _within(all_ratios),
        "runs": len(all_ratios),
        "nanoseconds": 1e9
        * statistics.median(row["costs"]["byte_seconds"] for row in results["rows"]),
    }


def _hours(found):
    return EPOCHS * found["epoch_seconds"] / 3600


def paper(lab):
    results = lab.load("scale") or {}
    if not {"fig5", "fig9", "fig16"} <= results.keys():
        return None
    with plots.figure(lab.figure("paper"), 2, 2, height=7, legend=4) as (five, nine, *sixteen):
        for scan, points in results["fig5"].items():
            rates = [found["images_per_second"] for _, found in points]
            options = {"ms": 4, "color": plots.color(scan), "label": label(scan)}
            five.plot([mib for mib, _ in points], rates, "o-", **options)
        five.set(xlabel="MiB/s, 10 nodes, ResNet-18 (Fig. 5)", ylabel="images/s")
        seconds = {
            model: [found["epoch_seconds"] for found in scans.values()]
            for model, scans in results["fig9"].items()
        }
        scans = list(next(iter(results["fig9"].values())))
        plots.bars(nine, seconds, list(map(label, scans)), ".0f")
        nine.set(xlabel="20 nodes, 700 MiB/s (Fig. 9)", ylabel="seconds an epoch")
        nine.margins(y=0.2)
        for ax, (model, found) in zip(sixteen, results["fig16"].items(), strict=True):
            for scan, points in found.items():
                hours = [_hours(each) for _, each in points]
                options = {"ms": 4, "color": plots.color(scan), "label": label(scan)}
                ax.plot([str(mib) for mib, _ in points], hours, "o-", **options)
            xlabel = f"MiB/s, 10 nodes, {model} (Fig. 16)"
            ax.set(yscale="log", xlabel=xlabel, ylabel=f"hours for {EPOCHS} epochs")
    nine_rows = [
        {
            "model": model,
            "cells": " | ".join(f"{each:.0f} s" for each in times),
            "times": times[-1] / times[scans.index("5")],
        }
        for model, times in seconds.items()
    ]
    sixteen_rows = [
        {
            "model": model,
            "mib": mib,
            "cells": " | ".join(f"{_hours(found[scan][number][1]):.1f}" for scan in scans),
        }
        for model, found in results["fig16"].items()
        for number, (mib, _) in enumerate(found["full"])
    ]
    return {"nine": nine_rows, "sixteen": sixteen_rows}


def s3(lab):
    results = (lab.load("scale") or {}).get("dgx")
    if results is None:
        return None
    rows = []
    with plots.figure(lab.figure("s3"), legend=4) as (ax,):
        for scan, points in results.items():
            names = ["no limit" if each >= 1e6 else f"{each:g}" for each, _ in points]
            rates = [found["images_per_second"] / 1e3 for _, found in points]
            ax.plot(names, rates, "o-", color=plots.color(scan), label=label(scan))
            found = points[0][1]
            cells = " | ".join(f"{rate:.0f}" for rate in rates)
            rows.append({**found, "scan": label(scan), "cells": cells,
                         "gb": found["sent_bytes"] / 1e9,
                         "left": found["sent_bytes"] / 1e9 * 0.09})  # fmt: skip
        ax.set(
            xlabel="GB/s that the bucket gives to all 64 accelerators",
            ylabel="thousand images/s, ImageNet on 64 H100",
            ylim=0,
        )
    header = " | ".join(f"{name} GB/s" for name in names)
    return {"rows": rows, "header": header, "dashes": "| --- " * len(names)}


def scale(lab):
    found = (lab.load("scale") or {}).get("scale")
    keys = ("accelerators", "seconds", "found")
    return found and {"rows": [dict(zip(keys, row, strict=True)) for row in found]}


SECTIONS = (
    validation,
    paper,
    s3,
    scale,
)
