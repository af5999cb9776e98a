"""Tables and pictures of the page: Delta-DNN's next to ours, from the rows."""

import statistics

import numpy as np

from .. import plots
from ..plots import BLACK, BLUE, GRAY, ORANGE

# Table 1 of the paper: LZMA, Zstd, SZ and its bound, Delta-DNN and its bound, accuracy, change.
PAPER_TABLE1 = {
    "VGG-16": (1.096, 1.088, "4.415 (7 %)", "", "7.394 (8 %)", "92.45 %", "", "-0.15"),
    "ResNet101": (1.098, 1.078, "4.192 (5 %)", "", "9.341 (10 %)", "93.05 %", "", "+0.42"),
    "EfficientNet": (1.099, 1.078, "3.204 (1 %)", "", "10.266 (10 %)", "84.82 %", "", "+0.07"),
}
PAPER_TABLE3 = {"VGG-16": (95, 7.702), "ResNet101": (89, 6.488), "EfficientNet": (110, 5.946)}
# Global averages that the paper takes from SPEEDTEST (January 2020), megabits a second.
BANDWIDTHS = {"mobile download": 31.95, "fixed download": 74.32, "fixed upload": 40.83}
COLORS = (GRAY, "#718096", "#4a5568", ORANGE, "#63b3ed", BLUE)
CODERS = ("zstd", "lzma", "rle+zstd", "rle+lzma", "pcodec")
ONE_EPOCH = 12


def by_network(runs):
    """Runs by the name of their network, in the order of the recipes."""
    found = {}
    for run in runs:
        found.setdefault(run["name"], []).append(run)
    return found


def last_pair(run):
    """What Algorithm 1 found on the last epoch's delta."""
    return max(run["pairs"].values(), key=lambda pair: pair["epoch"])


def accuracies(run):
    """The accuracy of the epochs that were judged."""
    return {row["epoch"]: row["accuracy"] for row in run["rows"] if "accuracy" in row}


def at(table, bound):
    """The row of a bound."""
    return next(row for row in table if row["bound"] == bound)


def _title(run):
    return f"{run['name']}, seed {run['seed']}"


def _points(loss):
    """A loss of accuracy as the paper prints it: a change in points."""
    return f"{-100 * loss + 0.0:+.2f}"  # never -0.00


def _ratio(store):
    """Ratio of a store, keyframes and manifest included."""
    return store["raw_bytes"] / store["stored_bytes"]


def _version_ratio(store):
    """Mean ratio of the versions that are deltas."""
    deltas = [file["bytes"] for file in store["files"] if not file["keyframe"]]
    return store["raw_bytes"] / len(store["files"]) / statistics.fmean(deltas)


def _keyframe_share(store):
    keyframes = [file["bytes"] for file in store["files"] if file["keyframe"]]
    return sum(keyframes) / store["stored_bytes"]


def _shift(row, name="restored_loss"):
    """Relative difference of the next epoch's mean loss to that of the exact resume."""
    return row[name] / row["exact_loss"] - 1 if name in row else None


def _error_by_move(pair):
    """Deviation of a uniform error within the chosen bound, by that of the epoch's own change."""
    return pair["ours"]["bound"] / np.sqrt(3) / pair["similarity"]["moved"]


def networks(lab):
    runs = lab.rows()
    if not runs:
        return None
    rows = []
    for group in by_network(runs).values():
        recipe = group[0]["recipe"]
        optimizer = {"sgd": "SGD, momentum 0.9", "adamw": "AdamW"}[recipe["optimizer"]]
        finals = ", ".join(f"{run['rows'][-1]['accuracy']:.1%}" for run in group)
        rows.append(
            {**group[0], "optimizer": optimizer, "seeds": len(group), "finals": finals,
             "millions": group[0]["parameters"] / 1e6}
        )  # fmt: skip
    seconds = sum(row["cpu_seconds"] for run in runs for row in run["rows"])
    return {"rows": rows, "minutes": seconds / 60, "date": runs[-1]["date"][:10]}


