"""Build an argparse parser from the signatures and docstrings of functions.

A command is a function. Its positional parameters are arguments, its keyword-only parameters are
options, and a parameter whose type is a dataclass expands to one option per field. Types validate
the values: ``Annotated[type, keywords]`` passes keywords to ``add_argument``, and those of a
dataclass are a dict by field. Defaults come from the signature and help texts from the docstring.
A command returns a :class:`Report`.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import shutil
import textwrap
from argparse import (
    SUPPRESS,
    Action,
    ArgumentParser,
    ArgumentTypeError,
    Namespace,
    RawDescriptionHelpFormatter,
    _ActionsContainer,
)
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from ..errors import PCRError
from ..format.scan import FULL, Scan, is_fraction

_ARGUMENT_TEXT = re.compile(r"^(\w+): (.*(?:\n .*)*)", re.MULTILINE)


class Report(NamedTuple):
    """The result of a command.

    Attributes:
        figures: The result for ``--json``: dicts, lists, named tuples, numbers and strings.
        text: The result as text for people.
        has_failed: Whether the exit status is 1.
    """

    figures: Any
    text: str
    has_failed: bool = False


class Keywords(dict[str, Any]):
    """Keywords of ``ArgumentParser.add_argument``, hashable as ``typing`` requires in a union."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # hashed by identity


class UsageError(Exception):
    """Options that are valid individually but not together."""


class _AddPair(Action):
    """Collect (key, value) pairs of a repeated option in a dict."""

    def __call__(
        self, _: ArgumentParser, namespace: Namespace, pair: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), **dict([pair])})


def add_command(commands: Any, function: Callable[..., Report]) -> None:
    """Add a function as a subcommand of a parser."""
    doc = inspect.getdoc(function) or ""
    summary = _summary(function)
    parser = commands.add_parser(
        function.__name__,
        help=summary,
        # The raw formatter keeps the example on one line.
        description=textwrap.fill(summary, shutil.get_terminal_size().columns - 2),
        epilog=f"example:\n  {_section(doc, 'Example')}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.set_defaults(function=function, parser=parser)
    added = _add_parameters(parser, parser, function, {})
    # Docstrings name parameters as Python does; help texts name options.
    options = {action.dest: action.option_strings[0] for action in added if action.option_strings}
    for action in added:
        action.help = re.sub(
            r"\b[a-z]+(_[a-z]+)+\b", lambda word: options.get(word[0], word[0]), action.help or ""
        )
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
            taken[name] = values[name]
    return source(**taken)


def _add_parameters(
    parser: ArgumentParser,
    target: _ActionsContainer,
    source: Callable[..., Any],
    overrides: Mapping[str, Mapping[str, Any]],
) -> list[Action]:
    """Add the parameters of a function, or the fields of a dataclass, and return the actions."""
    doc = inspect.getdoc(source) or ""
    texts = _ARGUMENT_TEXT.findall(_section(doc, "Attributes" if is_dataclass(source) else "Args"))
    helps = {name: " ".join(text.replace("``", "").split()) for name, text in texts}
    hints = get_type_hints(source, include_extras=True)
    added: list[Action] = []
    for name, parameter in inspect.signature(source).parameters.items():
        hint, *metadata = get_args(hints[name]) if _is_annotated(hints[name]) else [hints[name]]
        if is_dataclass(hint):
            group = parser.add_argument_group(_summary(hint).removesuffix("."))
            of_fields = metadata[0] if metadata else overrides
            # mypy does not narrow a hint by is_dataclass.
            added += _add_parameters(parser, group, hint, of_fields)  # type: ignore[arg-type]
            continue
        is_option = parameter.kind is parameter.KEYWORD_ONLY or is_dataclass(source)
        text = helps.get(name, "").removesuffix(".") + _shown_default(parameter.default)
        keywords: dict[str, Any] = {"help": text.replace("%", "%%"), "default": SUPPRESS}
        keywords |= overrides.get(name) or _keywords(hints[name], is_option=is_option)
        is_optional = parameter.default is not parameter.empty
        if is_option:
            keywords |= {"required": not is_optional, "dest": name}
        elif is_optional:
            keywords.setdefault("nargs", "?")
        words = f"--{name.replace('_', '-')}" if is_option else name
        added.append(target.add_argument(words, **keywords))
    return added


def _is_annotated(hint: Any) -> bool:
    return get_origin(hint) is Annotated


def _keywords(hint: Any, *, is_option: bool) -> Mapping[str, Any]:
    """Return the arguments of ``add_argument`` for a type."""
    if _is_annotated(hint):
        keywords: Mapping[str, Any] = get_args(hint)[1]
        return keywords
    if type(None) in get_args(hint):
        return _keywords(get_args(hint)[0], is_option=is_option)
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is not None:
        nargs = "+" if is_option else "*"
        return {**_keywords(get_args(hint)[0], is_option=is_option), "nargs": nargs}
    return {"type": hint, "metavar": "N" if hint is int and is_option else None}


def _shown_default(default: Any) -> str:
    if isinstance(default, bool) or not isinstance(default, str | int | float):
        return ""
    return "" if default in ("", math.inf) else f" (default: {default})"


def _summary(source: Any) -> str:
    """Return the first paragraph of a docstring."""
    return " ".join((inspect.getdoc(source) or "").partition("\n\n")[0].split())


def _section(doc: str, name: str) -> str:
    found = re.search(rf"^{name}:\n((?: +.*\n?|\n)*)", doc, re.MULTILINE)
    return textwrap.dedent(found[1]).strip() if found else ""


def parse_scan(text: str) -> Scan | float:
    """Parse a scan number, ``full``, or a fraction of the full bytes."""
    if text == FULL or text.isdecimal():
        return FULL if text == FULL else int(text)
    with suppress(ValueError):
        if is_fraction(fraction := float(text)):
            return fraction
    raise ArgumentTypeError(f"expected a scan number or 'full', got {text!r}")


def between(least: int, most: int) -> Keywords:
    """Return the keywords of an integer in ``[least, most]``."""

    def parse(text: str) -> int:
        with suppress(ValueError):
            if least <= (value := int(text)) <= most:
                return value
        raise ArgumentTypeError(f"expected a number from {least} to {most}, got {text!r}")

    return Keywords(type=parse, metavar="N")


def above_zero(factor: float) -> Callable[[str], float]:
    """Return a parser of positive numbers in units of ``factor``."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            if 0 < (value := float(text) * factor) < math.inf:
                return value
        raise ArgumentTypeError(f"expected a number above 0, got {text!r}")

    return parse


def key_value(text: str) -> tuple[str, str]:
    """Parse a ``KEY=VALUE`` pair."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return key, value


def _storage_option(text: str) -> tuple[str, Any]:
    key, value = key_value(text)
    try:
        return key, json.loads(value)
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
    return Keywords(type=parse, metavar=metavar, action=_AddPair)


ScanOrFraction = Annotated[Scan | float, Keywords(type=parse_scan, metavar="SCAN")]
Count = Annotated[int, between(1, 1 << 20)]
# Per rank; limited so that a typo cannot exhaust memory.
Parallel = Annotated[int, between(1, 4096)]
ParallelOrZero = Annotated[int, between(0, 4096)]
Positive = Annotated[float, Keywords(type=above_zero(1), metavar="NUMBER")]
# Given in MB/s, stored in bytes per second.
MEGABYTES = Keywords(type=above_zero(1e6), metavar="MB/s")
Bandwidth = Annotated[float, MEGABYTES]
Picture = Annotated[str, Keywords(metavar="FILE")]
StorageOptions = Annotated[dict[str, Any] | None, pairs(_storage_option)]
