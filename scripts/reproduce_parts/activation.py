"""``reproduce.py activations``: error-bounded compression of activations, measured; the page is
docs/evidence/activations.md.
"""

import os

from . import (
    activation_figures,
    activation_finetuning,
    activation_memory,
    activation_noise,
    activation_page,
    activation_ratios,
    activation_training,
)
from .lab import write
from .report import wrap_prose

NAME = "activations"


def _measure_ratios(lab):
    names = ("ResNet-18",) if lab.quick else activation_ratios.NETWORKS
    found = {}
    for name in names:
        found[name] = activation_ratios.measure_network(lab, name)
        print(f"{name}: {found[name]['cases']['0.1 std, images too']['ratio']:.2f}", flush=True)
    return {"networks": found, "unet": activation_ratios.measure_unet(lab)}


PARTS = {
    "ratios": _measure_ratios,
    "noise": activation_noise.measure,
    "memory": activation_memory.measure,
}


def reproduce(lab):
    """What is missing is trained and measured; figures and the page are made anew."""
    if not lab.existing:
        activation_training.train_all(lab)
        activation_finetuning.train_all(lab)
    reports = {}
    for part, measure in PARTS.items():
        report = None if lab.fresh else lab.load(f"{NAME}-{part}")
        if report is None and not lab.existing:
            report = lab.save(f"{NAME}-{part}", measure(lab))
        if report is not None:
            reports[part] = report["results"]
    runs = activation_training.known(lab)
    activation_figures.draw_all(lab, NAME, reports, runs)
    page = activation_page.text(reports, runs)
    write(os.path.join(lab.out, f"{NAME}.md"), wrap_prose(page))
