"""What the commands share: parser parts, and the dataset that a command is given."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import methodcaller
from typing import Any, NamedTuple

from .. import storage
from ..format.dataset_index import DatasetIndex, ShardEntry
from ..format.scan import FULL, Scan, is_fraction
from ..format.tar_members import TRAILER
from ..reading.dataset_folder import Opened, open_dataset
from ..reading.shard import Shard

Run = Callable[[Namespace], object]
# Makes a value of a word, or raises ArgumentTypeError.
Kind = Callable[[str], object]
# Adds itself to a parser, or to a group of one.
Argument = Callable[[Any], object]


class Command(NamedTuple):
    """A sub-command.

    Attributes:
        name: The command's name.
        text: One sentence of help.
        example: A line that can be copied; a test parses it.
        run: What the command does; its result, if any, is the exit status.
        arguments: The command's arguments, in the order of the help.
    """

    name: str
    text: str
    example: str
    run: Run
    arguments: Sequence[Argument]

    def add_to(self, commands: Any) -> None:
        """Add the command to the sub-parsers of the main parser."""
        parser = commands.add_parser(
            self.name,
            help=self.text,
            description=self.text,
            epilog=f"example:\n  {self.example}",
            formatter_class=RawDescriptionHelpFormatter,
        )
        parser.set_defaults(run=self.run, parser=parser)
        for add in self.arguments:
            add(parser)


def argument(name: str, text: str, **options: Any) -> Argument:
    """Any argument, with the options of argparse."""
    return methodcaller("add_argument", name, help=text, **options)


def flag(name: str, text: str) -> Argument:
    """A switch, off by default."""
    return argument(name, text, action="store_true")


def choice(
    name: str,
    choices: Sequence[str],
    text: str,
) -> Argument:
    """An option that is one of some words, by default the first."""
    return argument(name, text, choices=choices, default=choices[0])


def value(
    name: str,
    text: str,
    metavar: str,
    kind: Kind = str,
    default: object = None,
) -> Argument:
    """An option with a value."""
    return argument(
        name,
        text,
        metavar=metavar,
        type=kind,
        default=default,
    )


def either(*arguments: Argument) -> Argument:
    """Arguments of which only one may be given."""

    def add(parser: ArgumentParser) -> None:
        group = parser.add_mutually_exclusive_group()
        for each in arguments:
            each(group)

    return add


def scan_argument(text: str) -> Scan:
    """The type of ``--scan``."""
    if text == FULL:
        return FULL
    if text.isdecimal():
        return int(text)
    raise ArgumentTypeError(f"expected a scan number or 'full', got {text!r}")


def scan_or_fraction(text: str) -> Scan | float:
    """The type of a ``--scan`` that may be a fraction of the full bytes."""
    with suppress(ValueError):
        if is_fraction(fraction := float(text)):
            return fraction
    return scan_argument(text)


def at_least(least: int) -> Kind:
    """The type of an argument that is a whole number of at least ``least``."""

    def parse(text: str) -> int:
        with suppress(ValueError):
            if (value := int(text)) >= least:
                return value
        raise ArgumentTypeError(f"expected a number of at least {least}, got {text!r}")

    return parse


def positive(text: str) -> float:
    """The type of an argument that is a number above 0."""
    with suppress(ValueError):
        if (value := float(text)) > 0:
            return value
    raise ArgumentTypeError(f"expected a number above 0, got {text!r}")


def megabytes(text: str) -> float:
    """The type of ``--bandwidth``: given in MB/s, kept in bytes a second."""
    return positive(text) * 1e6


JSON = flag("--json", "print JSON")
DATASET = argument("src", "dataset folder or its pcr.json, local or a URL")
DATASET_OR_SHARD = argument("src", "dataset folder, its pcr.json, or one shard")


def print_json(value: object) -> None:
    """Print a report for programs."""
    print(json.dumps(value, indent=1))


def sizes(index: DatasetIndex) -> str:
    """How large a dataset is, in a sentence."""
    return f"{index.num_samples} samples in {len(index.shards)} shards"


def is_shard(url: str) -> bool:
    """Whether a command was given one shard, and not a dataset."""
    return storage.file_name(url).endswith(".tar")


def open_source(url: str) -> Opened:
    """A dataset, or one shard as a dataset: its index, and the URLs of its shards.

    Raises:
        StorageError: There is no dataset index.
    """
    if is_shard(url):
        return _index_of(Shard(url)), [url]
    return open_dataset(url)


def _index_of(shard: Shard) -> DatasetIndex:
    head = shard.head
    entry = ShardEntry(
        storage.file_name(shard.url),
        head.num_samples,
        head.crc32c,
        head.prefix_stop(FULL) + len(TRAILER),
        # Nobody compares a single shard with a dataset index, which would know its checksum.
        0,
        head.prefix_stops,
        head.index_stop,
    )
    return DatasetIndex(shard.index.schema.script, head.num_groups, (entry,))
