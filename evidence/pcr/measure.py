"""Everything that the page shows, part by part; training runs are shared by most parts."""

from ..lab import SCANS
from . import costs, figures, wait
from .runs import Spec, perform, replays, runs, tuning_images


def _gradients(lab):
    """Cosines of all scans while models train at full fidelity, as in the paper on HAM10000."""
    tasks = {task.name: _cosines(lab, task) for task in lab.tasks}
    return {"images": tuning_images(lab), "tasks": tasks}


def _cosines(lab, task):
    index = lab.index(task.name, "train")
    scans = list(range(1, index.num_groups + 1))
    every = max(1, (task.epochs - 1) // 4)
    how = [f"+policy.candidates={scans}", "policy.first=0", f"policy.every={every}"]
    # No cosine reaches this threshold: the tuner measures, and stays at full fidelity.
    row = perform(lab, Spec(task.name, "tuner", 0, task.epochs), *how, "policy.threshold=2")
    return {
        "epochs": [[epoch, cosines] for epoch, _, cosines, *_ in row["reports"]],
        "savings": [index.prefix_bytes("full") / index.prefix_bytes(scan) for scan in scans],
    }


def _static(lab):
    """Runs at each scan, of all tasks and seeds."""
    runs(
        lab,
        [
            Spec(task.name, scan, seed, task.epochs)
            for task in lab.tasks
            for scan in SCANS
            for seed in lab.seeds
        ],
    )


def _scripts(lab):
    """Prefixes of each script, from the smallest up, to the first whose mean final accuracy is
    within a point of full's.
    """
    _static(lab)
    for task in lab.tasks:
        for script in ("standard", "q95"):
            for scan in range(1, lab.index(task.name, "train", script).num_groups + 1):
                specs = [Spec(task.name, scan, s, task.epochs, script=script) for s in lab.seeds]
                runs(lab, specs)
                group = figures.select(lab, task.name, scan, task.epochs, script=script)
                full = figures.select(lab, task.name, "full", task.epochs)
                if figures.loses_nothing(group, full):
                    break


def _autotune(lab):
    """Runs at a limited bandwidth, of two tasks: replayed for every seed, real ones as a check; and
    what the tuner picks on more seeds.
    """
    limit = figures.limit_of(lab)
    for task in (lab.task(1), lab.task(2)):
        kinds = ("full", 5, 2, 1, "tuner")
        made = runs(lab, [Spec(task.name, k, s, task.epochs) for k in kinds for s in lab.seeds])
        replays(lab, made, limit)
        more = () if lab.quick else (3, 4)
        runs(lab, [Spec(task.name, "tuner", seed, 2) for seed in more])
        tuned, picked = figures.picks(lab, task)
        seeds = lab.seeds if lab.quick else range(10)
        runs(lab, [Spec(task.name, k, s, task.epochs) for k in picked for s in seeds])
        if task == lab.task(1):
            both = ("full", tuned)
            runs(
                lab,
                [
                    Spec(task.name, k, s, task.epochs, bandwidth=limit)
                    for k in both
                    for s in lab.seeds
                ],
            )


KEPT = ("bandwidth",)  # measured once
MEASURED = {
    "bytes": costs.bytes_per_image,
    "sizes": costs.sizes,
    "decode": costs.decode_rates,
    "gradients": _gradients,
    "msssim": costs.msssim,
    "msssim-q95": costs.msssim_q95,
    "wait": wait.wait,
}
TRAINED = {
    "time": _static,
    "epochs": _static,
    "sweep": _static,
    "scripts": _scripts,
    "autotune": _autotune,
}


def measure(lab, parts=()):
    """What is missing of some parts, or of all."""
    lab.measured("bytes", lambda: costs.bytes_per_image(lab))
    for part in parts or (*MEASURED, *TRAINED):
        if part in TRAINED:
            TRAINED[part](lab)
        else:
            lab.measured(part, lambda part=part: MEASURED[part](lab))
