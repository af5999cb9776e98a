"""The tables of the page."""

import json
import statistics

from ..pages import estimate

FIGURES = (("vit", "accuracy"), ("vit", "loss"), ("gpt", "loss"))


def training(lab):
    runs = lab.rows()
    found = {(run["spec"]["network"], run["spec"]["arm"], run["spec"]["seed"]): run for run in runs}
    rows = []
    for network, figure in FIGURES:
        for arm in ("0.05 std", "0.1 std"):
            seeds = [run for (net, kind, _), run in found.items() if (net, kind) == (network, arm)]
            plain = [found[network, "plain", run["spec"]["seed"]][figure] for run in seeds]
            pairs = zip(seeds, plain, strict=True)
            rows.append(
                {
                    "network": network,
                    "arm": arm,
                    "figure": figure,
                    "plain": statistics.fmean(plain),
                    "gap": estimate((run[figure] - base for run, base in pairs), 1),
                    "ratio": statistics.fmean(run["ratio"] for run in seeds),
                }
            )
    return {"rows": rows}


def saved(lab):
    with open(lab.path("ratios.json")) as file:
        found = json.load(file)
    cases = [
        {"case": case, "ratios": [network[case]["ratio"] for network in found.values()]}
        for case in found["vit"]
    ]
    kinds = [
        {"network": network, "kind": kind, "raw": raw, "ratio": raw / stored}
        for network, each in found.items()
        for kind, (raw, stored) in sorted(
            each["float32, 0.05, zstd"]["kinds"].items(), key=lambda item: -item[1][0]
        )
    ]
    return {"cases": cases, "kinds": kinds}


SECTIONS = (training, saved)
