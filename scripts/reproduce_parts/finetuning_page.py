"""Figures and text of docs/evidence/finetuning.md."""

import statistics
from collections import defaultdict

import numpy as np

from .accuracy import band
from .report import COMMAND, colour, difference, figure, finish, interval, markdown

FULL = "full"
TUNER = "tuner"
MIXED = "mixed"
MOSTLY = "mostly 2"
ORDER = ("1", "2", MOSTLY, "5", MIXED, TUNER, FULL)
TESTED = ("1", "1 smoothed", "2", "2 smoothed", "5", FULL)
# The bars: points lost, times fewer bytes, times shorter.
MOST_LOSS = 0.01
LEAST_GAIN = 2.5
LEAST_TIMES = 2.0
COLOURS = {TUNER: "#1a202c", MIXED: "#805ad5", MOSTLY: "#c05621"}


def gathered(rows):
    """{task: {kind: rows by seed}}, kinds in their order."""
    found = defaultdict(lambda: defaultdict(list))
    for row in sorted(rows, key=lambda row: row["seed"]):
        found[row["task"]][str(row["kind"])].append(row)
    return {
        task: {kind: kinds[kind] for kind in ORDER if kind in kinds}
        for task, kinds in sorted(found.items())
        if FULL in kinds
    }


def last(runs, tested=FULL):
    """Final accuracies by seed."""
    return [run["accuracy"][tested] for run in runs]


def read(runs):
    """Mean bytes of a run, tunings included."""
    return statistics.fmean(sum(epoch["bytes"] for epoch in run["epochs"]) for run in runs)


def against_full(kinds, kind, tested=FULL):
    """(mean, low, high) of final accuracy minus full fidelity's, of paired seeds."""
    base = {run["seed"]: run for run in kinds[FULL]}
    pairs = [(run, base[run["seed"]]) for run in kinds[kind] if run["seed"] in base]
    return difference(
        [run["accuracy"][tested] for run, _ in pairs],
        [other["accuracy"][FULL] for _, other in pairs],
    )


def fewer(kinds, kind):
    """Times fewer bytes than at full fidelity."""
    return read(kinds[FULL]) / read(kinds[kind])


def cheapest(kinds):
    """The kind of fewest bytes that loses at most a point on average, or ``None``."""
    kept = [kind for kind in kinds if kind != FULL and against_full(kinds, kind)[0] >= -MOST_LOSS]
    return max(kept, key=lambda kind: fewer(kinds, kind), default=None)


def cheapest_scan(kinds):
    """The lowest scan that loses at most a point on average; 5 if none does."""
    scans = [kind for kind in kinds if kind.isdigit()]
    kept = [int(scan) for scan in scans if against_full(kinds, scan)[0] >= -MOST_LOSS]
    return min(kept, default=5)


def _shade(kind):
    return COLOURS.get(kind) or colour(int(kind) if kind.isdigit() else kind)


def name(kind):
    """As it stands in tables."""
    names = {FULL: "full fidelity", TUNER: "ScanTuner", MIXED: MIXED, MOSTLY: MOSTLY}
    return names.get(kind, f"scan {kind}")


def draw(tasks, path):
    """Accuracy against the bytes read so far, epoch by epoch."""
    fig, axes = figure(len(tasks), height=4.5)
    for ax, (task, kinds) in zip(axes[0], tasks.items(), strict=True):
        for kind, runs in kinds.items():
            curves = [[epoch["accuracy"] for epoch in run["epochs"]] for run in runs]
            mean, low, high = 100 * band(curves)
            steps = [[epoch["bytes"] for epoch in run["epochs"]] for run in runs]
            x = np.cumsum(np.mean(steps, axis=0)) / 1e6
            style = "s--" if kind in COLOURS else "o-"
            ax.plot(x, mean, style, ms=3.5, lw=1.5, color=_shade(kind), label=name(kind))
            if kind in (FULL, "2") and len(runs) > 2:
                ax.fill_between(x, low, high.clip(None, 100), color=_shade(kind), alpha=0.15, lw=0)
        ax.set_title(task)
        ax.set_xscale("log", subs=range(2, 10))
        ax.xaxis.get_major_locator().set_params(subs=(1, 3))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter("")
        ax.set_xlabel("MB read")
    axes[0][0].set_ylabel("accuracy at full fidelity (%)")
    shown = {line.get_label(): line for ax in axes[0] for line in ax.lines}
    fig.legend(shown.values(), shown.keys(), loc="outside upper center", ncols=6)
    finish(fig, path)


