"""Tables and pictures of the page: Jin et al.'s next to ours."""

import math
import statistics

import numpy as np

from .. import plots
from ..pages import estimate, paired
from ..plots import BLACK, BLUE, GREEN, ORANGE
from .training import ARMS, LAST

# The paper's Table 1: conv. activations, times smaller.
PAPER = {"AlexNet": 13.5, "VGG-16": 11.1, "ResNet-18": 10.7, "ResNet-50": 11.0}
SHOWN = "0.1 std, images too"
COLORS = {
    "plain": BLACK,
    "0.05 std": BLUE,
    "0.1 std": GREEN,
    "0.1 std, images too": "#38b2ac",
    "0.2 std": ORANGE,
    "0.1 std, stochastic": "#805ad5",
    "adaptive": "#b83280",
    "adaptive, as printed": "#e53e3e",
}
NETWORKS = (BLUE, GREEN, ORANGE, "#b83280")
CASES = {
    "initial weights": (BLUE, "o"),
    "settled": (ORANGE, "^"),
    "settled, stochastic": (GREEN, "s"),
}


def _arms(lab):
    """{network: {arm: {seed: run}}}, in the order of the page."""
    found = {}
    for run in lab.rows():
        spec = run["spec"]
        found.setdefault(spec["network"], {}).setdefault(spec["arm"], {})[spec["seed"]] = run
    return {
        network: {arm: found[network][arm] for arm in ARMS if arm in found[network]}
        for network in sorted(found, reverse=True)
    }


def _gap(arms, arm, column="accuracy", scale=100):
    """An arm less plain, paired by seed; ``None`` below two seeds."""
    first, second = (
        {seed: run[column] for seed, run in arms.get(name, {}).items()} for name in (arm, "plain")
    )
    found = paired(first, second, scale)
    return found if arm != "plain" and found and found.count > 1 else None


def training(lab):
    networks = _arms(lab)
    if not networks:
        return None
    rows = []
    for network, arms in networks.items():
        for arm, runs in arms.items():
            ratio = statistics.fmean(run["ratio"] for run in runs.values())
            rows.append(
                {
                    "network": network,
                    "arm": arm,
                    "seeds": len(runs),
                    "ratio": None if arm == "plain" else f"{ratio:.1f}x",
                    "accuracy": estimate(run["accuracy"] for run in runs.values()),
                    "gap": _gap(arms, arm),
                    "loss": _gap(arms, arm, "test_loss", 1),
                }
            )
    scratch = {
        network: arms
        for network, arms in networks.items()
        if len(next(iter(arms["plain"].values()))["rows"]) > 1
    }
    with plots.figure(lab.figure("accuracy"), len(scratch), height=4) as axes:
        for ax, (network, arms) in zip(axes, sorted(scratch.items()), strict=True):
            for arm, color in COLORS.items():
                curves = [[row[1] for row in run["rows"]] for run in arms.get(arm, {}).values()]
                if curves:
                    errors = 100 * (1 - np.mean(curves, axis=0))
                    options = {"color": color, "lw": 2 if arm == "plain" else 1.2}
                    epochs = range(1, len(errors) + 1)
                    ax.plot(epochs, errors, label=f"{arm} ({len(curves)})", **options)
            ax.set(title=network, xlabel="epoch", yscale="log", ylabel="test errors, %")
            ax.legend(title="arm (seeds)", fontsize=8, loc="lower left")
    sizes = next(iter(next(iter(scratch.values()))["plain"].values()))
    return {"rows": rows, "train": sizes["train"], "test": sizes["test"], "last": LAST}


