"""The command line: ``pcrshard COMMAND``."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO

import msgspec

from .. import __version__
from ..errors import PCRError
from ..redaction import PIPE, redact
from . import checkpoint
from .check import check
from .encode import encode
from .index import index
from .inspect import fidelity, info, plan
from .parser import Count, Report, UsageError, add_command, run_command
from .reading import cache, card, export, stage, verify


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0 on success, 1 if the command failed or found problems, 2 for a usage error.
    """
    # File names need not be valid UTF-8; escape them, as standard error does.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    words = sys.argv[1:] if argv is None else argv
    with _redacted(words):
        return _run(words)


class _RedactingStream:
    """A text stream that redacts everything written to it."""

    def __init__(self, stream: TextIO, urls: tuple[str, ...]) -> None:
        self._stream = stream
        self._urls = urls

    def write(self, text: str) -> int:
        self._stream.write(redact(text, *self._urls))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _redacted(words: Sequence[str]) -> Iterator[None]:
    """Redact secrets in URLs from the command line in all output."""
    urls = tuple(word for word in words if "://" in word or word.startswith(PIPE))
    with open(os.devnull, "w") as nowhere:
        # A stream closed by the caller (>&-) is None.
        out = _RedactingStream(sys.stdout or nowhere, urls)
        err = _RedactingStream(sys.stderr or nowhere, urls)
        log = logging.getLogger("pcrshard")
        handlers, log.handlers = log.handlers, [logging.StreamHandler(err)]
        try:
            with redirect_stdout(out), redirect_stderr(err):
                yield
        finally:
            log.handlers = handlers


def _run(words: Sequence[str]) -> int:
    """Parse a command, run it, and print its report."""
    name = " ".join(["pcrshard", *words[:1]])
    try:
        args = _parse(words)
        report: Report = run_command(args.function, vars(args))
        if "json" in args:
            text = json.dumps(msgspec.to_builtins(report.figures))
            # JSON has no NaN and no infinity.
            print(json.dumps(json.loads(text, parse_constant=lambda _: None), indent=1))
        else:
            print(printable(report.as_text()))
        sys.stdout.flush()
    except UsageError as error:
        args.parser.error(str(error))
    except (PCRError, ValueError) as error:
        # Functions of the package raise ValueError for invalid arguments.
        return _fail(name, str(error))
    except ImportError as error:
        return _fail(name, f"{error}: pip install 'pcrshard[train]'")
    except OSError as error:
        # Otherwise Python would report another error when closing standard output.
        with suppress(OSError):  # a stream without a file descriptor cannot fail there
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # The reader closed the pipe (| head), or the disk is full.
        return 0 if isinstance(error, BrokenPipeError) else _fail(name, str(error))
    except KeyboardInterrupt as error:
        advice = "".join(f"; {text}" for text in error.args)
        print(f"{name}: stopped{advice}", file=sys.stderr)
        return 130
    return int(report.has_failed)


def _fail(name: str, message: str) -> int:
    print(f"{name}: {printable(message)}", file=sys.stderr)
    return 1


def printable(text: str) -> str:
    """Escape terminal control characters; names in a dataset or store are untrusted."""
    return "".join(
        char if char.isprintable() or char in "\t\n" else ascii(char)[1:-1] for char in text
    )


def _parse(words: Sequence[str]) -> Namespace:
    """Parse a command line; usage errors show the usage of the subcommand."""
    args, unknown = build_parser().parse_known_args(words)
    if unknown:
        is_option = any(word.startswith("-") for word in unknown)
        advice = "" if is_option else "; quote a pattern, so that the shell leaves it as it is"
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}{advice}")
    return args


def build_parser() -> ArgumentParser:
    """Build the parser for all commands."""
    parser = ArgumentParser(
        prog="pcrshard", description="Read only the JPEG fidelity that training needs."
    )
    parser.add_argument("--version", action="version", version=f"pcrshard {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        add_command(commands, command)
    text = "List, check, export, copy and delete the checkpoints of a store."
    stores = commands.add_parser("checkpoint", help=text, description=text)
    actions = stores.add_subparsers(required=True, metavar="ACTION")
    for action in checkpoint.COMMANDS:
        add_command(actions, action)
    return parser


def demo(photos: str | None = None, *, out: str = "demo-output", epochs: Count = 6) -> Report:
    """Encode photographs, show the cost of each scan, and train at scan 2 and at full fidelity.

    Example:
        pcrshard demo my-photos --out demo-output

    Args:
        photos: Folder of JPEGs with one subfolder per class, or with train/ and val/ folders of
            these (default: crops of two sample photographs).
        out: Output folder for the shards and the plot.
        epochs: Epochs of each training run.
    """
    # Imported lazily: torch takes two seconds, which other commands should not pay.
    from .demo import run_demo

    return run_demo(photos, out, epochs=epochs)


COMMANDS = (encode, index, info, verify, check, export, stage, plan, cache, fidelity, card, demo)