def draw_tunings(tasks, path):
    """The cosine of each candidate at each tuning, and what was chosen."""
    tuned = {task: kinds[TUNER] for task, kinds in tasks.items() if TUNER in kinds}
    fig, axes = figure(len(tuned), height=4, sharey=True)
    for ax, (task, runs) in zip(axes[0], tuned.items(), strict=True):
        cosines = _cosines(runs)
        for scan, by_epoch in cosines.items():
            epochs = sorted(by_epoch)
            mean = [statistics.fmean(by_epoch[epoch]) for epoch in epochs]
            ax.plot(epochs, mean, "o-", ms=4, color=_shade(scan), label=f"scan {scan}")
            for epoch in epochs:
                values = by_epoch[epoch]
                ax.plot([epoch] * len(values), values, ".", ms=4, color=_shade(scan), alpha=0.5)
        ax.axhline(0.9, color="#4a5568", ls="--", lw=1)
        ax.set_title(task)
        ax.set_xlabel("epochs trained")
        ax.set_xticks(epochs)
    axes[0][0].set_ylabel("cosine with full fidelity's gradient")
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    finish(fig, path)


def _cosines(runs):
    """{scan: {epoch: means by seed}}"""
    found = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for tuning in run["tunings"]:
            for scan, mean, *_ in tuning["cosines"]:
                found[str(scan)][tuning["epoch"]].append(mean)
    return found


def signed(three, seeds):
    """A difference in points, with its interval where there are seeds."""
    mean, low, high = (100 * each for each in three)
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]" if seeds > 1 else f"{mean:+.1f} (one seed)"


def _main_table(tasks):
    rows = []
    for task, kinds in tasks.items():
        for kind, runs in kinds.items():
            cells = [f"{read(runs) / 1e6:.1f}", f"{fewer(kinds, kind):.1f}x", interval(last(runs))]
            change = "" if kind == FULL else signed(against_full(kinds, kind), len(runs))
            rows.append([task, name(kind), len(runs), *cells, change])
    header = ["task", "trained on", "seeds", "MB read", "fewer bytes", "accuracy (%)"]
    return markdown([*header, "minus full fidelity's"], rows)


def _cross_table(tasks):
    rows = []
    for task, kinds in tasks.items():
        for kind, runs in kinds.items():
            if kind != TUNER:
                cells = [f"{100 * statistics.fmean(last(runs, tested)):.1f}" for tested in TESTED]
                rows.append([task, name(kind), *cells])
    return markdown(["task", "trained on", *TESTED], rows)


def _tunings_table(tasks):
    rows = []
    for task, kinds in tasks.items():
        for run in kinds.get(TUNER, []):
            for tuning in run["tunings"]:
                cosines = ", ".join(f"{scan}: {mean:.2f}" for scan, mean, *_ in tuning["cosines"])
                cost = f"{tuning['bytes'] / 1e6:.1f} MB, {tuning['seconds']:.0f} s"
                rows.append([task, run["seed"], tuning["epoch"], cosines, tuning["scan"], cost])
    return markdown(["task", "seed", "before epoch", "cosines", "chosen", "cost"], rows)


