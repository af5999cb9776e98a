"""Error-bounded compression of activations: trainings, ratios and noise."""

from . import noise, paired, ratios, training

PARTS = {"ratios": ratios.measure, "noise": noise.measure}
RUNS = {"runs": training.train_all, "paired": paired.train_all}
KEPT = ("errors", "memory")  # measured once


def measure(lab, parts=()):
    """What is missing of some parts, or of all."""
    for part in parts or (*RUNS, *PARTS):
        if part in RUNS:
            RUNS[part](lab)
        else:
            lab.measured(part, lambda part=part: PARTS[part](lab))
