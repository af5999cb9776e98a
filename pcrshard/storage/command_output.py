"""Prefixes of a command's output, WebDataset's ``pipe:`` URLs."""

from __future__ import annotations

import io
import os
import select
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from signal import SIGKILL, SIGTERM
from typing import IO, NamedTuple

from ..errors import StorageError, TruncatedShard
from .retry import Cancel

_SKIP_BYTES = 1 << 20
_PATIENCE = 2.0
_POLL_MILLISECONDS = 200


class Output(NamedTuple):
    """A running command."""

    process: subprocess.Popen[bytes]
    stdout: io.FileIO
    stderr: IO[bytes]


@contextmanager
def _run(command: str) -> Iterator[Output]:
    """Run a shell command; the ``with`` block's end ends it, however far it came."""
    with tempfile.TemporaryFile() as stderr:
        process = _start(command, stderr)
        stdout = process.stdout
        assert isinstance(stdout, io.FileIO)  # bufsize=0 gives a raw file
        try:
            with stdout:
                yield Output(process, stdout, stderr)
        finally:
            _end(process)


def _start(command: str, stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S602  # the user's own command line
        command,
        shell=True,
        stdout=subprocess.PIPE,
        stderr=stderr,
        bufsize=0,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the shell and what it started."""
    for number in (SIGTERM, SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
            return


def read_range(
    command: str,
    start: int,
    view: memoryview,
    cancel: Cancel = None,
) -> None:
    """Fill ``view`` with a command's output from byte ``start`` on.

    What stands before is read and dropped, what follows is not read.

    Args:
        command: For the shell, as the user wrote it; never made from a file's content.
        start: Absolute first byte.
        view: Where the bytes go.
        cancel: Ends the command from another thread, within a fraction of a second.

    Raises:
        TruncatedShard: The output ends before.
        StorageError: The command failed; says what it wrote to its error output.
    """
    stop = start + len(view)
    pos = 0
    with _run(command) as output:
        while pos < stop:
            _wait(output, cancel)
            if pos < start:
                count = len(output.stdout.read(min(start - pos, _SKIP_BYTES)))
            else:
                count = output.stdout.readinto(view[pos - start :])
            if not count:
                raise _ended(output, pos, start, stop)
            pos += count


def _wait(output: Output, cancel: Cancel) -> None:
    """Wait until there is something to read, which may be the end."""
    ready = select.poll()
    ready.register(output.stdout, select.POLLIN)
    while not (cancel and cancel.is_set()):
        if ready.poll(_POLL_MILLISECONDS):
            return
    raise StorageError("the read was cancelled")


def _ended(
    output: Output,
    pos: int,
    start: int,
    stop: int,
) -> Exception:
    try:
        code = output.process.wait(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return StorageError(f"the command closed its output after {pos} of {stop} bytes")
    if code == 0:
        return TruncatedShard(f"expected bytes {start} to {stop}, the command's output has {pos}")
    output.stderr.seek(0)
    said = output.stderr.read(2000).decode(errors="replace").strip()
    return StorageError(
        f"the command ended with exit status {code} after {pos} of {stop} bytes: {said}"
    )
