"""The first screen of docs/evidence/README.md: what was found, in a sentence each."""

from . import (
    clusters_page,
    finetuning,
    finetuning_layers_page,
    finetuning_link,
    finetuning_page,
    imagenet_coarse,
    transfer_page,
)
from .imagenet_page import MAIN, gap, gathered, share
from .report import flow, interval, markdown

SHOWN = ("standard 1", "standard 2", "standard 5", "standard 6", "q95 4", "q95 6", "q95 8")


def summary(lab):
    """Markdown of what is there."""
    sections = (_imagenet, _coarse, _finetuned, _layers, _transfer, _clusters)
    parts = [part(lab) for part in sections]
    found = [part for part in parts if part]
    return flow("## In one screen\n\n" + "\n\n".join(found) + "\n") if found else ""


def _imagenet(lab):
    sizes = lab.load("imagenet-bytes")
    if sizes is None:
        return ""
    cases = gathered(lab.rows("imagenet"))
    networks = [name for name in ("lite0", "lite2") if (name, MAIN, False) in cases]
    if not networks:
        return ""
    in_bytes = sizes["results"]["bytes"]
    rows = []
    for name in (*SHOWN, "resized full", "source full"):
        times = in_bytes["source full"] / in_bytes[name]
        cells = []
        for network in networks:
            marks = cases[network, MAIN, False]
            cells.append(_accuracy(marks[name], marks["source full"]))
        rows.append([name, f"{in_bytes[name] / 1e3:.1f}", f"{times:.1f}x", *cells])
    names = [f"{network.title()}, top-1 % (minus source)" for network in networks]
    count = len(cases[networks[0], MAIN, False]["source full"])
    return (
        f"**[ImageNet networks that were never trained on scans](imagenet.md)**, 224 pixels, "
        f"{count} photographs; the intervals of the differences are 95 %.\n\n"
        + markdown(["", "kB", "fewer bytes", *names], rows)
    )


def _accuracy(marks, full):
    mean, low, high = (100 * each for each in gap(marks, full))
    return f"{100 * share(marks)[0]:.1f} ({mean:+.1f} [{low:+.1f}, {high:+.1f}])"


def _coarse(lab):
    report = lab.load(imagenet_coarse.NAME)
    sizes = lab.load("imagenet-bytes")
    if report is None or sizes is None:
        return ""
    found = []
    for name in imagenet_coarse.LABELS:
        best, times = imagenet_coarse.first(report["results"], sizes["results"]["bytes"], name)
        found.append(f"{name} `{best}` ({times:.1f}x fewer bytes)")
    return (
        "**[The same guesses by coarser names](imagenet.md#coarse-labels)**: the cheapest scan "
        f"within a point of the source is for {', for '.join(found)}."
    )


def _finetuned(lab):
    tasks = finetuning_page.gathered(finetuning.known(lab).values())
    if not tasks:
        return ""
    report = lab.load(finetuning_link.NAME)
    link = report["results"] if report else {}
    header = ["", "trained on", "fewer bytes", "accuracy %", "minus full fidelity's"]
    table = markdown(
        [*header, "shorter behind a link"],
        [
            _finetuned_row(task, kinds, kind, link)
            for task, kinds in tasks.items()
            for kind in dict.fromkeys((str(finetuning_page.cheapest_scan(kinds)), "tuner", "full"))
            if kind in kinds
        ],
    )
    return (
        "**[Lite0 fine-tuned](finetuning.md)** at 224 pixels, its last block and head, 3 "
        "seeds, tested at full fidelity; of each task the lowest scan within a point of full "
        "fidelity, else scan 5, the tuner of scans with what it costs, and full fidelity.\n\n"
        f"{table}\n\n{finetuning_page.switched(tasks)}"
    )


def _layers(lab):
    found = finetuning_layers_page.networks(lab.rows(finetuning_layers_page.ROWS))
    lines = [f"{name}: {finetuning_layers_page.seen(tasks)}" for name, tasks in found.items()]
    said = " ".join(lines)
    return f"**[Whole networks trained](finetuning.md)** on the largest set. {said}" if said else ""


def _finetuned_row(task, kinds, kind, link):
    epochs = link.get(task, {}).get("epochs", {})
    shorter = ""
    if kind in epochs:
        shorter = f"{epochs['full']['seconds'] / epochs[kind]['seconds']:.1f}x"
    found = finetuning_page.against_full(kinds, kind)
    change = "" if kind == "full" else finetuning_page.signed(found, len(kinds[kind]))
    accuracy = interval(finetuning_page.last(kinds[kind]))
    times = f"{finetuning_page.fewer(kinds, kind):.1f}x"
    return [task, finetuning_page.name(kind), times, accuracy, change, shorter]


def _transfer(lab):
    report = lab.load("transfer")
    if report is None:
        return ""
    found = []
    for task, row in report["results"].items():
        kept = transfer_page.cheapest(row)
        if kept is None:
            found.append(f"{task}: no scan within a point")
        else:
            found.append(f"{task}: scan {kept[0]}, {kept[1]:.1f}x fewer bytes")
    return (
        "**[The same network on other tasks](transfer.md)**, its last layer trained anew: the "
        f"lowest scan within a point of full fidelity's accuracy is {'; '.join(found)}. "
        f"{transfer_page.adapted(report['results'])}"
    )


def _clusters(lab):
    report = lab.load("clusters-validation")
    if report is None:
        return ""
    ratios = [clusters_page.ratio(row) for row in clusters_page.medians(report["results"]["rows"])]
    near = sum(abs(ratio - 1) <= clusters_page.NEAR for ratio in ratios)
    return (
        f"**[Clusters by simulation](clusters.md)**: {near} of {len(ratios)} real set-ups within "
        f"5 % of the measured images a second (medians of three runs), from {min(ratios):.2f} to "
        f"{max(ratios):.2f} times."
    )
