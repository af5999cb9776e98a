"""Build an argparse parser from the signatures and docstrings of functions.

A command is a function. Its positional parameters are arguments, its keyword-only parameters are
options, and a parameter whose type is a dataclass expands to one option per field. Types validate
the values; defaults come from the signature and help texts from the docstring. A command returns a
:class:`Report`.
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
from collections.abc import Callable, Mapping, Sequence
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


class UsageError(Exception):
    """Options that are valid individually but not together."""


class Kind(NamedTuple):
    """A converter from a command-line word to a value.

    Attributes:
        parse: Function that returns the value or raises ``ArgumentTypeError``.
        metavar: Placeholder in the help text; ``None`` uses the option's name.
        choices: All valid words.
        is_pair: Whether the option is repeatable; its (key, value) pairs are collected in a dict.
    """

    parse: Callable[[str], Any]
    metavar: str | None = None
    choices: Sequence[str] | None = None
    is_pair: bool = False


class _AddPair(Action):
    def __call__(
        self, _: ArgumentParser, namespace: Namespace, pair: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), **dict([pair])})


def add_command(commands: Any, name: str, function: Callable[..., Report]) -> None:
    """Add a function as a subcommand of a parser."""
    doc = inspect.getdoc(function) or ""
    summary = _summary(function)
    parser = commands.add_parser(
        name,
        help=summary,
        # The raw formatter keeps the example on one line.
        description=textwrap.fill(summary, shutil.get_terminal_size().columns - 2),
        epilog=f"example:\n  {_section(doc, 'Example')}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.set_defaults(function=function, parser=parser)
    _add_parameters(parser, parser, function, {})
    parser.add_argument(
        "--json", action="store_true", default=SUPPRESS, help="Print the result as JSON"
    )


def run_command(function: Callable[..., Any], values: dict[str, Any]) -> Any:
    """Call a function, or construct a dataclass, with its parsed values."""
    taken = {}
    for name, hint, _ in _parameters(function, {}):
        if is_dataclass(hint):
            taken[name] = run_command(hint, values)  # type: ignore[arg-type]  # it is a class
        elif name in values:
            taken[name] = values[name]
    return function(**taken)


def _parameters(
    source: Callable[..., Any], kinds: Mapping[str, Kind]
) -> list[tuple[str, Any, Any]]:
    """Yield (name, type, parameter) per parameter; an option's type may be its ``Kind``."""
    hints = get_type_hints(source, include_extras=True)
    return [
        (name, kinds.get(name) or _bare(hints[name]), parameter)
        for name, parameter in inspect.signature(source).parameters.items()
    ]


def _bare(hint: Any) -> Any:
    """Strip ``None`` from a type; return the ``Kind`` of an annotated type if it has one."""
    options = [option for option in get_args(hint) if option is not type(None)]
    if get_origin(hint) is Annotated:
        return options[1] if isinstance(options[1], Kind) else options[0]
    is_optional = type(None) in get_args(hint)
    return _bare(options[0]) if is_optional else hint


def _add_parameters(
    parser: ArgumentParser,
    target: _ActionsContainer,
    source: Callable[..., Any],
    kinds: Mapping[str, Kind],
) -> None:
    doc = inspect.getdoc(source) or ""
    texts = _ARGUMENT_TEXT.findall(_section(doc, "Attributes" if is_dataclass(source) else "Args"))
    helps = {name: " ".join(text.replace("``", "").split()) for name, text in texts}
    hints = get_type_hints(source, include_extras=True)
    for name, hint, parameter in _parameters(source, kinds):
        if is_dataclass(hint):
            # A command may parse fields differently from what their types say.
            overridden = get_args(hints[name])[1] if get_origin(hints[name]) is Annotated else kinds
            group = parser.add_argument_group(_summary(hint).removesuffix("."))
            _add_parameters(parser, group, hint, overridden)  # type: ignore[arg-type]
            continue
        is_option = parameter.kind is parameter.KEYWORD_ONLY or is_dataclass(source)
        options = _argparse_options(hint, is_option=is_option)
        if not is_option and parameter.default is not parameter.empty:
            options["nargs"] = options.get("nargs", "?")
        elif is_option:
            options["required"] = parameter.default is parameter.empty
            options["dest"] = name
        words = f"--{name.replace('_', '-')}" if is_option else name
        text = helps.get(name, "").removesuffix(".") + _shown_default(parameter.default)
        target.add_argument(words, help=text.replace("%", "%%"), default=SUPPRESS, **options)


def _argparse_options(hint: Any, *, is_option: bool) -> dict[str, Any]:
    if isinstance(hint, Kind):
        action = {"action": _AddPair} if hint.is_pair else {}
        return {"type": hint.parse, "metavar": hint.metavar, "choices": hint.choices} | action
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is not None:
        nargs = "+" if is_option else "*"
        return _argparse_options(get_args(hint)[0], is_option=is_option) | {"nargs": nargs}
    return {"type": hint, "metavar": "N" if hint is int and is_option else None}


def _shown_default(default: Any) -> str:
    is_shown = isinstance(default, str | int | float) and default not in ("", math.inf)
    return f" (default: {default})" if is_shown and default is not False else ""


def _summary(source: Any) -> str:
    """Return the first paragraph of a docstring."""
    return " ".join((inspect.getdoc(source) or "").partition("\n\n")[0].split())


def _section(doc: str, name: str) -> str:
    found = re.search(rf"^{name}:\n((?: +.*\n?|\n)*)", doc, re.MULTILINE)
    return textwrap.dedent(found[1]).strip() if found else ""


def parse_scan(text: str) -> Scan:
    """Parse a scan number or ``full``."""
    if text == FULL or text.isdecimal():
        return FULL if text == FULL else int(text)
    raise ArgumentTypeError(f"expected a scan number or 'full', got {text!r}")


def _scan_or_fraction(text: str) -> Scan | float:
    with suppress(ValueError):
        if is_fraction(fraction := float(text)):
            return fraction
    return parse_scan(text)


def between(least: int, most: int) -> Kind:
    """Return a ``Kind`` for integers in ``[least, most]``."""

    def parse(text: str) -> int:
        with suppress(ValueError):
            if least <= (value := int(text)) <= most:
                return value
        raise ArgumentTypeError(f"expected a number from {least} to {most}, got {text!r}")

    return Kind(parse, "N")


def _above_zero(factor: float) -> Callable[[str], float]:
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


def from_file(read: Callable[[str], Any], metavar: str = "FILE") -> Kind:
    """Return a ``Kind`` for the content of a file; read errors are not usage errors."""

    def parse(url: str) -> Any:
        try:
            return read(url)
        except PCRError as error:
            # argparse would replace the message of a ValueError with its own.
            raise PCRError(str(error)) from error

    return Kind(parse, metavar)


ScanNumber = Annotated[Scan, Kind(parse_scan, "SCAN")]
ScanOrFraction = Annotated[Scan | float, Kind(_scan_or_fraction, "SCAN")]
Count = Annotated[int, between(1, 1 << 20)]
# Per rank; limited so that a typo cannot exhaust memory.
Parallel = Annotated[int, between(1, 4096)]
ParallelOrZero = Annotated[int, between(0, 4096)]
Positive = Annotated[float, Kind(_above_zero(1), "NUMBER")]
# Given in MB/s, stored in bytes per second.
Bandwidth = Annotated[float, Kind(_above_zero(1e6), "MB/s")]
StorageOptions = Annotated[dict[str, Any] | None, Kind(_storage_option, "KEY=VALUE", is_pair=True)]
