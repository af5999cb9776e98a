"""Prefixes of a command's output, WebDataset's ``pipe:`` URLs."""

from __future__ import annotations

import os
import select
import subprocess
from contextlib import suppress
from signal import SIGKILL

from ..errors import StorageError, TruncatedShard
from .retry import Cancel, Cancelled

_END_SECONDS = 2.0
_POLL_SECONDS = 0.2


def read_range(command: str, start: int, view: memoryview, cancel: Cancel = None) -> None:
    """Fill ``view`` with a shell command's output from byte ``start`` on; read no further.

    Raises:
        TruncatedShard: The output is too short.
        StorageError: The command failed; its error messages go to standard error.
    """
    with subprocess.Popen(  # noqa: S602  # the user's own command line
        command, shell=True, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        output = process.stdout.fileno()
        position = 0
        try:
            while position < start + len(view):
                if cancel and cancel.is_set():
                    raise Cancelled("the read was canceled")
                if not select.select([output], [], [], _POLL_SECONDS)[0]:
                    continue
                skipped = bytearray(min(max(start - position, 0), 1 << 20))
                count = os.readv(output, [skipped or view[position - start :]])
                position += count
                if not count:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_END_SECONDS)
                    message = f"expected bytes {start} to {start + len(view)}, got {position}"
                    if process.returncode == 0:
                        raise TruncatedShard(message)
                    raise StorageError(f"{message}; the exit status is {process.returncode}")
        finally:
            # The shell and the processes it started.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, SIGKILL)
