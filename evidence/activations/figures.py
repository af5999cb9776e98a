"""What the page computes of the trainings."""

import statistics

from ..pages import NotMeasured, estimate, paired
from . import paired as deriving
from .training import ARMS, LAST

KEPT = "0.05 std, each kept"


def _gap(arms, arm, column="accuracy", scale=100, than="plain"):
    """An arm less another, paired by seed; ``None`` below two seeds."""
    first, second = (
        {seed: run[column] for seed, run in arms.get(name, {}).items() if column in run}
        for name in (arm, than)
    )
    found = paired(first, second, scale)
    return found if arm not in (than, "plain") and found and found.count > 1 else None


def arms(lab, name="runs", order=ARMS):
    """{network: {arm: {seed: run}}}, in the order of the page."""
    found = {}
    for run in lab.rows(name):
        spec = run["spec"]
        found.setdefault(spec["network"], {}).setdefault(spec["arm"], {})[spec["seed"]] = run
    if not found:
        raise NotMeasured
    return {
        network: {arm: found[network][arm] for arm in order if arm in found[network]}
        for network in sorted(found, reverse=True)
    }


def derived(lab):
    """Rows of networks and arms: less plain, and less what keeps each tensor."""
    rows = []
    for network, found in arms(lab, "paired", deriving.ARMS).items():
        for arm, runs in found.items():
            made = {(run["commit"], run["torch"]) for run in runs.values()}
            row = {
                "network": network,
                "arm": arm,
                "seeds": len(runs),
                "ratio": statistics.fmean(run["ratio"] for run in runs.values()),
                "loss": statistics.fmean(run["loss"] for run in runs.values()),
                "made": ", ".join(sorted(f"{commit}, {torch}" for commit, torch in made)),
            }
            for name, than in (("plain", "plain"), ("kept", KEPT)):
                row[f"loss_{name}"] = _gap(found, arm, "loss", 1, than)
                row[f"accuracy_{name}"] = _gap(found, arm, "accuracy", 100, than)
            rows.append(row)
    return rows


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


SECTIONS = (arms, training, derived)
