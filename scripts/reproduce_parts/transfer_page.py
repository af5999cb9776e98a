"""Figure and text of docs/evidence/transfer.md."""

from .imagenet_page import gap, share
from .report import COMMAND, colour, figure, finish, flow, markdown

FULL = "full"
# A classifier on statistics of its task's own pictures.
ADAPTED = f"{FULL} adapted > {FULL} adapted"
MOST_LOSS = 0.01
LEAST_GAIN = 2.5


def _scans(row):
    return list(row["bytes"])


def _kind(scan):
    return int(scan) if scan.isdigit() else scan


def draw(results, path):
    """Accuracy at full fidelity against the bytes that were trained on."""
    fig, axes = figure(len(results), height=4.5)
    for ax, (task, row) in zip(axes[0], results.items(), strict=True):
        for scan in _scans(row):
            for trained, marker in ((f"{scan} > {FULL}", "o"), (f"{scan} > {scan}", "x")):
                mean, low, high = (100 * each for each in share(row["marks"][trained]))
                error = [[mean - low], [high - mean]]
                x = row["bytes"][scan] / 1e3
                ax.errorbar(x, mean, error, fmt=marker, capsize=3, color=colour(_kind(scan)))
        ax.set_title(f"{task}, {row['images']} pictures")
        ax.set_xlabel("kB a picture")
        ax.set_xlim(0)
    axes[0][0].set_ylabel("accuracy (%), 95 % interval")
    marks = "o: tested at full fidelity, x: at the scan that was trained on"
    fig.supxlabel(marks, fontsize="medium")
    finish(fig, path)


def _difference(row, first, second):
    mean, low, high = (100 * each for each in gap(row["marks"][first], row["marks"][second]))
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def _percent(row, name):
    return f"{100 * share(row['marks'][name])[0]:.1f}" if name in row["marks"] else ""


def _tasks_table(results):
    rows = []
    best = f"{FULL} > {FULL}"
    for task, row in results.items():
        for scan in _scans(row):
            name = f"{scan} > {FULL}"
            times = row["bytes"][FULL] / row["bytes"][scan]
            cells = [_percent(row, name), _difference(row, name, best) if scan != FULL else ""]
            own = _percent(row, f"{scan} > {scan}")
            rows.append(
                [task, scan, f"{times:.1f}x", *cells, own, _percent(row, f"mixed > {scan}")]
            )
    header = ["task", "trained on", "fewer bytes", "tested at full (%)", "minus full's"]
    return markdown([*header, "tested at its scan (%)", "mixed, tested there (%)"], rows)


def _remedies_table(results):
    rows = []
    for task, row in results.items():
        best = f"{FULL} > {FULL}"
        for scan in _scans(row):
            smoothed = f"{scan} smoothed"
            adapted = f"{scan} adapted"
            if scan == FULL or f"{FULL} > {smoothed}" not in row["marks"]:
                continue
            names = [f"{FULL} > {scan}", f"{FULL} > {smoothed}", f"{FULL} adapted > {adapted}"]
            names += [f"{scan} > {scan}", f"{adapted} > {adapted}", f"mixed > {scan}"]
            rows.append([task, scan, _percent(row, best), *(_percent(row, name) for name in names)])
    header = ["task", "tested at scan", "at full", "as it is", "smoothed", "statistics adapted"]
    return markdown([*header, "trained there", "both", "trained on all scans"], rows)


def adapted(results):
    """What statistics of a scan are worth to a classifier trained at full fidelity."""
    found = []
    for task, row in results.items():
        for scan in _scans(row):
            name = f"{FULL} adapted > {scan} adapted"
            if name in row["marks"]:
                gained = _difference(row, name, f"{FULL} > {scan}")
                what = "of its own pictures" if scan == FULL else f"of scan {scan}, shown that"
                found.append(f"{task}, statistics {what}: {gained}")
    if not found:
        return ""
    return (
        "Statistics of batch normalisation adapted, of the pictures that [a linear classifier]"
        "(transfer.md) was trained on at full fidelity and then of those that it is shown; points "
        f"gained over ImageNet's: {'; '.join(found)}."
    )


def cheapest(row):
    """(scan, times fewer bytes) of the lowest scan that loses little; ``None`` below full."""
    best = row["marks"][f"{FULL} > {FULL}"]
    for scan in _scans(row):
        if scan != FULL and gap(row["marks"][f"{scan} > {FULL}"], best)[0] >= -MOST_LOSS:
            return scan, row["bytes"][FULL] / row["bytes"][scan]
    return None


def _met(results):
    """Tasks with a scan whose loss is small, for so many times fewer bytes."""
    found = {task: cheapest(row) for task, row in results.items()}
    return [
        f"{task} (scan {kept[0]}, {kept[1]:.1f}x)"
        for task, kept in found.items()
        if kept and kept[1] >= LEAST_GAIN
    ]


def text(results):
    """The page."""
    met = ", ".join(_met(results)) or "none"
    return flow(f"""# A pretrained network on other tasks, scan by scan

EfficientNet-Lite0 with the weights of ImageNet at 224 pixels, its last layer trained anew on each
task, the rest left as it is (a *linear probe*, not fine-tuning: no augmentation, no seeds, because
the best classifier of given features is one). Trained on pictures of one scan, or of all of them,
and tested at full fidelity or at a scan. Intervals are 95 %, over the validation pictures.
Written by `{COMMAND} transfer`.

{_tasks_table(results)}

![Accuracy against bytes](transfer.png)

At most a point below full fidelity's accuracy, for at least {LEAST_GAIN}x fewer bytes: {met}.

## Train at full, test low, and what mends it

A classifier that was trained at full fidelity and gets pictures of a scan, and remedies: libjpeg's
smoothing, statistics of batch normalisation from training pictures of that scan (the classifier
having been trained on those of full fidelity), training there, or on all scans together. Accuracy
in per cent.

{_remedies_table(results)}

{adapted(results)}

What was not done here: fine-tuning the layers below, several seeds and seconds behind a real link,
which are [another page's](finetuning.md).
""")
