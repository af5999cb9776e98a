"""What the commands share: parser parts and progress."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from typing import Any, Self

import tqdm

from ..format.scan import FULL, Scan

_SECONDS_PER_LOG = 5.0


def add_command(
    commands: Any, name: str, run: Any, text: str, example: str
) -> argparse.ArgumentParser:
    """A sub-command with its help and an example."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    return command


def scan_argument(text: str) -> Scan:
    """The type of ``--scan``."""
    if text != FULL and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a scan number or 'full', got {text!r}")
    return FULL if text == FULL else int(text)


def at_least(least: float, kind: type = int) -> Callable[[str], Any]:
    """The type of an argument that is a number of at least ``least``; above it if that is 0 and the number a fraction."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (value > 0 if kind is float and least == 0 else value >= least):
            raise argparse.ArgumentTypeError(
                f"expected a number {'above' if kind is float else 'of at least'} {least}, got {text!r}"
            )
        return value

    return parse


class Progress:
    """A bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, name: str, unit: str) -> None:
        self.name, self.unit, self.done = name, unit, 0
        self.bar: Any = None
        self.started = self.logged = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def __call__(self, done: int, total: int) -> None:
        """Say how far it is."""
        if sys.stderr.isatty():
            self.bar = self.bar or tqdm.tqdm(
                desc=self.name, total=total, unit=f" {self.unit}", smoothing=0.1
            )
            self.bar.update(done - self.done)
        elif time.monotonic() - self.logged > _SECONDS_PER_LOG:
            self.logged = time.monotonic()
            rate = done / (self.logged - self.started)
            left = human_seconds((total - done) / rate) if rate else "?"
            print(
                f"{self.name}: {done}/{total} {self.unit}, {rate:.0f} {self.unit}/s, {left} left",
                file=sys.stderr,
            )
        self.done = done


def human_seconds(seconds: float) -> str:
    """A duration for people.

    >>> human_seconds(59), human_seconds(3700)
    ('59 s', '1 h 2 min')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