def ratios(lab):
    results = lab.load("ratios")
    if results is None:
        return None
    rows, kinds = [], []
    for network, found in results["networks"].items():
        cells = f" |  | {PAPER[network]}x"
        rows.append({"network": network, "case": "paper", "mb": None, "cells": cells})
        for case, row in found["cases"].items():
            columns = ("ratio", "ratio_images_kept", "ratio_of_conv_inputs")
            cells = " | ".join(f"{row[column]:.2f}x" for column in columns)
            saved = f"{row['raw_bytes'] / 1e6:.0f} MB"
            rows.append({"network": network, "case": case, "mb": saved, "cells": cells})
        case = found["cases"][SHOWN]
        stored = sum(part for _, part in case["kinds"].values())
        for what, (raw, part) in sorted(case["kinds"].items(), key=lambda item: -item[1][1]):
            if part > 0.01 * stored:
                shares = [100 * raw / case["raw_bytes"], 100 * part / stored]
                kinds.append(
                    {"network": network, "what": what, "shares": shares, "ratio": raw / part}
                )
    steps = ", ".join(f"{name} {row['steps']}" for name, row in results["networks"].items())
    return {"rows": rows, "kinds": kinds, "steps": steps, "shown": SHOWN}


def unet(lab):
    results = lab.load("ratios")
    if results is None:
        return None
    rows = [
        {**row, "case": case, "mb": [row[key] / 1e6 for key in ("raw_bytes", "stored_bytes")]}
        for case, row in results["unet"]["cases"].items()
    ]
    return {"rows": rows, "size": results["unet"]["size"]}


def _quotients(found, case):
    return [row["predicted"] / row["measured"] for row in found["layers"][case].values()]


def noise(lab):
    results = lab.load("noise")
    if results is None:
        return None
    _draw_errors(lab.figure("errors"), results)
    _draw_sigma(lab.figure("sigma"), results)
    rows = []
    for network, found in results["networks"].items():
        for case, layers in found["layers"].items():
            inside = [100 * row["within_one_sigma"] for row in layers.values()]
            quotients = _quotients(found, case)
            rows.append(
                {
                    "network": network,
                    "case": case,
                    "count": len(layers),
                    "quotients": [min(quotients), max(quotients)],
                    "inside": [min(inside), max(inside)],
                }
            )
    networks = results["networks"].items()
    drawn = ", ".join(f"{found['drawn']} of {name}" for name, found in networks)
    errors = results["errors"] | {"zeros": 100 * results["errors"]["zeros"]}
    return {"rows": rows, "share": results["share"], "drawn": drawn, "errors": errors}


def _middles(count, edge):
    edges = np.linspace(-edge, edge, count + 1)
    return (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0]


def _draw_errors(path, results):
    """Left: errors of activations over the bound. Right: those of gradients over their sigma."""
    with plots.figure(path, 2, height=3.8) as (left, right):
        shares = np.array(results["errors"]["histogram"])
        middles, width = _middles(len(shares), 1)
        left.bar(middles, shares / width, width, color=BLUE, alpha=0.6)
        left.axhline(0.5, color=BLACK, lw=1, ls="--", label="uniform")
        left.set(title="Input of a convolution (Fig. 3)", ylabel="density", ylim=(0, 0.75))
        left.set_xlabel("error / bound, where it is not zero")
        left.legend()
        for (network, found), color in zip(results["networks"].items(), NETWORKS, strict=False):
            shares = np.array(found["histogram"])
            middles, width = _middles(len(shares), 4)
            right.plot(middles, shares / width, color=color, lw=1.2, label=network)
        grid = np.linspace(-4, 4, 200)
        normal = np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi)
        right.plot(grid, normal, color=BLACK, lw=1, ls="--", label="normal")
        right.set(title="Weight gradient of a convolution (Fig. 6)", ylim=(0, 0.62))
        right.set_xlabel("error / sigma of its output channel")
        right.legend(ncols=2)


