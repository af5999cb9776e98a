"""What the page computes of measured and simulated set-ups."""

import statistics

NEAR = 0.05


def ratio(row):
    """Return the ratio of simulated to real images per second."""
    return row["simulated"]["images_per_second"] / row["real"]["images_per_second"]


def setups(lab):
    """The rounds of each set-up, in the order of their ratios."""
    found = {}
    for row in lab.read("validation")["rows"]:
        found.setdefault(row["name"], []).append(row | {"ratio": ratio(row)})
    return [sorted(rounds, key=ratio) for rounds in found.values()]


def agreement(lab):
    """How near medians and single runs are."""
    rows = lab.read("validation")["rows"]
    ratios = [rounds[len(rounds) // 2]["ratio"] for rounds in setups(lab)]
    return {
        "near": sum(abs(each - 1) <= NEAR for each in ratios),
        "setups": len(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "near_runs": sum(abs(ratio(row) - 1) <= NEAR for row in rows),
        "runs": len(rows),
        "nanoseconds": 1e9 * statistics.median(row["costs"]["byte_seconds"] for row in rows),
    }


SECTIONS = (setups, agreement)
