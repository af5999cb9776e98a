"""Accuracy for bytes: the standard scan script against q95, prefix by prefix until training loses
nothing.
"""

import statistics

import numpy as np

from .accuracy import bytes_at, final, paired
from .report import Experiment, figure, finish, interval, markdown, verdict
from .training import Spec, runs

SCRIPTS = {"standard": "#2b6cb0", "q95": "#dd6b20"}
TOLERANCE = (
    0.01  # of accuracy, below full fidelity's; the bound that ScanTuner's picks are held to, too
)


def measure_scripts(lab):
    """Prefixes of each script, from the smallest up, to the first whose mean final accuracy is
    within TOLERANCE of full's.
    """
    return {task.name: found for task in lab.tasks if (found := _compare(lab, task))}


def _compare(lab, task):
    full = _row(lab, task, "full", "standard")
    if full is None:
        return None
    found = {"full": full}
    for script in SCRIPTS:
        found[script] = {}
        for scan in range(1, lab.index(task.name, "train", script).num_groups + 1):
            row = _row(lab, task, scan, script)
            if row is None:
                break
            found[script][str(scan)] = row
            if paired(row, full)[0] >= -TOLERANCE:
                break
    return found


def _row(lab, task, scan, script):
    made = runs(
        lab, [Spec(task.name, scan, seed, task.epochs, script=script) for seed in lab.seeds]
    )
    if not made:
        return None
    curves = [[row["accuracy"] for row in run["rows"]] for run in made]
    seeds = [run["spec"]["seed"] for run in made]
    return {"seeds": seeds, "curves": curves, "bytes": bytes_at(lab, task.name, scan, script)}


def _cheapest(row, script):
    """The last prefix that was tried, if it is the one that loses nothing."""
    if not row[script]:
        return None
    scan, found = list(row[script].items())[-1]
    return (scan, found) if paired(found, row["full"])[0] >= -TOLERANCE else None


def draw_scripts(results, path):
    fig, axes = figure(len(results), height=4.2)
    for ax, (task, row) in zip(axes[0], results.items(), strict=True):
        mean, low, high = 100 * np.array(_spread(row["full"]))
        ax.axhspan(low, high, color="#2f855a", alpha=0.12, lw=0)
        ax.axhline(mean, color="#2f855a", lw=1, label="full fidelity")
        for (script, shade), shift in zip(SCRIPTS.items(), ((4, -12), (-9, 6)), strict=True):
            points = [(found["bytes"] / 1e3, *_spread(found)) for found in row[script].values()]
            x, mean, low, high = np.array(points).T
            ax.errorbar(
                x,
                100 * mean,
                100 * np.array([mean - low, high - mean]),
                fmt="o-",
                color=shade,
                capsize=3,
                label=script,
            )
            for scan, at, value in zip(row[script], x, mean, strict=True):
                ax.annotate(
                    scan,
                    (at, 100 * value),
                    xytext=shift,
                    textcoords="offset points",
                    fontsize=9,
                    color=shade,
                )
        ax.set_title(task)
        ax.set_xlabel("kB per image")
        ax.set_xlim(
            0,
            1.15
            * max(found["bytes"] / 1e3 for script in SCRIPTS for found in row[script].values()),
        )
    axes[0][0].set_ylabel("final accuracy (%), min to max of seeds")
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    finish(fig, path)


def _spread(row):
    values = final(row)
    return statistics.fmean(values), min(values), max(values)


def targets(results):
    """(what, value, met): q95's cheapest prefix that loses nothing against standard's."""
    found = []
    for task, row in results.items():
        ends = [_cheapest(row, script) for script in SCRIPTS]
        if None in ends:
            found.append([f"{task}: q95's cheapest prefix at full's accuracy", "not found", False])
            continue
        (a, standard), (b, q95) = ends
        what = (
            f"{task}: bytes of q95's cheapest prefix within a point of full's accuracy (scan {b}) "
            f"over standard's (scan {a}), {len(q95['seeds'])} seeds (target: below 1)"
        )
        found.append(
            [what, f"{q95['bytes'] / standard['bytes']:.2f}", q95["bytes"] < standard["bytes"]]
        )
    return found


def text_scripts(results):
    rows = []
    for task, row in results.items():
        rows.append(
            [
                task,
                "",
                "full",
                f"{row['full']['bytes'] / 1e3:.2f} kB",
                interval(final(row["full"])),
                "",
            ]
        )
        for script in SCRIPTS:
            for scan, found in row[script].items():
                gap = verdict(paired(found, row["full"]))
                rows.append(
                    [
                        task,
                        script,
                        f"scan {scan}",
                        f"{found['bytes'] / 1e3:.2f} kB",
                        interval(final(found)),
                        gap,
                    ]
                )
    return (
        "The paper has one script, libjpeg's. Ours: prefixes of `standard` and of `q95` "
        "(docs/scripts.md), trained on from the smallest up to the first whose mean final accuracy "
        f"is within {100 * TOLERANCE:g} point of full fidelity's; `small_cnn`, validation at full "
        "fidelity. The rule was fixed before the runs. With few seeds a prefix may pass or fail "
        "by chance: the intervals say how much.\n\n"
        + markdown(
            [
                "task",
                "script",
                "prefix",
                "bytes per image",
                "final accuracy (%)",
                "minus full, 95 % interval",
            ],
            rows,
        )
    )


EXPERIMENTS = [
    Experiment(
        "scripts",
        "Accuracy for bytes, by scan script",
        measure_scripts,
        draw_scripts,
        text_scripts,
        targets=targets,
    ),
]
