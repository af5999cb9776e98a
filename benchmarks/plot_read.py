"""Draw what bench_read.py measured: plot_read.py FIGURES.json OUT.png (needs matplotlib)."""

import json
import sys

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

STYLES = {
    "bare": ("o", "#718096", "bare read"),
    "plain": ("v", "#dd6b20", "plain Python, checks on"),
    "unchecked": ("^", "#90cdf4", "pcrshard, checks off"),
}
STYLES["checked"] = ("s", "#2b6cb0", "pcrshard, checks on")
TITLES = {"fresh": "fresh process", "steady": "steady state"}


def draw(axes, rows, regime):
    """Points with quartiles, one column per case and scan."""
    columns = list(dict.fromkeys((row["case"], row["scan"]) for row in rows))
    for how, (marker, colour, label) in STYLES.items():
        found = {
            (r["case"], r["scan"]): r["mib_per_cpu_s"]
            for r in rows
            if r["how"] == how and r["regime"] == regime
        }
        stats = [found[column] for column in columns]
        median = [s["median"] for s in stats]
        error = [[s["median"] - s["q1"] for s in stats], [s["q3"] - s["median"] for s in stats]]
        axes.errorbar(
            range(len(columns)), median, error, fmt=marker, color=colour, label=label, capsize=2
        )
    axes.axhline(400, color="#c53030", linewidth=1, linestyle="--", label="target: 400 MiB/s")
    axes.set_xticks(range(len(columns)), [str(scan) for _, scan in columns])
    cases = list(dict.fromkeys(case for case, _ in columns))
    width = len(columns) // len(cases)
    for i, case in enumerate(cases):
        axes.text((i + 0.5) * width - 0.5, 260, case, ha="center", fontsize=9)
        if i:
            axes.axvline(i * width - 0.5, color="#e2e8f0", linewidth=1)
    axes.set_title(TITLES[regime], fontsize=10)
    axes.set_xlabel("read up to scan")
    axes.set_yscale("log")
    axes.set_ylim(220, 20000)
    axes.set_yticks(
        [250, 500, 1000, 2000, 4000, 8000, 16000],
        ["250", "500", "1000", "2000", "4000", "8000", "16000"],
    )
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)


def main():
    source, out = sys.argv[1:]
    with open(source) as file:
        rows = json.load(file)["results"]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4.5), sharey=True, layout="constrained")
    for panel, regime in zip(axes, TITLES, strict=True):
        draw(panel, rows, regime)
    axes[0].set_ylabel("MiB per CPU second (log scale)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    figure.suptitle("Prefixes of 260 ImageNet photographs, page cache to JPEG bytes", fontsize=11)
    figure.savefig(out, dpi=100)


if __name__ == "__main__":
    main()
