"""Processes that start at once: a server that has imported torch forks them."""

import multiprocessing

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pcrshard.checkpoint.sync", "safetensors.torch"])


def start(function, *args):
    """Call ``function(connection, *args)`` in a process; return it, and where it sends to."""
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=function, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def received(connection):
    """What a process has sent, until it ends."""
    with connection:
        while True:
            try:
                yield connection.recv()
            except (EOFError, ConnectionResetError):
                return
