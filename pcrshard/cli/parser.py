"""Build an argparse parser from the signatures and docstrings of functions.

A command is a function. Its positional parameters are arguments, its keyword-only parameters are
options, and a parameter whose type is a dataclass expands to one option per field. msgspec converts
a value to its annotated type, unless this is ``Annotated[type, Keywords(...)]``, with keywords for
``add_argument``; those of a dataclass are a dict by field. Defaults come from the signature, help
texts from the docstring. A command returns a :class:`Report`.
"""

from __future__ import annotations

import inspect
import json
import re
from argparse import (
    SUPPRESS,
    ArgumentParser,
    ArgumentTypeError,
    RawDescriptionHelpFormatter,
    _ActionsContainer,
)
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from ..errors import PCRError
from ..fidelity.costs import figures_text
from ..format.scan import Scan

# "name: text", indented as in the sections Args and Attributes of a docstring.
_ARGUMENT_TEXT = re.compile(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)
# Docstrings name parameters as Python does; help texts name options.
_PARAMETER = re.compile(r"\b[a-z]+(_[a-z]+)+\b")


class Report(NamedTuple):
    """The result of a command.

    Attributes:
        figures: The result: dicts, lists, structs, numbers and strings.
        text: The result as text for people (default: a line or a table per figure).
        has_failed: Whether the exit status is 1.
    """

    figures: Any
    text: str | None = None
    has_failed: bool = False

    def as_text(self) -> str:
        """Return the text, or a line or a table per figure."""
        return figures_text(self.figures) if self.text is None else self.text


def problem_report(figures: dict[str, Any], problems: list[str]) -> Report:
    """Return a report that has failed if there are problems, which its text lists first."""
    text = "\n".join([*problems, figures_text(figures | {"problems": len(problems)})])
    return Report(figures | {"problems": problems}, text, bool(problems))


class Keywords(dict[str, Any]):
    """Keywords of ``ArgumentParser.add_argument``, hashable as ``typing`` requires in a union."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # hashed by identity


class UsageError(Exception):
    """Options that are valid individually but not together."""


def add_command(commands: Any, function: Callable[..., Report]) -> None:
    """Add a function as a subcommand of a parser."""
    doc = inspect.getdoc(function) or ""
    parser = commands.add_parser(
        function.__name__,
        help=_summary(doc),
        description=doc.partition("\nArgs:")[0],
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.set_defaults(function=function, parser=parser)
    _add_parameters(parser, parser, function, {})
    parser.add_argument(
        "--json", action="store_true", default=SUPPRESS, help="Print the result as JSON"
    )


def run_command(source: Callable[..., Any], values: dict[str, Any]) -> Any:
    """Call a function, or construct a dataclass, with its parsed values."""
    hints = get_type_hints(source)
    taken = {}
    for name in inspect.signature(source).parameters:
        if is_dataclass(hints[name]):
            taken[name] = run_command(hints[name], values)
        elif name in values:
            value = values[name]
            are_pairs = isinstance(value, list) and value and isinstance(value[0], tuple)
            taken[name] = dict(value) if are_pairs else value
    return source(**taken)


def _add_parameters(
    parser: ArgumentParser,
    target: _ActionsContainer,
    source: Callable[..., Any],
    overrides: Mapping[str, Mapping[str, Any]],
) -> None:
    """Add the parameters of a function, or the fields of a dataclass."""
    helps = dict(_ARGUMENT_TEXT.findall(inspect.getdoc(source) or ""))
    types = get_type_hints(source)
    hints = get_type_hints(source, include_extras=True)
    for name, parameter in inspect.signature(source).parameters.items():
        if is_dataclass(types[name]):
            group = parser.add_argument_group(_summary(inspect.getdoc(types[name])))
            of_fields = getattr(hints[name], "__metadata__", [overrides])[0]
            _add_parameters(parser, group, types[name], of_fields)
            continue
        is_option = parameter.kind is parameter.KEYWORD_ONLY or is_dataclass(source)
        keywords = dict(overrides.get(name) or _keywords(hints[name], is_option=is_option))
        text = helps.get(name, "").replace("``", "").removesuffix(".")
        text += _shown_default(parameter.default)
        text = _PARAMETER.sub(lambda word: "--" + word[0].replace("_", "-"), text)
        keywords = {"help": text.replace("%", "%%"), "default": SUPPRESS} | keywords
        is_optional = parameter.default is not parameter.empty
        if is_option:
            keywords |= {"required": not is_optional, "dest": name}
        elif is_optional:
            keywords.setdefault("nargs", "?")
        flag = keywords.pop("flag", f"--{name.replace('_', '-')}")
        target.add_argument(flag if is_option else name, **keywords)


def _keywords(hint: Any, *, is_option: bool) -> Mapping[str, Any]:
    """Return the arguments of ``add_argument`` for a type."""
    inner = get_args(hint)
    if get_origin(hint) is Annotated and isinstance(inner[1], Keywords):
        keywords: Keywords = inner[1]
        return keywords
    if type(None) in inner:
        return _keywords(inner[0], is_option=is_option)
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is Literal:
        return {"choices": inner}
    if get_origin(hint) is Sequence:
        nargs = "+" if is_option else "*"
        return {**_keywords(inner[0], is_option=is_option), "nargs": nargs}
    metavar = "N" if is_option and hint is not str else None
    return {"type": partial(convert, hint), "metavar": metavar}


def convert(hint: Any, text: str | list[str]) -> Any:
    """Return a word of the command line, or its parts, as a value of a type."""
    try:
        return msgspec.convert(text, hint, strict=False)
    except msgspec.ValidationError as error:
        expected = str(error).lower().partition(", got")[0]
        raise ArgumentTypeError(f"{expected}, got {text!r}") from error


def _shown_default(default: Any) -> str:
    is_shown = type(default) in (str, int, float) and default not in ("", float("inf"))
    return f" (default: {default})" if is_shown else ""


def _summary(doc: str | None) -> str:
    """Return the first paragraph of a docstring."""
    return (doc or "").partition("\n\n")[0].removesuffix(".")


def key_value(text: str) -> tuple[str, str]:
    """Parse a ``KEY=VALUE`` pair."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return key, value


