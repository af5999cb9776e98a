"""Prefixes of a command's output, WebDataset's ``pipe:`` URLs."""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
from contextlib import suppress
from signal import SIGKILL, SIGTERM

from ..errors import StorageError, TruncatedShard
from .retry import Cancel, Cancelled

_SKIP_BYTES = 1 << 20
_END_SECONDS = 2.0
_POLL_MILLISECONDS = 200


def read_range(command: str, start: int, view: memoryview, cancel: Cancel = None) -> None:
    """Fill ``view`` with a command's output that starts at byte ``start``; the rest is not read.

    Args:
        command: Shell command, as the user wrote it; never built from a file's content.
        start: Absolute first byte; bytes before it are read and dropped.
        view: Destination of the bytes.
        cancel: Set by another thread to end the command within a fraction of a second.

    Raises:
        TruncatedShard: The output is too short.
        StorageError: The command failed; the message includes its error output.
    """
    stop = start + len(view)
    skipped = memoryview(bytearray(min(start, _SKIP_BYTES)))
    position = 0
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(  # noqa: S602  # the user's own command line
            command, shell=True, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
        )
        assert process.stdout is not None
        output = process.stdout.fileno()
        ready = select.poll()
        ready.register(output, select.POLLIN)
        try:
            while position < stop:
                if cancel and cancel.is_set():
                    raise Cancelled("the read was cancelled")
                if not ready.poll(_POLL_MILLISECONDS):
                    continue
                before = position < start
                into = skipped[: start - position] if before else view[position - start :]
                count = os.readv(output, [into])
                position += count
                if count:
                    continue
                code = process.wait(_END_SECONDS)
                if code == 0:
                    raise TruncatedShard(
                        f"expected bytes {start} to {stop}, the command's output has {position}"
                    )
                stderr.seek(0)
                said = stderr.read(2000).decode(errors="replace").strip()
                raise StorageError(
                    f"the command ended with exit status {code} after {position} of {stop} "
                    f"bytes: {said}"
                )
        except subprocess.TimeoutExpired:
            message = f"the command closed its output after {position} of {stop} bytes"
            raise StorageError(message) from None
        finally:
            process.stdout.close()
            # The shell and the processes it started.
            for number in (SIGTERM, SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
                    break
