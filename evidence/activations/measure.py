"""Error-bounded compression of activations: trainings, ratios and noise."""

from . import noise, ratios, training

PARTS = {"ratios": ratios.measure, "noise": noise.measure}
KEPT = ("errors", "memory")  # measured once


def measure(lab, parts=()):
    """What is missing of some parts, or of all."""
    for part in parts or ("runs", *PARTS):
        if part == "runs":
            training.train_all(lab)
        else:
            lab.measured(part, lambda part=part: PARTS[part](lab))