def similarity(lab):
    groups = by_network(lab.rows())
    if not groups:
        return None
    height = 3.6 if len(groups) < 4 else 2.6
    with plots.figure(lab.figure("similarity"), len(groups), height=height) as axes:
        for ax, (name, group) in zip(axes, groups.items(), strict=True):
            found = last_pair(group[0])["similarity"]
            points = np.array(found["points"])
            reach = np.quantile(np.abs(points), 0.995)
            tick = float(f"{0.6 * reach:.0e}")
            ax.scatter(*points.T, s=4, color=BLUE)
            ax.plot([-reach, reach], [-reach, reach], color=BLACK, lw=0.8)
            ticks = ([-tick, 0, tick], [f"{-tick:g}", "0", f"{tick:g}"])
            ax.set_xticks(*ticks)
            ax.set_yticks(*ticks)
            ax.set(xlim=(-reach, reach), ylim=(-reach, reach), box_aspect=1)
            ax.tick_params(labelsize=8)
            text = f"{name}\ny = {found['slope']:.3f} x\n1 - SSIM = {1 - found['ssim']:.0e}"
            ax.set_title(text, fontsize=9)
        axes[0].set_ylabel("last epoch", fontsize=10)
        axes[0].figure.supxlabel("the epoch before", fontsize=10)
    return {}


def table1(lab):
    rows = [
        {"name": name, "who": "paper", "mb": None, "cells": " | ".join(map(str, row))}
        for name, row in PAPER_TABLE1.items()
    ]
    runs = lab.rows()
    for run in runs:
        ours, cells, change = last_pair(run)["ours"], [""] * 3, ""
        if "rivals" in run:
            lossless, sz3 = run["rivals"]["lossless"], run["rivals"]["sz3"]["chosen"]
            cells = [f"{lossless['LZMA']:.3f}", f"{lossless['Zstd']:.3f}"]
            cells.append(f"{sz3['ratio']:.2f} ({sz3['bound']:.1%})")
            change = _points(sz3["loss"])
        cells.append(f"{at(ours['table'], 0.01)['ratio']:.2f}")
        cells.append(f"**{ours['chosen']['ratio']:.2f}** ({ours['bound']:.1%})")
        cells += [f"{ours['accuracy_exact']:.2%}", change, _points(ours["chosen"]["loss"])]
        size = f"{run['raw_bytes'] / 1e6:.1f} MB"
        row = {"name": run["name"], "who": f"seed {run['seed']}", "mb": size}
        rows.append(row | {"cells": " | ".join(cells)})
    return runs and {"rows": rows}


def table2(lab):
    runs = lab.rows()
    rows = []
    for run in runs:
        for pair in sorted(run["pairs"].values(), key=lambda pair: pair["epoch"]):
            ours = pair["ours"]
            held = ours["held_out"]
            low, high = ours["chosen"]["loss_interval"]
            rows.append(
                {
                    "name": _title(run),
                    "epoch": pair["epoch"],
                    "moved": 100 * pair["similarity"]["moved"],
                    "fixed": at(ours["table"], 0.01)["ratio"],
                    "chosen": ours["chosen"]["ratio"],
                    "bound": 100 * ours["bound"],
                    "error": _error_by_move(pair),
                    "accuracy": 100 * ours["accuracy_exact"],
                    "change": _points(ours["chosen"]["loss"]),
                    "low": -100 * high,
                    "high": -100 * low,
                    "held": f"{held['bound']:.1%}: {_points(held['loss'])}" if held else "none",
                }
            )
    _draw_epochs(lab.figure("epochs"), runs)
    return runs and {"rows": rows}


def _draw_epochs(path, runs):
    """The ratio of each epoch's delta at the fixed bound, and how far the weights moved."""
    with plots.figure(path, 2) as (left, right):
        for number, (name, group) in enumerate(by_network(runs).items()):
            for run in group:
                epochs, ratios, moved = (
                    [row[key] for row in run["deltas"]] for key in ("epoch", "ratio", "moved")
                )
                text = name if run is group[0] else None
                left.plot(epochs, ratios, color=f"C{number}", lw=1, label=text)
                right.plot([100 * each for each in moved], ratios, ".", color=f"C{number}", ms=4)
        left.set(xlabel="epoch", ylabel="ratio at 1 % of the deviation")
        left.locator_params(axis="x", integer=True)
        left.legend(fontsize=9)
        right.set(xscale="log", xlabel="change of an epoch, % of the deviation")
        right.set_xticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
        right.minorticks_off()


