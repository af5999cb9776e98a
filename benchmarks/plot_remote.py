"""Draw what bench_remote.py measured: plot_remote.py FIGURES.json OUT.png (needs matplotlib)."""

import json
import sys

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot


def main():
    source, out = sys.argv[1:]
    with open(source) as file:
        link = json.load(file)["results"]["link"]
    scans = link["scans"]
    labels = [f"scan {name}" if name.isdecimal() else name for name in scans] + [
        "stock\nWebDataset"
    ]
    rates = [row["rate"]["median"] for row in scans.values()] + [link["stock"]["median"]]
    predicted = [row["predicted"]["median"] for row in scans.values()]
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    bars = axes.bar(labels, rates, color=["#2b6cb0"] * len(scans) + ["#a0aec0"], width=0.6)
    axes.bar_label(bars, [f"{rate:.0f}" for rate in rates], padding=3)
    axes.plot(
        labels[:-1],
        predicted,
        "_",
        color="#c53030",
        markersize=60,
        label="goodput / prefix bytes per image (X = W / E[s])",
    )
    axes.set_yscale("log")
    axes.set_ylim(min(rates) / 2, max(rates) * 2)
    axes.set_yticks(
        [100, 200, 500, 1000, 2000, 5000], ["100", "200", "500", "1000", "2000", "5000"]
    )
    axes.minorticks_off()
    axes.set_ylabel("images per second (log scale)")
    axes.set_title(
        f"One reader over a link of {link['goodput']['median'] / 1e6:.1f} MB/s goodput",
        fontsize=11,
    )
    axes.legend(frameon=False, fontsize=9, markerscale=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=100)


if __name__ == "__main__":
    main()