def _link_table(link):
    rows = []
    for task, row in link.items():
        full = row["epochs"][FULL]
        for scan, epoch in row["epochs"].items():
            speed = epoch["images"] / epoch["seconds"]
            cells = [f"{epoch['bytes'] / 1e6:.2f}", f"{epoch['seconds']:.1f}", f"{speed:.1f}"]
            busy = f"{100 * epoch['cpu_seconds'] / epoch['seconds']:.0f} %"
            times = f"{full['seconds'] / epoch['seconds']:.2f}x"
            rows.append([task, name(scan), *cells, busy, times])
    header = ["task", "read at", "MB sent", "seconds", "images/s", "processor busy", "shorter"]
    return markdown(header, rows)


def met(tasks):
    """(task, kind, times fewer bytes) where the bar of accuracy and bytes is met."""
    found = []
    for task, kinds in tasks.items():
        best = cheapest(kinds)
        if best is not None and fewer(kinds, best) >= LEAST_GAIN:
            found.append((task, best, fewer(kinds, best)))
    return found


def _bar(tasks):
    shown = met(tasks)
    said = ", ".join(f"{task} ({name(kind)}, {times:.1f}x)" for task, kind, times in shown)
    proved = [task for task, kind, _ in shown if against_full(tasks[task], kind)[1] >= -MOST_LOSS]
    sure = ", ".join(proved) or "none"
    return (
        f"The bar, at most a point below full fidelity's mean accuracy for at least {LEAST_GAIN}x "
        f"fewer bytes on two of three sets, is {'met' if len(shown) >= 2 else 'missed'}: "
        f"{said or 'none'}. By the whole interval (its lower end at most a point below): {sure}."
    )


def _recovered(tasks):
    """What smoothing and training there are worth to who is shown a scan."""
    lines = []
    for task, kinds in tasks.items():
        for scan in ("1", "2"):
            base = statistics.fmean(last(kinds[FULL], scan))
            ways = {
                "smoothing": statistics.fmean(last(kinds[FULL], f"{scan} smoothed")),
            }
            if scan in kinds:
                ways["training there"] = statistics.fmean(last(kinds[scan], scan))
            if MOSTLY in kinds and scan == "2":
                ways["training on mostly 2"] = statistics.fmean(last(kinds[MOSTLY], scan))
            if MIXED in kinds:
                ways["training on all"] = statistics.fmean(last(kinds[MIXED], scan))
            gains = ", ".join(f"{way} {100 * (after - base):+.1f}" for way, after in ways.items())
            lost = 100 * (base - statistics.fmean(last(kinds[FULL])))
            lines.append(f"{task}, shown scan {scan} ({lost:+.1f} points): {gains}")
    return "; ".join(lines)


def _metadata_text(metadata):
    """What of the gain is metadata, which are read at full fidelity only."""
    found = [f"{task} {times:.2f}x" for task, times in metadata.items() if times > 1.1]
    if not found:
        return ""
    return (
        f"Of these factors, {', '.join(found)} are metadata, which no scan has and which are read "
        "at full fidelity only."
    )