def bounds(lab):
    groups = by_network(lab.rows())
    if not groups:
        return None
    with plots.figure(lab.figure("bounds"), 2) as (left, right):
        for number, (name, group) in enumerate(groups.items()):
            tables = [last_pair(run)["ours"]["table"] for run in group]
            x = [100 * row["bound"] for row in tables[0]]
            losses, ratios = (
                np.array([[row[key] for row in table] for table in tables])
                for key in ("loss", "ratio")
            )
            left.plot(x, -100 * losses.T, "o", ms=3, color=f"C{number}", alpha=0.5)
            left.plot(x, -100 * losses.mean(0), color=f"C{number}", label=name)
            right.plot(x, ratios.mean(0), "o-", ms=3, color=f"C{number}", label=name)
        left.axhline(-0.2, color=BLACK, lw=1, ls="--")
        left.set_ylabel("change of accuracy, points")
        left.legend(fontsize=9)
        right.axhline(ONE_EPOCH, color=BLACK, lw=1, ls="--")
        right.set(yscale="log", ylabel="ratio")
        right.set_yticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"])
        for ax in (left, right):
            ax.set_xlabel("bound, % of each tensor's deviation")
    return {}


def literal(lab):
    rows = []
    for run in [run for run in lab.rows() if "rivals" in run]:
        found = run["rivals"]["literal"]
        cells = [f"{row['ratio']:.0f}x, {_points(row['loss'])}" for row in found["table"]]
        kept = "none: the default" if found["is_default"] else f"{found['bound']:.1%}"
        rows.append({"name": _title(run), "cells": " | ".join(cells), "kept": kept})
    return {"rows": rows} if rows else None


def coders(lab):
    runs = [run for run in lab.rows() if "rivals" in run]
    if not runs:
        return None
    groups = by_network(runs)
    names = [name.replace(", ", ",\n") for name in groups]
    rows = []
    with plots.figure(lab.figure("coders"), 2, legend=6) as axes:
        for ax, key, percent in zip(axes, ("coders", "coders_5"), (1, 5), strict=True):
            found = [group[0]["rivals"][key]["delta"] for group in groups.values()]
            plots.bars(ax, {coder: [each[coder] for each in found] for coder in CODERS}, names)
            for place, each in enumerate(found):
                text = "entropy of each tensor" if place == 0 else None
                ax.plot(
                    [place - 0.45, place + 0.45], [each["entropy"]] * 2, "k--", lw=1, label=text
                )
            ax.set(title=f"codes at {percent} % of the deviation", yscale="log", ylim=(20, 1100))
            ticks = [20, 50, 100, 200, 500, 1000]
            ax.set_yticks(ticks, list(map(str, ticks)))
            ax.minorticks_off()
        axes[0].set_ylabel("ratio of the codes")
    for run in runs:
        for key, text in (("coders", "1 %"), ("coders_5", "5 %")):
            delta, whole = (run["rivals"][key][each] for each in ("delta", "keyframe"))
            cells = [f"{delta[coder]:.1f}" for coder in (*CODERS, "entropy")]
            cells += [f"{whole[coder]:.2f}" for coder in ("pcodec", "entropy")]
            rows.append({"name": run["name"], "at": text, "cells": " | ".join(cells)})
    return {"rows": rows}


