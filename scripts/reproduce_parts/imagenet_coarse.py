"""What a network of ImageNet says that photographs are, scan by scan: coarse labels (Fig. 11 of the
paper) and the likeness that goes with each accuracy (Fig. 13).
"""

import numpy as np

import pcrshard
from pcrshard.fidelity.msssim import Reference
from pcrshard.jpeg.pixels import decode_image

from . import lites
from .imagenet_page import SHADES, gap, share
from .photographs import photographs, points, stored
from .report import figure, finish, markdown

NAME = "imagenet-guesses"
# Numbers of classes in ImageNet's order of synsets.
DOGS = range(151, 269)
ANIMALS = range(398)
# What a class is called, from fine to coarse.
LABELS = {
    "1,000 classes": lambda number: number,
    "dog, other animal, or thing": lambda number: (number in ANIMALS) + (number in DOGS),
    "animal or thing": lambda number: int(number in ANIMALS),
}
STORES = ("standard", "q95")


def measure(lab):
    """The best guess of Lite0 for each photograph at each point, and the mean MS-SSIM of each scan
    against the whole photograph.
    """
    side = 64 if lab.quick else 224
    decoder = pcrshard.ImageDecoder(side, "center")
    classify = lites.Classifier(lites.pretrained("lite0"), fused=not lab.quick)
    chosen = photographs(lab)
    names = [point.name for point in points()]
    guesses = []
    likeness = []
    for photograph in chosen:
        files = stored(photograph.path.read_bytes())
        images = np.stack([decoder(files[name], None) for name in names])
        guesses.append(classify(images).argmax(1).tolist())
        likeness.append(_likeness(files))
    told = {name: _line(each) for name, each in zip(names, zip(*guesses, strict=True), strict=True)}
    means = np.mean([list(each.values()) for each in likeness], axis=0)
    found = {"labels": _line(photograph.label for photograph in chosen), "guesses": told}
    return found | {"msssim": dict(zip(likeness[0], means.tolist(), strict=True))}


def _line(numbers):
    """Numbers on one line of JSON."""
    return " ".join(map(str, numbers))


def _called(line, name):
    """The classes of a line, by a coarser name."""
    return [LABELS[name](int(number)) for number in line.split()]


def _likeness(files):
    reference = Reference(decode_image(files["source full"]))
    return {
        point.name: reference.compare(decode_image(files[point.name]))
        for point in points()
        if point.store in STORES
    }


def coarse_marks(results, name):
    """{point: marks} of right guesses when classes are called by a coarser name."""
    wanted = _called(results["labels"], name)
    return {
        point: "".join(
            "1" if guess == label else "0"
            for guess, label in zip(_called(told, name), wanted, strict=True)
        )
        for point, told in results["guesses"].items()
    }


def largest(results, name):
    """The share of the most frequent class: what a constant guess gets."""
    wanted = _called(results["labels"], name)
    return max(map(wanted.count, wanted)) / len(wanted)


def draw(lab, results, sizes):
    """Accuracy against bytes, a panel for each kind of label."""
    fig, axes = figure(len(LABELS), height=4.2, sharey=True)
    for ax, name in zip(axes[0], LABELS, strict=True):
        marks = coarse_marks(results, name)
        for store in STORES:
            chosen = [point.name for point in points() if point.store == store]
            shares = np.array([share(marks[point]) for point in chosen]) * 100
            x = [sizes[point] / 1e3 for point in chosen]
            errors = [shares[:, 0] - shares[:, 1], shares[:, 2] - shares[:, 0]]
            ax.errorbar(x, shares[:, 0], errors, fmt="o-", capsize=2, ms=4, color=SHADES[store])
        ax.axhline(100 * largest(results, name), color="#a0aec0", ls="--", lw=1)
        ax.set_title(name)
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set_xlabel("kB a photograph, read")
        ax.set_ylim(0, 102)
    axes[0][0].set_ylabel("accuracy (%), 95 % interval")
    fig.legend(axes[0][0].containers, STORES, loc="outside upper center", ncols=2)
    finish(fig, lab.figure("imagenet-coarse"))


def _cell(marks, full):
    mean, low, high = (100 * each for each in gap(marks, full))
    return f"{100 * share(marks)[0]:.1f} ({mean:+.1f} [{low:+.1f}, {high:+.1f}])"


def text(results, sizes):
    """The section of the page."""
    rows = []
    for point in points():
        if point.store in STORES and point.scan in (1, 2, 3, 4, 5, 6, 8):
            name = point.name
            all_marks = [coarse_marks(results, label) for label in LABELS]
            cells = [_cell(marks[name], marks["source full"]) for marks in all_marks]
            rows.append([name, f"{sizes[name] / 1e3:.1f}", *cells])
    full = [coarse_marks(results, label)["source full"] for label in LABELS]
    rows.append(["source", f"{sizes['source full'] / 1e3:.1f}", *(_cell(m, m) for m in full)])
    constant = ", ".join(f"{100 * largest(results, label):.1f}" for label in LABELS)
    return f"""## Coarse labels

The paper's Fig. 11 with a network that was trained on none of this: the same guesses of Lite0 at
224 pixels, judged by coarser names of ImageNet's classes (classes 0 to 397 are animals, 151 to 268
dogs). Accuracy in per cent, and minus the source's with 95 % intervals of pairs; {len(full[0])}
photographs; a constant guess gets {constant} % (dashed). On another processor than the rows
above, single guesses differ.

{markdown(["", "kB", *LABELS], rows)}

![Accuracy against bytes by the names of classes](imagenet-coarse.png)

{_findings(results, sizes)}
"""


def first(results, sizes, label):
    """(point, times fewer bytes) of the cheapest scan within a point of the source."""
    marks = coarse_marks(results, label)
    within = [
        point.name
        for point in points()
        if point.store in STORES and gap(marks[point.name], marks["source full"])[0] >= -0.01
    ]
    best = min(within, key=sizes.get)
    return best, sizes["source full"] / sizes[best]


def _loss(results, label):
    marks = coarse_marks(results, label)
    return gap(marks["standard 1"], marks["source full"])[0]


def _findings(results, sizes):
    found = []
    for label in LABELS:
        best, times = first(results, sizes, label)
        found.append(f"{label}: `{best}`, {times:.1f}x fewer bytes than the source")
    spoilt = ", ".join(f"{100 * _loss(results, label):+.0f} for {label}" for label in LABELS)
    return (
        "The cheapest scan within a point of the source: "
        + "; ".join(found)
        + f". Points that scan 1 of `standard` loses: {spoilt}. That coarse labels need fewer "
        "bytes is partly arithmetic here: a wrong guess inside a coarse class counts as right, and "
        "the network was not trained on coarse labels, as the paper's was."
    )
