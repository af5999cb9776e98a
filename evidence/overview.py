"""Draw docs/images/overview-light.png and overview-dark.png: bytes, accuracy and speed at once.

Usage: python -m evidence.overview [FOLDER]

The photograph ships with scikit-learn. Every number comes from the evidence: bytes and top-1 are
means over 260 ImageNet photographs (imagenet), speeds are those of peers, all measured in the
same runs. The width suits a phone: text stays above 11 pixels when the picture is 390 wide.
"""

import io
import os
import pathlib
import sys

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from PIL import Image
from sklearn.datasets import load_sample_image

from pcrshard import decode_image, join_scans, split_scans

from . import ROOT
from .imagenet.figures import Seen, share
from .lab import Lab
from .peers.figures import Questions

EVIDENCE = os.path.join(ROOT, "evidence")
SCANS = (1, 2, 5, 10)
PEERS = (  # label, name in peers/runs.jsonl over a link and, where it differs, from memory
    ("pcrshard, scan 2", "pcrshard scan 2, threads"),
    ("pcrshard, scan 5", "pcrshard scan 5, threads"),
    ("pcrshard, full", "pcrshard full, threads"),
    ("FFCV", "FFCV"),
    ("LitData", "LitData tuned"),
    ("WebDataset", "WebDataset tuned"),
)
THEMES = {
    "light": {"paper": "#ffffff", "ink": "#1f2933", "ours": "#1d4ed8", "theirs": "#9aa5b1"},
    "dark": {"paper": "#131416", "ink": "#e4e7eb", "ours": "#60a5fa", "theirs": "#7b8794"},
}


def photograph_at_scans() -> list[np.ndarray]:
    """A square of scikit-learn's photograph of a dahlia as each of SCANS shows it."""
    flower = load_sample_image("flower.jpg")
    target = io.BytesIO()
    Image.fromarray(flower).save(target, "JPEG", quality=95, progressive=True)
    header, scans, _ = split_scans(target.getvalue())
    square = np.s_[110:330, 165:385]
    return [decode_image(join_scans(header, scans[:scan]))[square] for scan in SCANS]


def speeds() -> list[dict[str, float]]:
    """Images per CPU second (one worker) and images per second over 20 MB/s, medians of rounds."""
    ask = Questions(Lab(EVIDENCE, "peers").rows())
    found = (
        ask.medians("per_cpu", "cpu", workers=1),
        ask.medians("per_second", "link", rate=20e6, data="data-link"),
    )
    return [{label: each[peer] for label, peer in PEERS if peer in each} for each in found]


def bars(axes: Axes, values: dict[str, float], title: str, theme: dict[str, str]) -> None:
    """Draw horizontal bars, ours in color, with the value at the end of each."""
    labels = list(values)
    colors = [theme["ours" if "pcrshard" in label else "theirs"] for label in labels]
    axes.barh(range(len(labels)), values.values(), color=colors, height=0.72)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.set_xlim(0, 1.22 * max(values.values()))
    for row, value in enumerate(values.values()):
        axes.text(value, row, f" {value:,.0f}", va="center", color=theme["ink"])
    axes.set_title(title, loc="left", color=theme["ink"], fontweight="bold", fontsize=13)
    axes.tick_params(length=0, colors=theme["ink"])
    axes.spines[:].set_visible(False)
    axes.set_facecolor(theme["paper"])


@pyplot.rc_context({"font.size": 13, "font.family": "DejaVu Sans"})
def draw(folder: pathlib.Path) -> None:
    """Write both pictures into a folder."""
    pictures = photograph_at_scans()
    seen = Seen(Lab(EVIDENCE, "imagenet"))
    marks = seen.plain("lite0")
    by_cpu, by_link = speeds()
    for name, theme in THEMES.items():
        figure = pyplot.figure(figsize=(7.2, 7.8), facecolor=theme["paper"])
        figure.text(
            0.015, 0.96, "One copy of the dataset, read at any fidelity", color=theme["ink"],
            fontweight="bold", fontsize=16,
        )  # fmt: skip
        for column, (scan, pixels) in enumerate(zip(SCANS, pictures, strict=True)):
            axes = figure.add_axes((0.015 + 0.2466 * column, 0.695, 0.23, 0.212))
            axes.imshow(pixels)
            axes.axis("off")
            title = "full" if scan == SCANS[-1] else f"scan {scan}"
            axes.set_title(title, color=theme["ink"], fontweight="bold", fontsize=13, pad=5)
            key = f"standard {scan}"
            text = f"{seen.bytes[key] / 1000:.0f} kB\n{share(marks[key]).mean:.1f} % top-1"
            axes.text(
                0.5, -0.04, text, transform=axes.transAxes, ha="center", va="top",
                color=theme["ink"], linespacing=1.3,
            )  # fmt: skip
        by_row = 0.0415
        for values, top, title in (
            (by_cpu, 0.575, "Images per CPU second"),
            (by_link, 0.255, "Images per second over a 20 MB/s link"),
        ):
            height = by_row * len(values)
            bars(figure.add_axes((0.235, top - height, 0.75, height)), values, title, theme)
        figure.savefig(folder / f"overview-{name}.png", dpi=110, facecolor=theme["paper"])
        pyplot.close(figure)


if __name__ == "__main__":
    draw(pathlib.Path(sys.argv[1] if sys.argv[1:] else os.path.join(ROOT, "docs", "images")))
