"""Fast child processes, forked by a server that has already imported torch."""

import multiprocessing

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pcrshard.weightsync", "safetensors.torch"])


def start(function, *args, method="forkserver"):
    """Start ``function(connection, *args)`` in a process; return it and our end of the pipe."""
    context = _CONTEXT if method == "forkserver" else multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def received(connection):
    """Yield what a process sends until it exits."""
    with connection:
        while True:
            try:
                yield connection.recv()
            except (EOFError, ConnectionResetError):
                return
