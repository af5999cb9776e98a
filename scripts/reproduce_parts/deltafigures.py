"""The Delta-DNN figures, from what was measured of the runs."""

import numpy as np

from .report import figure, finish

# Global averages that the paper takes from SPEEDTEST (January 2020), megabits a second.
BANDWIDTHS = {"mobile download": 31.95, "fixed download": 74.32, "fixed upload": 40.83}
COLOURS = {
    "original": "#a0aec0",
    "Zstd": "#718096",
    "LZMA": "#4a5568",
    "SZ3": "#dd6b20",
    "ours at 1 %": "#63b3ed",
    "ours, Algorithm 1": "#2b6cb0",
}


def by_network(runs):
    """Runs by the name of their network, in the order of the recipes."""
    found = {}
    for run in runs:
        found.setdefault(run["name"], []).append(run)
    return found


def with_rivals(runs):
    """The runs on which the other coders were measured."""
    return [run for run in runs if "rivals" in run]


def last_pair(run):
    """What Algorithm 1 found on the last epoch's delta."""
    return max(run["pairs"].values(), key=lambda pair: pair["epoch"])


def accuracies(run):
    """The accuracy of the epochs that were judged."""
    return {row["epoch"]: row["accuracy"] for row in run["rows"] if "accuracy" in row}


def at(table, bound):
    """The row of a bound."""
    return next(row for row in table if row["bound"] == bound)


def draw_similarity(runs, path):
    """Figure 1."""
    groups = by_network(runs)
    fig, axes = figure(len(groups), height=3.6 if len(groups) < 4 else 2.6)
    for ax, (name, group) in zip(axes[0], groups.items(), strict=True):
        found = last_pair(group[0])["similarity"]
        points = np.array(found["points"])
        reach = np.quantile(np.abs(points), 0.995)
        ax.scatter(*points.T, s=4, color="#2b6cb0")
        ax.plot([-reach, reach], [-reach, reach], color="#1a202c", lw=0.8)
        ax.set_xlim(-reach, reach)
        ax.set_ylim(-reach, reach)
        ax.set_box_aspect(1)
        tick = float(f"{0.6 * reach:.0e}")
        ax.set_xticks([-tick, 0, tick], [f"{-tick:g}", "0", f"{tick:g}"])
        ax.set_yticks([-tick, 0, tick], [f"{-tick:g}", "0", f"{tick:g}"])
        ax.tick_params(labelsize=8)
        line = f"y = {found['slope']:.3f} x"
        ax.set_title(f"{name}\n{line}\n1 - SSIM = {1 - found['ssim']:.0e}", fontsize=9)
    axes[0][0].set_ylabel("last epoch", fontsize=10)
    fig.supxlabel("the epoch before", fontsize=10)
    finish(fig, path)


def draw_bounds(runs, path):
    """Figures 3 and 4."""
    fig, axes = figure(2)
    for number, (name, group) in enumerate(by_network(runs).items()):
        tables = [last_pair(run)["ours"]["table"] for run in group]
        bounds = [100 * row["bound"] for row in tables[0]]
        losses = np.array([[-100 * row["loss"] for row in table] for table in tables])
        ratios = np.array([[row["ratio"] for row in table] for table in tables])
        colour = f"C{number}"
        axes[0][0].plot(bounds, losses.T, "o", ms=3, color=colour, alpha=0.5)
        axes[0][0].plot(bounds, losses.mean(0), color=colour, label=name)
        axes[0][1].plot(bounds, ratios.mean(0), "o-", ms=3, color=colour, label=name)
    axes[0][0].axhline(-0.2, color="#1a202c", lw=1, ls="--")
    axes[0][0].set_ylabel("change of accuracy, points")
    axes[0][1].axhline(12, color="#1a202c", lw=1, ls="--")
    axes[0][1].set_yscale("log")
    axes[0][1].set_yticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"])
    axes[0][1].set_ylabel("ratio")
    for ax in axes[0]:
        ax.set_xlabel("bound, % of each tensor's deviation")
    axes[0][0].legend(fontsize=9)
    finish(fig, path)


def draw_coders(runs, path):
    """Figure 5."""
    fig, axes = figure(2)
    groups = by_network(with_rivals(runs))
    names = ["zstd", "lzma", "rle+zstd", "rle+lzma", "pcodec"]
    titles = ("codes at 1 % of the deviation", "codes at 5 % of the deviation")
    for ax, key, title in zip(axes[0], ("coders", "coders_5"), titles, strict=True):
        for number, coder in enumerate(names):
            ratios = [group[0]["rivals"][key]["delta"][coder] for group in groups.values()]
            places = np.arange(len(groups)) + (number - 2) * 0.16
            ax.bar(places, ratios, 0.16, color=f"C{number}", label=coder)
        bounds = [group[0]["rivals"][key]["delta"]["entropy"] for group in groups.values()]
        for place, bound in enumerate(bounds):
            label = "entropy of each tensor" if place == 0 else None
            ax.plot([place - 0.45, place + 0.45], [bound, bound], "k--", lw=1, label=label)
        ax.set_xticks(range(len(groups)), [name.replace(", ", ",\n") for name in groups])
        ax.set_title(title)
        ax.set_yscale("log")
        ticks = [20, 50, 100, 200, 500, 1000]
        ax.set_yticks(ticks, [str(tick) for tick in ticks])
        ax.set_ylim(20, 1100)
        ax.minorticks_off()
        ax.grid(axis="x", visible=False)
    axes[0][0].set_ylabel("ratio of the codes")
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=6)
    finish(fig, path)


