"""Draw docs/images/overview-light.png and overview-dark.png: bytes, accuracy and speed at once.

Usage: python -m evidence.overview [FOLDER]

The photograph ships with scikit-learn. Every number comes from the evidence: bytes and top-1 are
means over 256 ImageNet photographs (levels), speeds are those of peers, all measured in the same
runs. The width suits a phone: text stays above 11 pixels when the picture is 390 wide.
"""

import io
import os
import sys

from matplotlib import pyplot
from PIL import Image
from sklearn.datasets import load_sample_image

from pcrshard import decode_image
from pcrshard.encoding.encode_jpeg import measure_scans
from pcrshard.encoding.levels import count_scans
from pcrshard.format.scan_script import Q95

from . import ROOT
from .lab import Lab
from .levels.figures import budgets
from .levels.measure import prefixes
from .peers.figures import Questions

# Times fewer bytes than the sources have.
SHOWN = (8, 4, 2.5)
PEERS = {
    "pcrshard, 14 kB": "pcrshard scan 2, threads",
    "pcrshard, 47 kB": "pcrshard scan 5, threads",
    "pcrshard, full": "pcrshard full, threads",
    "FFCV": "FFCV",
    "LitData": "LitData tuned",
    "WebDataset": "WebDataset tuned",
}
# Paper, ink, pcrshard and the others.
THEMES = {
    "light": ("#ffffff", "#1f2933", "#1d4ed8", "#9aa5b1"),
    "dark": ("#131416", "#e4e7eb", "#60a5fa", "#7b8794"),
}
STYLE = {"font.size": 13, "axes.titlesize": 13, "axes.titleweight": "bold", "ytick.major.size": 0}
STYLE |= {f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")}


def photograph_at(slopes):
    """A square of scikit-learn's photograph of a dahlia as a level of each slope shows it."""
    target = io.BytesIO()
    Image.fromarray(load_sample_image("flower.jpg")).save(target, "JPEG", quality=95)
    parts = prefixes(target.getvalue(), Q95)
    stops = count_scans(measure_scans(target.getvalue(), Q95, 0), slopes)
    return [decode_image(parts[stop - 1])[110:330, 165:385] for stop in stops]


def draw(path, theme):
    """Write one picture."""
    evidence = os.path.join(ROOT, "evidence")
    levels = {row["fewer"]: row for row in budgets(Lab(evidence, "levels"))}
    shown = [levels[fewer] for fewer in SHOWN]
    source = shown[0]["bytes"] * shown[0]["fewer"]
    ask = Questions(Lab(evidence, "peers").rows())
    speeds = {
        "Images per CPU second": ask.medians("per_cpu", "cpu", workers=1),
        "Images per second over a 20 MB/s link": ask.medians(
            "per_second", "link", rate=20e6, data="data-link"
        ),
    }
    paper, ink, ours, theirs = theme
    colors = dict.fromkeys(("figure.facecolor", "axes.facecolor"), paper)
    colors |= dict.fromkeys(("text.color", "axes.labelcolor", "ytick.color"), ink)
    with pyplot.rc_context(STYLE | colors):
        figure = pyplot.figure(figsize=(7.2, 7.8), layout="constrained")
        title = "One copy of the dataset, read at any fidelity"
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=16)
        top, *below = figure.subfigures(3, 1, height_ratios=(3.4, 3, 2.6))
        titles = [f"{row['fewer']:g}x fewer" for row in shown] + ["full"]
        sizes = [row["bytes"] for row in shown] + [source]
        top1 = [row["lite0_top1"] for row in shown] + [shown[0]["lite0_top1_full"]]
        pictures = photograph_at([row["slope"] for row in shown] + [0.0])
        for axes, *each in zip(top.subplots(1, 4), titles, sizes, top1, pictures, strict=True):
            label, size, accuracy, pixels = each
            text = f"{size / 1000:.0f} kB\n{100 * accuracy:.1f} % top-1"
            axes.imshow(pixels)
            axes.set(xticks=[], yticks=[], title=label, xlabel=text)
        for part, (title, values) in zip(below, speeds.items(), strict=True):
            shown = {label: values[peer] for label, peer in PEERS.items() if peer in values}
            axes = part.subplots()
            bars = axes.barh(list(shown), shown.values(), height=0.72)
            for label, bar in zip(shown, bars, strict=True):
                bar.set_color(ours if "pcrshard" in label else theirs)
            axes.bar_label(bars, fmt="{:,.0f}", padding=4)
            axes.set_title(title, loc="left")
            axes.invert_yaxis()
            axes.set_xticks([])
            axes.margins(x=0.15, y=0.01)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


if __name__ == "__main__":
    folder = sys.argv[1] if sys.argv[1:] else os.path.join(ROOT, "docs", "images")
    for name, theme in THEMES.items():
        draw(os.path.join(folder, f"overview-{name}.png"), theme)
