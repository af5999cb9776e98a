"""Draw what search_scripts.py measured: plot_scripts.py SCRIPTS.json OUT.png (needs matplotlib);
--tables prints the tables of docs/scripts.md.
"""

import argparse
import json

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

SETS = {
    "imagenet": "ImageNet (quality 96, 4:4:4)",
    "ham10000": "HAM10000 (quality 100, 4:4:4)",
    "cars": "cars (quality 75, 4:2:0)",
    "faces_1024": "faces 1024 (quality 75, 4:2:0)",
}
STYLES = [("o", "#718096"), ("s", "#2b6cb0"), ("^", "#c05621"), ("v", "#2f855a")]
TICKS = (0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
TARGETS = (0.90, 0.95, 0.965, 0.98, 0.985, 0.99)


def names(rows):
    """Scripts, standard first."""
    return sorted({row["script"] for row in rows}, key=lambda name: (name != "standard", name))


def points(rows, name, script):
    return [
        (r["share"], r["msssim"], r["decode_ms"])
        for r in rows
        if (r["set"], r["script"]) == (name, script)
    ]


def draw(axes, rows, name):
    """Bytes against MS-SSIM; the distance from 1 is on a logarithmic scale. The last scan, which is
    exact, has no place on it.
    """
    for (marker, colour), script in zip(STYLES, names(rows), strict=False):
        found = [point for point in points(rows, name, script) if point[1] < 1 - 2e-4]
        shares, qualities, _ = zip(*found, strict=True)
        axes.plot(
            shares,
            [1 - q for q in qualities],
            marker=marker,
            color=colour,
            label=script,
            markersize=5,
            linewidth=1.2,
        )
    axes.set_yscale("log")
    axes.invert_yaxis()
    axes.set_ylim(0.35, 0.0008)
    axes.set_yticks([1 - tick for tick in TICKS], [f"{tick:g}" for tick in TICKS])
    axes.minorticks_off()
    axes.set_xlim(0, 1)
    axes.grid(color="#e2e8f0")
    axes.set_title(SETS[name], fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def picture(rows, path):
    figure, axes = pyplot.subplots(
        2, 2, figsize=(8, 7), sharex=True, sharey=True, layout="constrained"
    )
    for panel, name in zip(axes.flat, SETS, strict=True):
        draw(panel, rows, name)
    figure.supxlabel("bytes of the images up to a scan, as a share of the source", fontsize=10)
    figure.supylabel("mean MS-SSIM against full fidelity (log scale of 1 - x)", fontsize=10)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=100)


def tables(rows):
    """Markdown: what each target costs, and every scan."""
    scripts = names(rows)
    print("| set | images | " + " | ".join(f"{t:g}" for t in TARGETS) + " | whole |")
    print("|---" * (len(TARGETS) + 3) + "|")
    for name in dict.fromkeys(row["set"] for row in rows):
        images = next(row["images"] for row in rows if row["set"] == name)
        cells = []
        for target in TARGETS:
            shares = [
                min(share for share, quality, _ in points(rows, name, script) if quality >= target)
                for script in scripts
            ]
            cells.append(
                " · ".join(f"**{s:.3f}**" if s == min(shares) else f"{s:.3f}" for s in shares)
            )
        cells.append(" · ".join(f"{points(rows, name, script)[-1][0]:.3f}" for script in scripts))
        print(f"| {name} | {images} | " + " | ".join(cells) + " |")
    for name, title in SETS.items():
        print(
            f"\n{title}:\n\n| scan | "
            + " | ".join(scripts)
            + " |\n|---"
            + "|---" * len(scripts)
            + "|"
        )
        columns = [points(rows, name, script) for script in scripts]
        for k in range(max(map(len, columns))):
            cells = [
                f"{c[k][0]:.3f} → {c[k][1]:.4f}, {c[k][2]:.2f} ms" if k < len(c) else ""
                for c in columns
            ]
            print(f"| {k + 1} | " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures")
    parser.add_argument("picture", nargs="?")
    parser.add_argument("--tables", action="store_true")
    args = parser.parse_args()
    with open(args.figures) as file:
        rows = json.load(file)["results"]
    if args.picture:
        picture(rows, args.picture)
    if args.tables:
        tables(rows)


if __name__ == "__main__":
    main()
