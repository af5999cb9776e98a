"""What the experiments share: intervals, tables in Markdown, the look of figures,
docs/evidence/README.md.
"""

import dataclasses
import os
import textwrap
from collections.abc import Callable
from typing import Any

from pcrshard.fidelity.tuner import confidence

from .lab import write

COLOURS = {
    1: "#b83280",
    2: "#dd6b20",
    5: "#2b6cb0",
    10: "#2f855a",
    "full": "#2f855a",
    "tuner": "#1a202c",
    "source": "#718096",
}
COMMAND = "python scripts/reproduce.py"


@dataclasses.dataclass(frozen=True)
class Experiment:
    """An experiment: ``measure(lab)`` gives what JSON can hold, ``draw(results, path)`` a figure,
    ``text(results)`` Markdown.

    ``kept`` results are measured once; the others are derived from the training runs each time.
    """

    name: str
    title: str
    measure: Callable[[Any], Any]
    draw: Callable[[Any, str], None]
    text: Callable[[Any], str]
    kept: bool = False
    targets: Callable[[Any], list[Any]] | None = None


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(
        {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
    )
    plt.rcParams.update(
        {"grid.alpha": 0.25, "legend.frameon": False, "legend.fontsize": 10, "axes.titlesize": 11}
    )
    return plt


def figure(columns=1, rows=1, height=4.5, **options):
    """A figure 800 pixels wide."""
    return pyplot().subplots(
        rows, columns, figsize=(8, height), layout="constrained", squeeze=False, **options
    )


def finish(fig, path):
    fig.savefig(path, dpi=100)
    pyplot().close(fig)


def colour(scan, last=10):
    """The colour of a scan; those that have none of their own stand between."""
    if scan in COLOURS:
        return COLOURS[scan]
    return pyplot().get_cmap("viridis")((scan - 1) / max(1, last - 1))


def label(scan):
    return scan if isinstance(scan, str) else f"scan {scan}"


def markdown(header, rows):
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def interval(values, digits=1, scale=100):
    """``mean ± half`` of the 95 % interval by Student's t."""
    mean, low, high = confidence(list(values))
    half = f" ± {scale * (high - low) / 2:.{digits}f}" if len(values) > 1 else " (one seed)"
    return f"{scale * mean:.{digits}f}{half}"


def difference(first, second):
    """The 95 % interval of the mean difference of paired runs: (mean, low, high)."""
    return confidence([a - b for a, b in zip(first, second, strict=True)])


def verdict(interval_, what=("higher", "lower"), scale=100):
    """A difference in words: it counts when its interval excludes zero."""
    mean, low, high = interval_
    text = f"{scale * mean:+.1f} [{scale * low:+.1f}, {scale * high:+.1f}]"
    return f"{text}: {what[0] if low > 0 else what[1] if high < 0 else 'no difference shown'}"


def flow(text):
    """Markdown whose paragraphs are one line each, so that ``wrap_prose`` can fill them."""
    done = []
    for line in text.split("\n"):
        apart = not line or line.startswith(("|", "!", "#", "- ", "```"))
        if apart or not done or not done[-1] or done[-1].startswith(("|", "!", "#")):
            done.append(line)
        else:
            done[-1] += f" {line}"
    return "\n".join(done)


def wrap_prose(text):
    """Markdown with the lines of its paragraphs filled to 100 columns; tables stay as they are."""
    return "\n".join(
        line
        if line.startswith(("|", "!", "#"))
        else textwrap.fill(line, 100, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )


def write_readme(lab, experiments, head):
    """docs/evidence/README.md, from all experiments that have results."""
    judged = []
    for experiment in experiments:
        report = lab.load(experiment.name)
        if experiment.targets is not None and report is not None:
            judged += [
                [what, value, "met" if met else "missed"]
                for what, value, met in experiment.targets(report["results"])
            ]
    parts = [
        head,
        "## The targets\n",
        markdown(["target", "measured", ""], judged) + "\n" if judged else "Not measured yet.\n",
    ]
    for experiment in experiments:
        report = lab.load(experiment.name)
        if report is None:
            parts.append(f"## {experiment.title}\n\nNot run yet: `{COMMAND} {experiment.name}`.\n")
            continue
        picture = (
            f"![{experiment.title}]({experiment.name}.png)"
            if os.path.exists(lab.figure(experiment.name))
            else ""
        )
        source = (
            f"`{COMMAND} {experiment.name}` · "
            f"[{experiment.name}.json]({experiment.name}.json) · "
            f"{report['date'][:10]}"
        )
        parts.append(
            f"## {experiment.title}\n\n"
            f"{experiment.text(report['results']).strip()}\n\n{picture}\n\n{source}\n"
        )
    write(os.path.join(lab.out, "README.md"), "\n".join(map(wrap_prose, parts)))