def ratios_of(run):
    """Ratio of each coder on the last epoch of a run."""
    ours = last_pair(run)["ours"]
    return {
        "original": 1.0,
        "Zstd": run["rivals"]["lossless"]["Zstd"],
        "LZMA": run["rivals"]["lossless"]["LZMA"],
        "SZ3": run["rivals"]["sz3"]["chosen"]["ratio"],
        "ours at 1 %": at(ours["table"], 0.01)["ratio"],
        "ours, Algorithm 1": ours["chosen"]["ratio"],
    }


def draw_transfer(runs, path):
    """Figure 8: sizes by bandwidths; nothing is sent."""
    groups = by_network(with_rivals(runs))
    fig, axes = figure(len(BANDWIDTHS), height=4, sharey=True)
    for ax, (link, megabits) in zip(axes[0], BANDWIDTHS.items(), strict=True):
        for number, (coder, colour) in enumerate(COLOURS.items()):
            seconds = [
                group[0]["raw_bytes"] * 8e-6 / ratios_of(group[0])[coder] / megabits
                for group in groups.values()
            ]
            places = np.arange(len(groups)) + (number - 2.5) * 0.14
            ax.bar(places, seconds, 0.14, color=colour, label=coder)
        ax.set_yscale("log")
        names = [name.replace(", ", ",\n") for name in groups]
        ax.set_xticks(range(len(groups)), names, fontsize=8)
        ax.set_title(f"{link}, {megabits} Mbit/s", fontsize=10)
        ax.grid(axis="x", visible=False)
    axes[0][0].set_ylabel("seconds, computed")
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    finish(fig, path)


def draw_accuracy(runs, path):
    """Figure 9."""
    groups = by_network(runs)
    rows = -(-len(groups) // 2)
    fig, axes = figure(2, rows, height=3 * rows)
    for ax, (name, group) in zip(axes.ravel(), groups.items(), strict=False):
        run = group[0]
        chains = run["chains"]
        exact = accuracies(run)
        ax.plot(exact.keys(), [100 * value for value in exact.values()], "k-", label="original")
        for chain, colour in zip(chains.values(), ("#63b3ed", "#dd6b20"), strict=False):
            ratio = chain["raw_bytes"] / chain["stored_bytes"]
            text = f"at {chain['bound']:.1%} of std, {ratio:.1f}x"
            epochs = [int(epoch) for epoch in chain["accuracy"]]
            accuracy = [100 * value for value in chain["accuracy"].values()]
            ax.plot(epochs, accuracy, "o", ms=4, color=colour, mfc="none", label=text)
        ax.set_title(f"{name}, seed {run['seed']}", fontsize=10)
        ax.legend(fontsize=8)
    for ax in axes.ravel():
        ax.set_visible(ax.has_data())
        ax.set_xlabel("epoch")
        ax.locator_params(axis="x", integer=True)
    for row in axes:
        row[0].set_ylabel("accuracy, %")
    finish(fig, path)


def draw_epochs(runs, path):
    """The ratio of each epoch's delta at the fixed bound, and how far the weights moved."""
    fig, axes = figure(2)
    for number, (name, group) in enumerate(by_network(runs).items()):
        for run in group:
            text = name if run is group[0] else None
            epochs = [row["epoch"] for row in run["deltas"]]
            ratios = [row["ratio"] for row in run["deltas"]]
            moved = [100 * row["moved"] for row in run["deltas"]]
            axes[0][0].plot(epochs, ratios, color=f"C{number}", lw=1, label=text)
            axes[0][1].plot(moved, ratios, ".", color=f"C{number}", ms=4)
    axes[0][0].set_ylabel("ratio at 1 % of the deviation")
    axes[0][0].set_xlabel("epoch")
    axes[0][0].locator_params(axis="x", integer=True)
    axes[0][1].set_xscale("log")
    axes[0][1].set_xticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
    axes[0][1].minorticks_off()
    axes[0][1].set_xlabel("change of an epoch, % of the deviation")
    axes[0][0].legend(fontsize=9)
    finish(fig, path)


FIGURES = {
    "similarity": draw_similarity,
    "bounds": draw_bounds,
    "coders": draw_coders,
    "transfer": draw_transfer,
    "accuracy": draw_accuracy,
    "epochs": draw_epochs,
}