def text(tasks, link, metadata, adapted, layers, missing):
    """The page, with a sentence on adapted statistics, sections on all layers and names of what
    those lack; ``metadata`` has the bytes at full fidelity over those of the last scan.
    """
    behind = ""
    if link:
        rate = next(iter(link.values()))["link"] / 1e6
        behind = f"""## Seconds behind a real link

One epoch of each, every picture read over HTTP from nginx through a link that `tc` shapes to
{rate:g} MB/s, decoded, put through the whole network and its tail trained; nothing is computed or
replayed. The link is slow because the accelerator is: one processor core takes some 55 of these
pictures a second, and one that takes 3,000 is in the same place behind 11 MB/s. Other work ran
beside most of them, so that what the processor limits (scan 2) is somewhat slower than it could be.

{_link_table(link)}
"""
    return f"""# Fine-tuning at 224 pixels, scan by scan

EfficientNet-Lite0 with the weights of ImageNet. The last block, the convolution behind it and a
new last layer are trained (a million of 3.4 million weights) by AdamW at a rate that falls to
nothing by a cosine, batch 32, statistics of batch normalisation as they were; the blocks before
stay, so their output was computed once, for two augmented pictures (random crops, mirror images)
of each training picture at each scan, read and decoded by `PCRDataset.views`. *Flowers* 4 epochs,
*signs* 6, *ham224* 8. *Mixed* draws one of the four scans for every picture, *mostly 2* full
fidelity for one picture of five and scan 2 for the others; *ScanTuner* is the tuner of the
package on the same dataset, with crops of its own. Tested at full fidelity unless said otherwise.
Intervals are 95 % by Student's t, over seeds that are paired: the same pictures in the same order,
the same crops. Written by `{COMMAND} finetuning`; rows are in
[finetuning-rows.jsonl](finetuning-rows.jsonl).

{_main_table(tasks)}

![Accuracy against bytes](finetuning.png)

{_bar(tasks)} {_metadata_text(metadata)}

{behind}
## Train low, test full, and the reverse

Mean accuracy (%) by what was trained on, down, and what is tested on, across.

{_cross_table(tasks)}

What a remedy is worth, in points, to a network that was trained at full fidelity and is shown a
scan: {_recovered(tasks)}. {adapted}

{_tunings_text(tasks)}
{layers}
What was not done: {"".join(f"{name}, " for name in missing)}more than two crops of a picture for
the last block, more than three seeds{_missing(tasks)}.
"""


def _tunings_text(tasks):
    if not any(TUNER in kinds for kinds in tasks.values()):
        return ""
    return f"""## Tuning again and again

ScanTuner with threshold 0.9, before epoch 1 and every second epoch after, while the rate falls
(the paper's Fig. 14); 3 trials of 64 pictures, one shard each. Every scan is a candidate that was
prepared: 1, 2 and 5. Bytes of the tunings are in the table at the top; seconds are beside other
work.

![Cosines by epoch](finetuning-tunings.png)

{_switches(tasks)}

{_tunings_table(tasks)}
"""


def _missing(tasks):
    """Kinds that have no runs, or one only; nothing if there are none."""
    few = {
        task: [name(kind) for kind in ORDER if len(kinds.get(kind, [])) < 2]
        for task, kinds in tasks.items()
    }
    found = [f"{task} {', '.join(names)}" for task, names in few.items() if names]
    return f"; of these there is no run or one only: {'; '.join(found)}" if found else ""


def _paths(kinds):
    """What the tuner chose, tuning by tuning, of each seed."""
    return [[tuning["scan"] for tuning in run["tunings"]] for run in kinds.get(TUNER, [])]


def _switches(tasks):
    lines = []
    fallen = []
    for task, kinds in tasks.items():
        ways = "; ".join(" then ".join(map(str, path)) for path in _paths(kinds))
        if ways:
            lines.append(f"{task}: {ways}")
            best = list(_cosines(kinds[TUNER]).values())[-1]
            means = [statistics.fmean(best[epoch]) for epoch in (min(best), max(best))]
            fallen.append(f"{task} {means[0]:.2f} to {means[1]:.2f}")
    return (
        f"Chosen, seed by seed: {'. '.join(lines)}. {switched(tasks)} Mean cosines of the highest "
        f"candidate, from the first tuning to the last: {', '.join(fallen)}."
    )


def switched(tasks):
    """Whether the switch upwards late in training showed."""
    paths = [path for kinds in tasks.values() for path in _paths(kinds)]
    if not paths:
        return ""
    up = sum(_number(path[-1]) > _number(path[0]) for path in paths)
    down = sum(_number(path[-1]) < _number(path[0]) for path in paths)
    left = sum(any(scan != FULL for scan in path) for path in paths)
    return (
        f"Of {len(paths)} runs of the tuner {left} left full fidelity at all, {up} ended at a "
        f"higher scan than they began with and {down} at a lower one. The paper switches upwards "
        "late in training, because gradients of low scans part from full fidelity's as a network "
        f"converges: {f'seen in {up}' if up else 'not seen here'}."
    )


def _number(scan):
    return 99 if scan == FULL else int(scan)
