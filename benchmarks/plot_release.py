"""Draw what bench_release.py measured: plot_release.py FIGURES.json OUT.png (needs matplotlib)."""

import json
import sys

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

COLOURS = {"encode": "#a0aec0", "transfer": "#2b6cb0", "decode": "#4a5568"}


def draw(axes, rate, rows):
    """Stacked bars of one link, the total on top."""
    labels = [f"{name}\n{row['moved_bytes'] / 1e6:.2f} MB" for name, row in rows.items()]
    bottom = [0.0] * len(rows)
    for step, colour in COLOURS.items():
        seconds = [row[step]["median"] for row in rows.values()]
        axes.bar(labels, seconds, 0.6, bottom=bottom, color=colour, label=step)
        bottom = [below + more for below, more in zip(bottom, seconds, strict=True)]
    for place, total in enumerate(bottom):
        axes.annotate(f"{total:.2f} s", (place, total), ha="center", va="bottom", fontsize=9)
    axes.set_title(f"link of {rate} MB/s", fontsize=10)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylim(0, max(bottom) * 1.12)
    axes.spines[["top", "right"]].set_visible(False)


def main():
    source, out = sys.argv[1:]
    with open(source) as file:
        results = json.load(file)["results"]
    links = results["links"]
    figure, panels = pyplot.subplots(
        1, len(links), figsize=(4.6 * len(links), 4), layout="constrained", squeeze=False
    )
    for axes, (rate, rows) in zip(panels[0], links.items(), strict=True):
        draw(axes, rate, rows)
    panels[0][0].set_ylabel("seconds until the new weights are in memory")
    panels[0][0].legend(frameon=False, fontsize=9)
    figure.suptitle(
        f"Sending {results['raw_bytes'] / 1e6:.1f} MB of weights, one epoch after the ones the "
        f"receiver holds; delta within {results['bound_std']:.0%} of the standard deviation",
        fontsize=11,
    )
    figure.savefig(out, dpi=100)


if __name__ == "__main__":
    main()