def transfer(lab):
    runs = [run for run in lab.rows() if "rivals" in run]
    if not runs:
        return None
    seconds = {}  # network, coder: over each link
    for run in runs:
        ours, rivals = last_pair(run)["ours"], run["rivals"]
        ratios = {"original": 1.0, "Zstd": rivals["lossless"]["Zstd"]}
        ratios |= {"LZMA": rivals["lossless"]["LZMA"], "SZ3": rivals["sz3"]["chosen"]["ratio"]}
        ratios["ours at 1 %"] = at(ours["table"], 0.01)["ratio"]
        ratios["ours, Algorithm 1"] = ours["chosen"]["ratio"]
        megabits = run["raw_bytes"] * 8e-6
        seconds[run["name"]] = {
            coder: [megabits / ratio / speed for speed in BANDWIDTHS.values()]
            for coder, ratio in ratios.items()
        }
    names = [name.replace(", ", ",\n") for name in seconds]
    with plots.figure(lab.figure("transfer"), 3, height=4, legend=3, sharey=True) as axes:
        for number, (ax, link) in enumerate(zip(axes, BANDWIDTHS, strict=True)):
            ax.set_prop_cycle(color=COLORS)
            groups = {c: [found[c][number] for found in seconds.values()] for c in ratios}
            plots.bars(ax, groups, names)
            ax.set_yscale("log")
            ax.set_title(f"{link}, {BANDWIDTHS[link]} Mbit/s", fontsize=10)
            ax.tick_params(axis="x", labelsize=8)
        axes[0].set_ylabel("seconds, computed")
    rows = [
        {"name": name, "coder": coder, "cells": " | ".join(f"{each:.3f}" for each in times)}
        for name, found in seconds.items()
        for coder, times in found.items()
    ]
    return {"rows": rows}


def table3(lab):
    runs = lab.rows()
    if not runs:
        return None
    rows = [
        {"name": name, "who": "paper", "versions": versions, "cells": " |  | ", "ratio": ratio,
         "change": None}
        for name, (versions, ratio) in PAPER_TABLE3.items()
    ]  # fmt: skip
    for run in runs:
        for key, chain in run["chains"].items():
            exact = accuracies(run)
            losses = [exact[int(e)] - value for e, value in chain.get("accuracy", {}).items()]
            cells = [f"{chain['raw_bytes'] / 1e6:.0f} MB", f"{chain['stored_bytes'] / 1e6:.1f} MB"]
            rows.append(
                {
                    "name": _title(run),
                    "who": f"{chain['bound']:.1%} ({'fixed' if key == 'fixed' else 'Algorithm 1'})",
                    "versions": f"{len(chain['files'])}, {chain['keyframes']} keyframes",
                    "cells": " | ".join([*cells, f"{_keyframe_share(chain):.0%}"]),
                    "ratio": _ratio(chain),
                    "change": _points(statistics.fmean(losses)) if losses else None,
                }
            )
    _draw_accuracy(lab.figure("accuracy"), by_network(runs))
    return {"rows": rows}


def _draw_accuracy(path, groups):
    lines = -(-len(groups) // 2)
    with plots.figure(path, 2, lines, height=3 * lines) as axes:
        for ax, group in zip(axes, groups.values(), strict=False):
            run = group[0]
            exact = accuracies(run)
            ax.plot(exact.keys(), [100 * each for each in exact.values()], "k-", label="original")
            for chain, color in zip(run["chains"].values(), ("#63b3ed", ORANGE), strict=False):
                text = f"at {chain['bound']:.1%} of std, {_ratio(chain):.1f}x"
                epochs = [int(epoch) for epoch in chain["accuracy"]]
                restored = [100 * value for value in chain["accuracy"].values()]
                ax.plot(epochs, restored, "o", ms=4, color=color, mfc="none", label=text)
            ax.set_title(_title(run), fontsize=10)
            ax.set_xlabel("epoch")
            ax.locator_params(axis="x", integer=True)
            ax.legend(fontsize=8)
        for ax in axes[len(groups) :]:
            ax.set_visible(False)
        for ax in axes[::2]:
            ax.set_ylabel("accuracy, %")


def resume(lab):
    rows = []
    for run in lab.rows():
        for row in run["resume"]["rows"]:
            shift, nudged = (_shift(row, name) for name in ("restored_loss", "nudged_loss"))
            rows.append(
                {
                    **row,
                    "name": _title(run),
                    "version": _version_ratio(run["resume"]),
                    "whole": _ratio(run["resume"]),
                    "shift": 100 * shift,
                    "nudged": nudged and f"{nudged:+.2%}",
                    "accuracies": [
                        100 * row[f"{which}_accuracy"] for which in ("exact", "restored")
                    ],
                }
            )
    return {"rows": rows} if rows else None


SECTIONS = (
    networks,
    similarity,
    table1,
    table2,
    bounds,
    literal,
    coders,
    transfer,
    table3,
    resume,
)
