"""The command line: ``pcrshard COMMAND``."""

from __future__ import annotations

import io
import logging
import os
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from .. import __version__
from ..errors import PCRError
from ..redaction import PIPE, RedactingStream
from . import checkpoint
from .arguments import Command, argument, at_least, value
from .card import CARD
from .encode import ENCODE
from .inspect import FIDELITY, INFO, PLAN
from .reading import CACHE, EXPORT, STAGE, VERIFY


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0 if all is well, 1 for a problem found or an error, 2 for wrong usage.
    """
    _print_any_name()
    words = sys.argv[1:] if argv is None else argv
    with _redacted(words):
        try:
            return _run(words)
        except KeyboardInterrupt:
            print("pcrshard: stopped", file=sys.stderr)
            return 130


def _print_any_name() -> None:
    """A file's name need not be UTF-8, and must not stop the report about it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def _redacted(words: Sequence[str]) -> Iterator[None]:
    """What is printed may be shown: no secret of a URL that was given is in it."""
    urls = tuple(word for word in words if "://" in word or word.startswith(PIPE))
    out = RedactingStream(sys.stdout, urls)
    err = RedactingStream(sys.stderr, urls)
    with redirect_stdout(out), redirect_stderr(err):
        yield


def _run(words: Sequence[str]) -> int:
    """Parse a command and run it."""
    args = _parse(words)
    logging.getLogger("pcrshard").handlers = [logging.StreamHandler(sys.stderr)]
    try:
        status = int(args.run(args) or 0)
        sys.stdout.flush()
    except (PCRError, KeyboardInterrupt) as error:
        return _tell(args.command, error)
    except OSError as error:
        # Python would complain once more when it closes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # The reader has seen enough (| head), or the report does not fit on a disk.
        return 0 if isinstance(error, BrokenPipeError) else _tell(args.command, error)
    return status


def _tell(command: str, error: BaseException) -> int:
    """Print why a command has ended; returns its exit status."""
    if isinstance(error, PCRError | OSError):
        print(f"pcrshard {command}: {error}", file=sys.stderr)
        return 1
    # What the command knows of how to go on.
    advice = "".join(f"; {text}" for text in error.args)
    print(f"pcrshard {command}: stopped{advice}", file=sys.stderr)
    return 130


def _parse(words: Sequence[str]) -> Namespace:
    """The command and its options; what is wrong is told with the usage of the command itself."""
    args, unknown = build_parser().parse_known_args(words)
    if unknown:
        # argparse itself would show the usage of the main parser.
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}{_advice(unknown)}")
    return args


def _advice(unknown: Sequence[str]) -> str:
    if any(word.startswith("-") for word in unknown):
        return ""
    return "; quote a pattern, so that the shell leaves it as it is"


def build_parser() -> ArgumentParser:
    """The parser of all commands; ``run`` of what it parses is the command's function."""
    parser = ArgumentParser(
        prog="pcrshard", description="Read only the JPEG fidelity that training needs."
    )
    parser.add_argument("--version", action="version", version=f"pcrshard {__version__}")
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="COMMAND",
    )
    for command in COMMANDS:
        command.add_to(commands)
    checkpoint.register(commands)
    return parser


def _complete(args: Namespace) -> None:
    import shtab

    parser = build_parser()
    for action in _all_arguments(parser):
        # A dataset, a source, a target: whatever has no words of its own may be a file.
        if not action.option_strings and action.choices is None:
            vars(action)["complete"] = shtab.FILE
    print(shtab.complete(parser, args.shell))


def _all_arguments(parser: ArgumentParser) -> Iterator[Action]:
    """The arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        for command in action.choices.values() if isinstance(action.choices, dict) else ():
            yield from _all_arguments(command)


def _demo(args: Namespace) -> None:
    # It brings torch, two seconds that the other commands should not pay.
    from .demo import run_demo

    run_demo(args.photos, args.out, epochs=args.epochs)


DEMO = Command(
    "demo",
    "Encode photographs, show what each scan costs, train from scan 2 and from full fidelity.",
    "pcrshard demo my-photos --out demo-output",
    _demo,
    [
        argument(
            "photos",
            "folder of JPEGs, one sub-folder a class, or train/ and val/ of these"
            " (default: crops of two sample photographs)",
            nargs="?",
        ),
        value(
            "--out",
            "folder for shards and picture (default: %(default)s)",
            "OUT",
            str,
            "demo-output",
        ),
        value(
            "--epochs", "epochs of each training (default: %(default)s)", "EPOCHS", at_least(1), 6
        ),
    ],
)
COMPLETION = Command(
    "completion",
    "Print what makes a shell complete the commands, their options and files.",
    "pcrshard completion bash",
    _complete,
    [argument("shell", "whose completion", choices=("bash", "zsh", "tcsh"))],
)
COMMANDS = (
    *(ENCODE, INFO, VERIFY, EXPORT, STAGE, PLAN, CACHE, FIDELITY, CARD, DEMO),
    COMPLETION,
)