def _storage_option(text: str) -> tuple[str, Any]:
    key, value = key_value(text)
    try:
        # Python's words, too: the word False would be true.
        return key, json.loads(value.lower() if value in ("True", "False") else value)
    except ValueError:
        return key, value


def from_file(read: Callable[[str], Any], metavar: str = "FILE") -> Keywords:
    """Return the keywords of the content of a file; read errors are not usage errors."""

    def parse(url: str) -> Any:
        try:
            return read(url)
        except PCRError as error:
            # argparse would replace the message of a ValueError with its own.
            raise PCRError(str(error)) from error

    return Keywords(type=parse, metavar=metavar)


def pairs(parse: Callable[[str], Any], metavar: str = "KEY=VALUE") -> Keywords:
    """Return the keywords of a repeatable option, whose (key, value) pairs make a dict."""
    return Keywords(type=parse, metavar=metavar, action="append")


KIND = pairs(key_value, "FIELD=KIND") | {
    "flag": "--kind",
    "help": "What a field holds: mask, boxes:xywh, keypoints, text, class, array... "
    "(FIELD:PATH for a part of a JSON field); repeatable (default: by its name)",
}
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
# Per rank; limited so that a typo cannot exhaust memory.
Parallel = Annotated[int, Meta(ge=1, le=4096)]
ParallelOrZero = Annotated[int, Meta(ge=0, le=4096)]
Positive = Annotated[float, Meta(gt=0, lt=1e18)]
parse_scan: Any = partial(
    convert, Annotated[int, Meta(ge=1)] | Annotated[float, Meta(gt=0, lt=1)] | Literal["full"]
)
ScanOrFraction = Annotated[Scan | float, Keywords(type=parse_scan, metavar="SCAN")]
Fraction = Annotated[float, Meta(gt=0, le=1)]
# Given in MB/s, stored in bytes per second.
MEGABYTES = Keywords(type=lambda text: 1e6 * convert(Positive, text), metavar="MB/s")
Bandwidth = Annotated[float, MEGABYTES]
Picture = Annotated[str, Keywords(metavar="FILE")]
StorageOptions = Annotated[dict[str, Any] | None, pairs(_storage_option)]
