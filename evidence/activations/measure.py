"""Error-bounded compression of activations: trainings, ratios, noise and memory."""

from . import memory, noise, ratios, training

PARTS = {"ratios": ratios.measure, "noise": noise.measure, "memory": memory.measure}


def measure(lab, parts=()):
    """What is missing of some parts, or of all."""
    for part in parts or ("runs", *PARTS):
        if part == "runs":
            training.train_all(lab)
        else:
            lab.measured(part, lambda part=part: PARTS[part](lab))
