"""The command ``pcrshard`` as it is installed: a Ctrl-C is one line, whenever it comes.

It is no part of the package, because importing any part imports what the package needs, which takes
a while. Only what Python does before this module can still be cut short with a traceback.
"""

from __future__ import annotations

import os
import signal
import sys

_STOPPED = 130


def main() -> int:
    """Import the commands, which takes a while, and run the one that was asked for."""
    interrupt = _Interrupt()
    try:
        # A run in the background of a shell keeps ignoring Ctrl-C.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, interrupt)
        from pcrshard.cli.main import main as run

        interrupt.has_begun = True
        interrupt.status = run()
    except KeyboardInterrupt:
        interrupt.status = _STOPPED
        _say_stopped()
    return interrupt.status


class _Interrupt:
    """What a Ctrl-C does: one handler to the end, since to exchange it can itself be cut short."""

    has_begun = False
    status: int | None = None

    def __call__(self, *_: object) -> None:
        """Leave at once while there is nothing to undo: before the command, and when it is done."""
        if not self.has_begun:
            _say_stopped()
            os._exit(_STOPPED)
        if self.status is None:
            raise KeyboardInterrupt
        os._exit(self.status)


def _say_stopped() -> None:
    if sys.stderr is not None:
        os.write(sys.stderr.fileno(), b"pcrshard: stopped\n")
