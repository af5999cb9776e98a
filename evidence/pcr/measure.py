"""Everything that the page shows, part by part; training runs are shared by most parts."""

from pcrshard.fidelity.tuner import ScanTuner

from ..lab import SCANS
from . import costs, figures, rates
from .runs import Spec, perform, replays, runs

LIMIT = 1.0  # MB/s of the limited runs


def _gradients(lab):
    """Cosines of all scans while models train at full fidelity, as in the paper on HAM10000."""
    images = 32 if lab.quick else 128
    tasks = {task.name: _watch_gradients(lab, task, images) for task in lab.tasks}
    return {"images": images, "tasks": tasks}


def _watch_gradients(lab, task, images):
    index = lab.index(task.name, "train")
    scans = list(range(1, index.num_groups + 1))
    wanted, found = {round(i * (task.epochs - 1) / 4) for i in range(5)}, []

    def watch(run, epoch):
        if epoch in wanted:
            tuner = ScanTuner(
                run.loader, run.loss, run.level, candidates=scans, images=images, trials=3
            )
            rows = [list(row) for row in tuner.measure(run.model, epoch)]
            found.append([epoch, rows])
            print(task.name, "epoch", epoch, [f"{row[1]:.2f}" for row in rows], flush=True)

    perform(lab, Spec(task.name, "full", 0, task.epochs), watch)
    savings = [index.prefix_bytes("full") / index.prefix_bytes(scan) for scan in scans]
    return {"epochs": found, "savings": savings}


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
    limit = 20.0 if lab.quick else LIMIT
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


MEASURED = {
    "bytes": costs.bytes_per_image,
    "sizes": costs.sizes,
    "decode": costs.decode_rates,
    "bandwidth": rates.bandwidth,
    "gradients": _gradients,
    "msssim": costs.msssim,
    "msssim-q95": costs.msssim_q95,
    "wait": rates.wait,
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
