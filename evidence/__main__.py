"""Measure what is missing of a subject, draw its pictures, and render its page.

    python -m evidence pcr                    evidence/pcr/README.md; rows that are there are kept
    python -m evidence pcr sizes decode       only these parts
    python -m evidence deltadnn --fresh       measure everything again
    python -m evidence imagenet --existing    render what is there, without measuring
    python -m evidence finetuning --quick     a smoke run on synthetic pictures, elsewhere

Rows are written as each run ends: a command that was stopped resumes where it was. It needs
``pip install "pcrshard[evidence]"``.
"""

import argparse
import importlib
import os
import tempfile
import textwrap
import warnings

from . import ROOT, pages, plots
from .lab import Lab

SUBJECTS = (
    "pcr",
    "finetuning",
    "imagenet",
    "levels",
    "clusters",
    "deltadnn",
    "activations",
    "transformers",
    "peers",
    "newcomer",
)


def run(lab, parts=(), *, existing=False):
    """Measure, draw and render one subject."""
    if not existing:
        importlib.import_module(f".{lab.subject}.measure", __package__).measure(lab, parts)
    render(lab)


def render(lab):
    """Draw a subject's pictures and write its page."""
    with open(os.path.join(ROOT, "evidence", lab.subject, "page.md")) as file:
        template = file.read()
    page = pages.render(
        template,
        lab.values(),
        f"python -m evidence {lab.subject}",
        lambda name, plot: plots.draw(lab.path(f"{name}.png"), plot),
    )
    lab.write("README.md", page.strip() + "\n\n" + _sources(lab))
    print(lab.path("README.md"))


def _sources(lab):
    """The last section of a page: which commit measured its rows."""
    lines = ["## What measured these figures", "", "| data | rows | commit and versions |"]
    lines.append("| --- | --- | --- |")
    for file, counts in lab.sources().items():
        each = "; ".join(
            f"{source} ({count})" if len(counts) > 1 else source
            for source, count in sorted(counts.items())
        )
        lines.append(f"| [{file}]({file}) | {sum(counts.values())} | {each} |")
    note = (
        "A row of which only the recording commit is known was measured by that commit's program, "
        "or by one shortly before it."
    )
    lines += ["", *textwrap.wrap(note, 100)] if "recorded in" in "".join(lines) else []
    return "\n".join(lines) + "\n"


def main(arguments=None):
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m evidence", description=__doc__.splitlines()[0])
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("parts", nargs="*", help="parts of the subject; all by default")
    parser.add_argument("--quick", action="store_true", help="tiny runs on synthetic pictures")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--existing", action="store_true", help="measure nothing; only render")
    parser.add_argument(
        "--scale", type=int, default=1, metavar="N", help="N times the epochs, seeds and pictures"
    )
    parser.add_argument("--out", help="folder of the results (default: evidence/)")
    args = parser.parse_args(arguments)
    if args.scale < 1:
        parser.error(f"expected --scale of at least 1, got {args.scale}")
    special = args.quick or args.scale > 1
    apart = os.path.join(tempfile.gettempdir(), f"pcrshard-evidence-{os.getuid()}-pages")
    root = args.out or (apart if special else os.path.join(ROOT, "evidence"))
    if special and os.path.abspath(root) == os.path.join(ROOT, "evidence"):
        parser.error("--quick and --scale need another --out: evidence/ is for real runs")
    warnings.filterwarnings("ignore", message="epoch .* is read again")
    lab = Lab(root, args.subject, quick=args.quick, scale=args.scale)
    if args.fresh:
        module = importlib.import_module(f".{args.subject}.measure", __package__)
        lab.forget(args.parts, getattr(module, "KEPT", ()))
    run(lab, args.parts, existing=args.existing)


if __name__ == "__main__":
    main()
