"""Regenerate docs/evidence from real runs on this machine: the papers' tables and figures next to
ours.

    python scripts/reproduce.py                  all experiments; what is there already is kept
    python scripts/reproduce.py sizes autotune   some of them
    python scripts/reproduce.py deltadnn         docs/evidence/checkpoints.md
    python scripts/reproduce.py imagenet         docs/evidence/imagenet.md
    python scripts/reproduce.py transfer         docs/evidence/transfer.md
    python scripts/reproduce.py finetuning       docs/evidence/finetuning.md; needs root for links
    python scripts/reproduce.py layers           more of that page: all layers, ResNet-18
    python scripts/reproduce.py clusters         docs/evidence/clusters.md; needs root for links
    python scripts/reproduce.py --quick --out /tmp/evidence    a smoke run on synthetic pictures

Results are written as each experiment and each training run ends, so that a run that was stopped
goes on where it was.
"""

import argparse
import os
import sys
import warnings

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from reproduce_parts import (
    accuracy,
    activation,
    clusters,
    correlation,
    costs,
    deltadnn,
    finetuning,
    finetuning_layers,
    imagenet,
    rates,
    scanscripts,
    transfer,
    tuning,
)
from reproduce_parts.lab import ROOT, Lab
from reproduce_parts.report import COMMAND, write_readme
from reproduce_parts.summary import summary

EXPERIMENTS = [
    *costs.EXPERIMENTS,
    *rates.EXPERIMENTS,
    *tuning.EXPERIMENTS,
    *accuracy.EXPERIMENTS,
    *scanscripts.EXPERIMENTS,
    *correlation.EXPERIMENTS,
]
ORDER = [
    "sizes",
    "decode",
    "bandwidth",
    "gradients",
    "time",
    "coarse",
    "epochs",
    "msssim",
    "correlation",
    "autotune",
    "rates",
    "sweep",
    "smoothing",
    "scripts",
    "wait",
]

# Commands that write a page of their own.
PAGES = {
    part.NAME: part.reproduce
    for part in (activation, deltadnn, imagenet, transfer, finetuning, finetuning_layers, clusters)
}

HEAD = f"""# Evidence

What the paper (Progressive Compressed Records, PVLDB 14(11), 2021) reports, next to what this
repository measures. Everything below is written by one command, `{COMMAND}`,
which needs `shared/data`; `--fresh` measures everything again, and `--quick` is a smoke run on
synthetic pictures. The scale is that of two shared cores: tasks of 898 to 2,550 training images
and, below the first screen, a network of 0.4 million parameters at 64 x 64 pixels. The laws can be
checked at that scale, the paper's absolute numbers cannot, and where a law does not show, this page
says so. Training runs are lines of [runs.jsonl](runs.jsonl); intervals are 95 % by Student's t over
seeds. Runs of 8 epochs (coarse labels, smoothing) are older than the others and drew their crops
from another generator. Tasks: *flowers* (5 classes), *signs* (10 hand signs; 51 % of its bytes are
metadata), *ham224* (7 kinds of skin lesions).

Checkpoints (the Delta-DNN paper) have [a page of their own](checkpoints.md), and so have
[activations](activations.md).
"""


def by_name():
    return {experiment.name: experiment for experiment in EXPERIMENTS}


def perform(lab, experiment):
    """Measure an experiment unless its results are kept, and draw its figure."""
    report = None if lab.fresh or not experiment.kept else lab.load(experiment.name)
    if report is None and lab.existing and experiment.kept:
        return
    if report is None:
        print(f"{experiment.name}: {experiment.title}", flush=True)
        results = experiment.measure(lab)
        if not results:
            return
        report = lab.save(experiment.name, results)
    experiment.draw(report["results"], lab.figure(experiment.name))


def _write_readme(lab, experiments):
    write_readme(lab, [experiments[name] for name in ORDER], f"{HEAD}\n{summary(lab)}")


def main(arguments=None):
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        choices=[[], *ORDER, *PAGES],
        help=f"some of: {', '.join([*ORDER, *PAGES])}",
    )
    parser.add_argument("--quick", action="store_true", help="tiny runs on synthetic pictures")
    parser.add_argument(
        "--scale",
        type=int,
        default=1,
        metavar="N",
        help="for a machine with a GPU: N times the epochs, seeds and crops of finetuning and "
        "layers, and the photographs of imagenet's other crops (of PCRSHARD_IMAGENET)",
    )
    parser.add_argument("--fresh", action="store_true", help="measure and train everything again")
    parser.add_argument(
        "--existing",
        action="store_true",
        help="measure and train nothing: figures and tables of what is there",
    )
    parser.add_argument(
        "--out",
        default=os.path.join(ROOT, "docs", "evidence"),
        help="where to write (default: %(default)s)",
    )
    args = parser.parse_args(arguments)
    if args.quick and args.out == parser.get_default("out"):
        parser.error("--quick needs --out: docs/evidence is for real runs")
    if args.scale < 1:
        parser.error(f"expected --scale of at least 1, got {args.scale}")
    if args.scale > 1 and args.out == parser.get_default("out"):
        parser.error("--scale needs --out: docs/evidence has runs of scale 1")
    # Each run has its own seed and epochs; that a dataset is read again is meant.
    warnings.filterwarnings("ignore", message="epoch .* is read again")
    lab = Lab(args.out, args.quick, args.fresh, args.existing, args.scale)
    experiments = by_name()
    for name in args.names or [*ORDER, *PAGES]:
        if name in PAGES:
            PAGES[name](lab)
            continue
        perform(lab, experiments[name])
        _write_readme(lab, experiments)
    _write_readme(lab, experiments)
    print(f"figures and tables: {lab.out}")


if __name__ == "__main__":
    main()
