"""What the commands for stores of checkpoints share: arguments, bars, and how results are told."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import PCRError
from .progress import ProgressBar

if TYPE_CHECKING:
    from ..checkpoint import DeltaStore

Run = Callable[[argparse.Namespace], int]


def add_command(
    inner: Any,
    name: str,
    run: Run,
    text: str,
) -> argparse.ArgumentParser:
    """A command of ``pcrshard checkpoint``, with ``--json``."""
    command: argparse.ArgumentParser = inner.add_parser(name, help=text, description=text)

    def printably(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except PCRError as error:
            # An error may hold the name of a tensor of another user's store.
            raise type(error)(printable(str(error))) from error.__cause__

    command.set_defaults(run=printably)
    command.add_argument("--json", action="store_true", help="print JSON")
    return command


def add_store(command: argparse.ArgumentParser) -> None:
    """The argument that names the store."""
    command.add_argument("store", help="the store's folder, local or a URL")


def open_store(args: argparse.Namespace) -> DeltaStore:
    """The store that the arguments name."""
    # torch takes a second to import: other commands must not wait for it.
    from ..checkpoint import DeltaStore

    return DeltaStore(args.store)


def bar(name: str, unit: str) -> ProgressBar:
    """A bar on a terminal, nothing elsewhere: what these commands print is their result."""
    return ProgressBar(name, unit, log_seconds=math.inf)


def report(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Print the figures of a result, as JSON if that was asked for."""
    if args.json:
        print(json.dumps(figures))
    else:
        print(printable(", ".join(f"{name}={value}" for name, value in figures.items())))


def printable(text: str) -> str:
    """Escape what a terminal would obey: a store's names and metrics may be another user's."""
    return "".join(
        char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text
    )


def counted(versions: int) -> str:
    """Say how many versions there are.

    >>> counted(1), counted(3)
    ('1 version', '3 versions')
    """
    return f"{versions} version{'' if versions == 1 else 's'}"


def ratio(raw: int, stored: int) -> str:
    """How many times smaller something is.

    >>> ratio(100, 10), ratio(100, 0)
    ('10.0x', '-')
    """
    return f"{raw / stored:.1f}x" if stored else "-"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text.

    >>> print(text_table(("a", "b"), [("1", "22"), ("333", "4")]))
    a    b
    1    22
    333  4
    """
    rows = [[printable(cell.replace("\n", " ")) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
