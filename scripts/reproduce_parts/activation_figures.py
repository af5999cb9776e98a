"""The pictures of docs/evidence/activations.md."""

import math

import numpy as np

from .report import figure, finish

COLOURS = {
    "plain": "#1a202c",
    "0.05 std": "#2b6cb0",
    "0.1 std": "#2f855a",
    "0.1 std, images too": "#38b2ac",
    "0.2 std": "#dd6b20",
    "0.1 std, stochastic": "#805ad5",
    "adaptive": "#b83280",
    "adaptive, as printed": "#e53e3e",
}
NETWORKS = ("#2b6cb0", "#2f855a", "#dd6b20", "#b83280")


def draw_all(lab, name, reports, runs):
    """Those for which there is something."""
    if "noise" in reports:
        draw_errors(reports["noise"], lab.figure(f"{name}-errors"))
        draw_sigma(reports["noise"], lab.figure(f"{name}-sigma"))
    if "memory" in reports:
        draw_batches(reports["memory"], lab.figure(f"{name}-batches"))
        draw_timeline(reports["memory"], lab.figure(f"{name}-timeline"))
    if runs:
        draw_accuracy(runs, lab.figure(f"{name}-accuracy"))


def _middles(count, edge):
    edges = np.linspace(-edge, edge, count + 1)
    return (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0]


def draw_errors(noise, path):
    """Left: errors of activations over the bound. Right: those of gradients over their sigma."""
    fig, axes = figure(2, height=3.8)
    left, right = axes[0]
    shares = np.array(noise["errors"]["histogram"])
    middles, width = _middles(len(shares), 1)
    left.bar(middles, shares / width, width, color="#2b6cb0", alpha=0.6)
    left.axhline(0.5, color="#1a202c", lw=1, ls="--", label="uniform")
    left.set(
        title="Input of a convolution (Fig. 3)",
        xlabel="error / bound, where it is not zero",
        ylabel="density",
        ylim=(0, 0.75),
    )
    left.legend()
    for (network, found), tint in zip(noise["networks"].items(), NETWORKS, strict=False):
        shares = np.array(found["histogram"])
        middles, width = _middles(len(shares), 4)
        right.plot(middles, shares / width, color=tint, lw=1.2, label=network)
    grid = np.linspace(-4, 4, 200)
    normal = np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi)
    right.plot(grid, normal, color="#1a202c", lw=1, ls="--", label="normal")
    right.set(
        title="Weight gradient of a convolution (Fig. 6)",
        xlabel="error / sigma of its output channel",
        ylim=(0, 0.62),
    )
    right.legend(ncols=2)
    finish(fig, path)


CASES = {
    "initial weights": ("#2b6cb0", "o"),
    "settled": ("#dd6b20", "^"),
    "settled, stochastic": ("#2f855a", "s"),
}


def draw_sigma(noise, path):
    """Predicted against measured sigma of every convolution, and their quotient."""
    fig, axes = figure(2, height=4.2)
    left, right = axes[0]
    for case, (tint, marker) in CASES.items():
        rows = [
            row for found in noise["networks"].values() for row in found["layers"][case].values()
        ]
        predicted = np.array([row["predicted"] for row in rows])
        measured = np.array([row["measured"] for row in rows])
        left.scatter(measured, predicted, s=12, color=tint, marker=marker, label=case)
        right.scatter(np.arange(len(rows)), predicted / measured, s=10, color=tint, marker=marker)
    low = min(predicted.min(), measured.min())
    high = max(predicted.max(), measured.max())
    left.plot([low, high], [low, high], color="#1a202c", lw=1, ls="--")
    left.set(
        xscale="log",
        yscale="log",
        xlabel="measured sigma",
        ylabel="predicted sigma",
        title="Every convolution (Fig. 8)",
    )
    left.legend()
    right.axhspan(0.8, 1.25, color="#2f855a", alpha=0.1)
    right.set(
        ylim=(0, 1.4),
        xlabel="convolution, " + ", ".join(noise["networks"]),
        title="predicted / measured; target: 0.8 to 1.25",
    )
    right.xaxis.label.set_fontsize(8)
    finish(fig, path)


def draw_accuracy(runs, path):
    """Mean test accuracy by epoch, an arm a line."""
    networks = sorted({run["spec"]["network"] for run in runs if len(run["rows"]) > 1})
    fig, axes = figure(max(len(networks), 1), height=4)
    for ax, network in zip(axes[0], networks, strict=False):
        for arm, tint in COLOURS.items():
            rows = [
                [row[1] for row in run["rows"]]
                for run in runs
                if run["spec"]["network"] == network and run["spec"]["arm"] == arm
            ]
            if not rows:
                continue
            errors = 100 * (1 - np.array(rows).mean(axis=0))
            epochs = np.arange(1, len(errors) + 1)
            label = f"{arm} ({len(rows)})"
            ax.plot(epochs, errors, color=tint, lw=2 if arm == "plain" else 1.2, label=label)
        ax.set(title=network, xlabel="epoch", yscale="log", ylabel="test errors, %")
        ax.legend(title="arm (seeds)", fontsize=8, loc="lower left")
    finish(fig, path)


def draw_batches(memory, path):
    """CPU time over plain, and peak memory, by batch."""
    fig, axes = figure(2, height=3.8)
    left, right = axes[0]
    batches = [int(batch) for batch in memory["overhead"]]
    for codec, tint in (("int8", "#2b6cb0"), ("zstd", "#2f855a"), ("bits", "#dd6b20")):
        values = [row["overhead"][codec]["median"] for row in memory["overhead"].values()]
        left.plot(batches, 100 * np.array(values), marker="o", color=tint, label=codec)
    left.set(
        xlabel="images in a batch", ylabel="CPU time over plain, %", title="Overhead (Fig. 11)"
    )
    left.set_ylim(bottom=0)
    left.legend()
    for name, tint in (("plain", "#1a202c"), ("zstd", "#2f855a")):
        peaks = [row[name]["peak_bytes"] / 1e6 for row in memory["peaks"].values()]
        right.plot(batches, peaks, marker="o", color=tint, label=name)
    budget = memory["budget_bytes"] / 1e6
    right.axhline(budget, color="#718096", lw=1, ls="--", label=f"{budget:.0f} MB")
    right.set(xlabel="images in a batch", ylabel="MB", title="Peak memory of a step")
    right.legend()
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks(batches, [str(batch) for batch in batches])
    finish(fig, path)


def draw_timeline(memory, path):
    """The resident set over one step, plain and compressed."""
    fig, axes = figure(height=3.4)
    ax = axes[0][0]
    for name, tint in (("plain", "#1a202c"), ("zstd", "#2f855a")):
        samples = np.array(memory["timelines"][name])
        share = samples[:, 0] / samples[-1, 0]
        ax.fill_between(share, samples[:, 1] / 1e6, color=tint, alpha=0.15)
        ax.plot(share, samples[:, 1] / 1e6, color=tint, lw=1.2, label=name)
    ax.set(
        xlabel="share of the step",
        ylabel="MB above what there was",
        title=f"Resident set over a step, ResNet-18 w64, batch {memory['batch']}",
    )
    ax.legend()
    finish(fig, path)
