"""Draw docs/images/overview-light.png and overview-dark.png: bytes, accuracy and speed at once.

Usage: python -m evidence.overview [FOLDER]

The photograph ships with scikit-learn. Every number comes from the evidence: bytes and top-1 are
means over 260 ImageNet photographs (imagenet), speeds are those of peers, all measured in the
same runs. The width suits a phone: text stays above 11 pixels when the picture is 390 wide.
"""

import io
import os
import sys

import numpy as np
from matplotlib import pyplot
from PIL import Image
from sklearn.datasets import load_sample_image

from pcrshard import decode_image, join_scans, split_scans

from . import ROOT
from .imagenet.figures import Seen, share
from .lab import Lab
from .peers.figures import Questions

SCANS = {"scan 1": 1, "scan 2": 2, "scan 5": 5, "full": 10}
PEERS = {
    "pcrshard, scan 2": "pcrshard scan 2, threads",
    "pcrshard, scan 5": "pcrshard scan 5, threads",
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


def photograph_at_scans():
    """A square of scikit-learn's photograph of a dahlia as each of SCANS shows it."""
    target = io.BytesIO()
    flower = Image.fromarray(load_sample_image("flower.jpg"))
    flower.save(target, "JPEG", quality=95, progressive=True)
    header, scans, _ = split_scans(target.getvalue())
    square = np.s_[110:330, 165:385]
    return [decode_image(join_scans(header, scans[:scan]))[square] for scan in SCANS.values()]


def draw(path, theme):
    """Write one picture."""
    evidence = os.path.join(ROOT, "evidence")
    seen = Seen(Lab(evidence, "imagenet"))
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
        pictures = zip(top.subplots(1, 4), SCANS.items(), photograph_at_scans(), strict=True)
        for axes, (label, scan), pixels in pictures:
            point = f"standard {scan}"
            top1 = share(seen.plain("lite0")[point]).mean
            text = f"{seen.bytes[point] / 1000:.0f} kB\n{top1:.1f} % top-1"
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
