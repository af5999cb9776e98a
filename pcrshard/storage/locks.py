"""Locks among the processes of a node, by ``flock``."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .retry import Cancel, Cancelled

_POLL_SECONDS = 0.05
# What another user's link leads to is neither made nor opened.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_NEVER = threading.Event()


@contextmanager
def hold_lock(
    path: str,
    *,
    shared: bool = False,
    wait: bool = True,
    cancel: Cancel = None,
) -> Iterator[bool]:
    """Hold the lock of a local file or folder; a file is made if it is not there.

    Args:
        path: The file, in a folder that is there, or a folder.
        shared: Whether others may hold it at the same time, if they share it too.
        wait: Whether to wait for it, by polling, so that the wait can be cancelled.
        cancel: Ends the wait from another thread.

    Yields:
        Whether it is held; always True with ``wait``.

    Raises:
        OSError: The file cannot be made, or is a link.
        Cancelled: The wait was cancelled.
    """
    handle = _open(path)
    try:
        held = _try(handle, shared)
        while wait and not held:
            if (cancel or _NEVER).wait(_POLL_SECONDS):
                raise Cancelled("the wait for a lock was cancelled")
            held = _try(handle, shared)
        yield held
    finally:
        # Closing is not enough: a process forked meanwhile, say a worker, has the same lock.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _open(path: str) -> int:
    if os.path.isdir(path):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return os.open(path, _FLAGS, 0o666)


def _try(handle: int, shared: bool) -> bool:
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(handle, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks gets none
    return True