def _draw_sigma(path, results):
    """Predicted against measured sigma of every convolution, and their quotient."""
    with plots.figure(path, 2, height=4.2) as (left, right):
        for case, (color, marker) in CASES.items():
            rows = [
                (row["measured"], row["predicted"])
                for found in results["networks"].values()
                for row in found["layers"][case].values()
            ]
            measured, predicted = np.array(rows).T
            options = {"color": color, "marker": marker}
            left.scatter(measured, predicted, s=12, label=case, **options)
            right.scatter(range(len(rows)), predicted / measured, s=10, **options)
        ends = [np.min(rows), np.max(rows)]
        left.plot(ends, ends, color=BLACK, lw=1, ls="--")
        left.set(xscale="log", yscale="log", title="Every convolution (Fig. 8)")
        left.set(xlabel="measured sigma", ylabel="predicted sigma")
        left.legend()
        right.axhspan(0.8, 1.25, color=GREEN, alpha=0.1)
        right.set(ylim=(0, 1.4), title="predicted / measured; target: 0.8 to 1.25")
        right.set_xlabel("convolution, " + ", ".join(results["networks"]), fontsize=8)


def memory(lab):
    results = lab.load("memory")
    if results is None:
        return None
    _draw_batches(lab.figure("batches"), results)
    _draw_timeline(lab.figure("timeline"), results)
    tables = {}
    for name in ("compositions", "deep"):
        plain = results[name]["plain"]["peak_bytes"]
        tables[name] = [
            {
                "way": way,
                "mb": row["peak_bytes"] / 1e6,
                "times": plain / row["peak_bytes"],
                "stored": f"{row['stored_bytes'] / 1e6:.0f} MB" if row["stored_bytes"] else None,
                "seconds": row["seconds"],
            }
            for way, row in results[name].items()
        ]
    batches = [
        {
            "batch": batch,
            "speed": int(batch) / row["seconds"]["plain"]["median"],
            "over": {c: 100 * row["overhead"][c]["median"] for c in ("int8", "zstd", "bits")},
            "mb": [results["peaks"][batch][way]["peak_bytes"] / 1e6 for way in ("plain", "zstd")],
        }
        for batch, row in results["overhead"].items()
    ]
    # Its images per second are wall-clock figures, slowed by unrelated load.
    fits = [
        {"way": way, "images": row["batch_size"]} for way, row in results["largest_batches"].items()
    ]
    budget = results["budget_bytes"] / 1e6
    return {
        "batch": results["batch"],
        **tables,
        "batches": batches,
        "fits": fits,
        "budget": budget,
    }


def _draw_batches(path, results):
    """CPU time over plain, and peak memory, by batch."""
    batches = [int(batch) for batch in results["overhead"]]
    with plots.figure(path, 2, height=3.8) as (left, right):
        for codec, color in (("int8", BLUE), ("zstd", GREEN), ("bits", ORANGE)):
            over = [100 * row["overhead"][codec]["median"] for row in results["overhead"].values()]
            left.plot(batches, over, "o-", color=color, label=codec)
        left.set(title="Overhead (Fig. 11)", ylabel="CPU time over plain, %")
        left.set_ylim(bottom=0)
        for way, color in (("plain", BLACK), ("zstd", GREEN)):
            peaks = [row[way]["peak_bytes"] / 1e6 for row in results["peaks"].values()]
            right.plot(batches, peaks, "o-", color=color, label=way)
        budget = results["budget_bytes"] / 1e6
        right.axhline(budget, color="#718096", lw=1, ls="--", label=f"{budget:.0f} MB")
        right.set(title="Peak memory of a step", ylabel="MB")
        for ax in (left, right):
            ax.legend()
            ax.set_xlabel("images in a batch")
            ax.set_xscale("log", base=2)
            ax.set_xticks(batches, list(map(str, batches)))


def _draw_timeline(path, results):
    """The resident set over one step, plain and compressed."""
    with plots.figure(path, height=3.4) as (ax,):
        for way, color in (("plain", BLACK), ("zstd", GREEN)):
            seconds, resident = np.array(results["timelines"][way]).T
            share, megabytes = seconds / seconds[-1], resident / 1e6
            ax.fill_between(share, megabytes, color=color, alpha=0.15)
            ax.plot(share, megabytes, color=color, lw=1.2, label=way)
        title = f"Resident set over a step, ResNet-18 w64, batch {results['batch']}"
        ax.set(title=title, xlabel="share of the step", ylabel="MB above what there was")
        ax.legend()


SECTIONS = (
    training,
    ratios,
    unet,
    noise,
    memory,
)
