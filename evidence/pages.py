"""Pages in Markdown: prose with ``{{ placeholders }}``, and tables whose one row is repeated.

``{{ sizes.images:.1f }}`` is the value of a section's dictionary by ``str.format``. A line that
begins with ``{{ for sizes.rows }}`` is repeated for each row, whose fields stand in single braces.
A section (``## ``) that names what was not measured says so instead.
"""

import contextlib
import os
import re
import string
import tempfile
import textwrap
from typing import ClassVar, NamedTuple

from pcrshard.fidelity.tuner import confidence

PLACEHOLDER = re.compile(r"\{\{ *(.+?) *\}\}")
REPEATED = re.compile(r"\{\{ for ([\w.-]+) \}\} *(.*)")
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


def met(reached):
    """The last cell of a table of targets."""
    return "met" if reached else "missed"


class NotMeasured(Exception):
    """Rows that a section needs are not there yet."""


def collect(lab, sections):
    """The values of each section whose data are there, by the name of its function."""
    found = {}
    for section in sections:
        with contextlib.suppress(NotMeasured):
            values = section(lab)
            if values is not None:
                found[section.__name__] = {"date": lab.date(section.__name__), **values}
    return found


def lookup(value, path):
    """The value at ``path``: keys, attributes and numbers of list entries, joined by dots."""
    for part in re.findall(r"[\w-]+", path):
        if isinstance(value, list | tuple) and part.isdigit():
            value = value[int(part)]
        elif value is not None:
            value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


class _Formatter(string.Formatter):
    """Format specs of tables: ``.1fk``, ``.1fM`` and ``.1fG`` are in thousands, millions and
    billions, ``.1fp`` in percent; what follows ``~`` is a unit. ``None`` is an empty cell, and a
    list is one cell for each entry.
    """

    scales: ClassVar = {"k": 1e-3, "M": 1e-6, "G": 1e-9, "p": 100}

    def format_field(self, value, spec):
        if value is None or isinstance(value, str):
            return value or ""
        if isinstance(value, list):
            return " | ".join(self.format_field(each, spec) for each in value)
        form, _, unit = spec.partition("~")
        if form[-1:] in self.scales:
            value, form = value * self.scales[form[-1]], form[:-1]
        return super().format_field(value, form) + unit

    def get_field(self, name, args, kwargs):
        return lookup(kwargs, name), name


_format = _Formatter().vformat


def render(template, values, command=""):
    """The page of a template."""
    return "".join(
        _section(part, values, command)
        for part in re.split(r"^(?=## )", template, flags=re.MULTILINE)
    )


def _section(part, values, command):
    try:
        return _wrapped("\n".join(_lines(part, values)))
    except KeyError as missing:
        if not part.startswith("## "):
            raise
        title = part.partition("\n")[0]
        return f"{title}\n\nNot measured yet ({missing.args[0]}): `{command}`.\n\n"


def _lines(part, values):
    for line in part.split("\n"):
        repeated = REPEATED.match(line)
        if repeated:
            for row in lookup(values, repeated[1]):
                yield _format(repeated[2], (), row).rstrip(" ")
        else:
            yield PLACEHOLDER.sub(lambda found: _format(f"{{{found[1]}}}", (), values), line)


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


def write(template, target, values):
    """Render a template to a file that appears whole or not at all."""
    with open(template) as file:
        text = file.read()
    subject = os.path.basename(os.path.dirname(template))
    write_text(target, render(text, values, f"python -m evidence {subject}").strip() + "\n")


def write_text(path, text):
    """Write a file that appears whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(path)), suffix=".tmp")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
