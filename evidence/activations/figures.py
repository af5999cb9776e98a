"""What the page computes of the trainings."""

import statistics

from ..pages import NotMeasured, estimate, paired
from .training import ARMS, LAST


def _gap(arms, arm, column="accuracy", scale=100):
    """An arm less plain, paired by seed; ``None`` below two seeds."""
    first, second = (
        {seed: run[column] for seed, run in arms.get(name, {}).items()} for name in (arm, "plain")
    )
    found = paired(first, second, scale)
    return found if arm != "plain" and found and found.count > 1 else None


def arms(lab):
    """{network: {arm: {seed: run}}}, in the order of the page."""
    found = {}
    for run in lab.rows():
        spec = run["spec"]
        found.setdefault(spec["network"], {}).setdefault(spec["arm"], {})[spec["seed"]] = run
    if not found:
        raise NotMeasured
    return {
        network: {arm: found[network][arm] for arm in ARMS if arm in found[network]}
        for network in sorted(found, reverse=True)
    }


def training(lab):
    """Rows of networks and arms, and how many epochs count."""
    rows = []
    for network, found in arms(lab).items():
        for arm, runs in found.items():
            rows.append(
                {
                    "network": network,
                    "arm": arm,
                    "runs": list(runs.values()),
                    "ratio": statistics.fmean(run["ratio"] for run in runs.values()),
                    "accuracy": estimate(run["accuracy"] for run in runs.values()),
                    "gap": _gap(found, arm),
                    "loss": _gap(found, arm, "test_loss", 1),
                }
            )
    return {"rows": rows, "last": LAST}


SECTIONS = (arms, training)
