"""Pages: Jinja templates in Markdown, which hold prose, tables and pictures.

A template sees the results of each JSON file by its name, the rows of ``runs.jsonl`` as ``runs``,
and what the subject's ``figures.py`` computes of them. ``{{ value|num(".1f") }}`` formats a number.
A fenced block ``plot NAME`` describes NAME.png in YAML (see ``plots``) and is not shown. Macros
above the title serve all sections. A section that uses data not measured yet says so instead.
"""

import json
import re
import statistics
import textwrap
from typing import NamedTuple

import jinja2
import numpy as np
import yaml

from pcrshard.fidelity.intervals import confidence

from .plots import label

PLOT = re.compile(r"^```plot ([\w-]+)\n(.*?)^```\n+", re.MULTILINE | re.DOTALL)
SCALES = {"k": 1e-3, "M": 1e-6, "G": 1e-9, "p": 100}
AS_IT_IS = ("|", "!", "#", "- ", "```", "    ")


class Estimate(NamedTuple):
    """A mean with its 95 % interval, over ``count`` runs.

    Formats: ``.1f`` is ``mean [low, high]``, ``±.1f`` is ``mean ± half``, ``+.1fv`` adds whether
    the interval excludes zero, and ``.1fm`` is the mean alone.
    """

    mean: float
    low: float
    high: float
    count: int = 2

    def __format__(self, spec):
        if spec.endswith("m"):
            return format(self.mean, spec[:-1])
        form = spec.strip("±v")
        if self.count == 1:
            return f"{self.mean:{form}} (one seed)"
        if spec.startswith("±"):
            return f"{self.mean:{form}} ± {(self.high - self.low) / 2:{form}}"
        text = f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"
        return f"{text}: {self.verdict}" if spec.endswith("v") else text

    @property
    def verdict(self):
        """Whether a difference excludes zero."""
        if self.low > 0:
            return "higher"
        return "lower" if self.high < 0 else "no difference shown"


def estimate(values, scale=100):
    """The mean and 95 % interval by Student's t, in points by default."""
    values = list(values)
    return Estimate(*(scale * value for value in confidence(values)), len(values))


def paired(first, second, scale=100):
    """The difference of two kinds of runs, over the keys (seeds) that both have; None without."""
    differences = [first[key] - second[key] for key in first if key in second]
    return estimate(differences, scale) if differences else None


class NotMeasured(Exception):
    """Rows that a section needs are not there yet."""


def num(value, spec):
    """Format a number or an estimate.

    Specs are Python's, and: ``.1fk`` and ``.1fM`` are in thousands and millions, ``.1fp`` is in
    percent, and what follows ``~`` is a unit. ``None`` is an empty cell, text stays as it is, and
    a list is one cell per entry.
    """
    if value is None or isinstance(value, str | jinja2.Undefined):
        return value or ""  # raises for what was not measured
    if isinstance(value, list | np.ndarray):
        return " | ".join(num(each, spec) for each in value)
    form, _, unit = spec.partition("~")
    if form[-1:] in SCALES:
        value, form = value * SCALES[form[-1]], form[:-1]
    return format(value, form) + unit


def compiler():
    """The Jinja environment of all templates."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: "" if value is None else value,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "num": num,
        "json": lambda value: json.dumps(value, default=list),
        "median": statistics.median,
        "mean": lambda values: statistics.fmean(list(values)),
        "estimate": estimate,
        "label": label,
    }
    environment.globals |= {"paired": paired, "zip": zip}
    return environment


def render(template, values, command="", draw=None):
    """The page of a template; ``draw(name, description)`` is called for each picture."""
    environment = compiler()
    macros, *parts = re.split(r"^(?=##? )", template, flags=re.MULTILINE)
    return "".join(_section(environment, macros, part, values, command, draw) for part in parts)


def _section(environment, macros, part, values, command, draw):
    try:
        text = environment.from_string(macros + part).render(values).lstrip()
    except jinja2.UndefinedError as missing:
        title = part.partition("\n")[0]
        return f"{title}\n\nNot measured yet ({missing}): `{command}`.\n\n"
    for name, description in PLOT.findall(text) if draw else ():
        draw(name, yaml.safe_load(description))
    return _wrapped(PLOT.sub("", text))


def _wrapped(text):
    """Markdown whose paragraphs are filled to 100 columns; tables and headings stay."""
    blocks = re.split(r"\n{2,}", text)
    filled = [
        block
        if block.startswith(AS_IT_IS)
        else textwrap.fill(
            " ".join(block.split("\n")), 100, break_long_words=False, break_on_hyphens=False
        )
        for block in blocks
    ]
    return "\n\n".join(filled) + ("\n" if not text.endswith("\n\n") else "\n\n")
