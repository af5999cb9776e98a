"""Sections of docs/evidence/finetuning.md on networks trained in all their layers."""

import statistics

from . import finetuning_page
from .finetuning_page import FULL
from .report import COMMAND, markdown

NAME = "layers"
ROWS = f"finetuning-{NAME}"
LITE0 = "EfficientNet-Lite0, all layers"
RESNET = "ResNet-18 from scratch"
TESTED = ("1", "2", "5", FULL)


def networks(rows):
    """{network: {task: {kind: rows by seed}}} of what has runs at full fidelity."""
    found = {}
    for network in (LITE0, RESNET):
        tasks = finetuning_page.gathered(row for row in rows if row["network"] == network)
        if tasks:
            found[network] = tasks
    return found


def draw(found, path):
    """Accuracy against the bytes read so far, a panel for each network and task."""
    panels = {
        f"{network}\n{task}": kinds
        for network, tasks in found.items()
        for task, kinds in tasks.items()
    }
    finetuning_page.draw(panels, path)


def _percents(values, form=".1f"):
    return ", ".join(f"{100 * value:{form}}" for value in values)


def differences(kinds, kind):
    """Final accuracy minus full fidelity's, seed by seed."""
    base = {run["seed"]: run["accuracy"][FULL] for run in kinds[FULL]}
    return [run["accuracy"][FULL] - base[run["seed"]] for run in kinds[kind] if run["seed"] in base]


def _table(tasks):
    rows = []
    for task, kinds in tasks.items():
        for kind, runs in kinds.items():
            sent = f"{finetuning_page.read(runs) / 1e6:.1f}"
            fewer = f"{finetuning_page.fewer(kinds, kind):.1f}x"
            accuracy = _percents(finetuning_page.last(runs))
            change = "" if kind == FULL else _percents(differences(kinds, kind), "+.1f")
            means = [statistics.fmean(finetuning_page.last(runs, tested)) for tested in TESTED]
            cells = [sent, fewer, accuracy, change, *(_percents([mean]) for mean in means)]
            rows.append([task, finetuning_page.name(kind), *cells])
    tested = [f"mean, tested at {scan}" for scan in TESTED]
    header = ["task", "trained on", "MB read", "fewer bytes", "accuracy (%) by seed"]
    return markdown([*header, "minus full fidelity's, by seed", *tested], rows)


def seen(tasks):
    """What the table says."""
    said = [
        _gain(task, kinds, kind) for task, kinds in tasks.items() for kind in kinds if kind != FULL
    ]
    return f"On average {'; '.join(said)}." if said else "Only full fidelity was run yet."


def _gain(task, kinds, kind):
    found = differences(kinds, kind)
    loss = 100 * statistics.fmean(found)
    times = finetuning_page.fewer(kinds, kind)
    kept = "within a point" if loss >= -1 else "more than a point"
    seeds = f"{len(found)} seeds" if len(found) > 1 else "one seed"
    name = finetuning_page.name(kind)
    return (
        f"{name} ends {loss:+.1f} points from full fidelity ({kept}; {task}, {seeds}) for "
        f"{times:.1f}x fewer bytes"
    )


def _cost(tasks):
    """CPU seconds and images a second of the runs, from the rows."""
    runs = [run for kinds in tasks.values() for each in kinds.values() for run in each]
    seconds = statistics.fmean(run["cpu_seconds"] for run in runs)
    speed = statistics.median(run["images"] / run["training_cpu_seconds"] for run in runs)
    lengths = sorted({len(run["epochs"]) for run in runs})
    return (
        f"{' or '.join(map(str, lengths))} epochs, {seconds:.0f} CPU seconds a run with its "
        f"tests, {speed:.0f} images a CPU second in training, reading and decoding included."
    )


HOW = {
    LITE0: (
        "## All layers\n\nLite0 with the weights of ImageNet at 224 pixels, every weight trained "
        "by AdamW (the new last layer at 1e-3, all others at 2e-4, rising for a tenth of the "
        "steps, then to nothing by a cosine), batch 32, statistics of batch normalisation as "
        "they were."
    ),
    RESNET: (
        "## ResNet-18 from scratch\n\nNo weights of ImageNet: ResNet-18 of `scripts/models.py` at "
        "112 pixels on the largest of the three sets, AdamW at 1e-3, rising for a tenth of the "
        "steps, then to nothing by a cosine, batch 32, batch normalisation as usual."
    ),
}


def sections(found):
    """Both sections, or what there is of them; nothing without runs."""
    parts = [
        f"{HOW[network]} Pictures are read, decoded and cropped anew in each epoch by "
        f"`PCRLoader(..., threads=1)`; seeds are paired. {_cost(tasks)} Two seeds make no "
        "interval worth printing (Student's t with one degree of freedom is 12.7), so each seed "
        f"stands for itself.\n\n{_table(tasks)}\n\n{seen(tasks)}\n"
        for network, tasks in found.items()
    ]
    if not parts:
        return ""
    source = f"![Accuracy against bytes]({ROWS}.png)\n\nBoth by `{COMMAND} {NAME}`; "
    rows = f"{ROWS}-rows.jsonl"
    return "\n".join(parts) + f"\n{source}rows are in [{rows}]({rows}).\n"


def missing(found):
    """What of this there is no run of."""
    return [name for name in (LITE0, RESNET) if name not in found]
