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
    # A run in the background of a shell ignores Ctrl-C, and goes on doing so.
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if is_ours:
            signal.signal(signal.SIGINT, _stop)
        from pcrshard.cli.main import main as run

        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = run()
    except KeyboardInterrupt:
        print("pcrshard: stopped", file=sys.stderr)
        status = _STOPPED
    # All is done and shown; what Python does at its end may be cut short, but without a traceback.
    signal.signal(signal.SIGINT, lambda *_: os._exit(status))
    return status


def _stop(*_: object) -> None:
    """End at once: nothing has begun, and a half of an import has no order to leave."""
    os.write(sys.stderr.fileno(), b"pcrshard: stopped\n")
    os._exit(_STOPPED)
