"""Delta-DNN's tables and figures (ICPP 2020) from real checkpoints, as a page."""

import os
import re

from . import deltatraining as training
from .deltafigures import FIGURES
from .deltameasure import NotMeasuredError, measure
from .deltapage import page
from .lab import write
from .report import COMMAND, wrap_prose

NAME = "deltadnn"
TITLES = {
    "similarity": "Neighbouring epochs (Fig. 1)",
    "bounds": "Accuracy and ratio by bound (Figs. 3 and 4)",
    "coders": "Coders of the same codes (Fig. 5)",
    "transfer": "Computed transfer times (Fig. 8)",
    "accuracy": "Accuracy of original and restored versions (Fig. 9)",
    "epochs": "Ratio of each epoch's delta",
}


def reproduce(lab):
    """Train what is missing, measure what is missing, and write figures and page."""
    report = _report(lab)
    if report is None:
        return
    pictures = {}
    for name, draw in FIGURES.items():
        file = f"{NAME}-{name}"
        draw(report["results"]["runs"], lab.figure(file))
        pictures[name] = f"![{TITLES[name]}]({file}.png)"
    text = page(report["results"], f"{COMMAND} {NAME}", report["date"][:10], pictures)
    write(os.path.join(lab.out, "checkpoints.md"), wrap_prose(_joined(text)))


def _report(lab):
    """The results: of the runs, or those that are kept where runs are missing."""
    runs = []
    for run in training.train_all(lab):
        try:
            runs.append(measure(lab, run))
        except NotMeasuredError as error:
            print(f"left out, not measured yet: {error}", flush=True)
    kept = lab.load(NAME)
    if kept is not None and len(runs) < len(kept["results"]["runs"]):
        return kept
    if not runs:
        return None
    planned = sum(len(recipe.seeds) for recipe in training.recipes(lab))
    return lab.save(NAME, {"runs": runs, "planned": planned})


def _joined(text):
    """Each paragraph as one line, for :func:`wrap_prose`."""
    blocks = re.split(r"\n{2,}", text)
    return "\n\n".join(
        block if block.lstrip().startswith(("|", "!", "#")) else " ".join(block.split("\n"))
        for block in blocks
    )
