"""Locks among the processes of a node, by ``flock``.

The file of a lock may be removed by whoever holds it alone (:func:`remove_lock`). Who had opened it
before gets the lock of a file that has no name any more, looks, and opens the new one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
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
    handle = _acquire(path, shared)
    while wait and handle is None:
        if (cancel or _NEVER).wait(_POLL_SECONDS):
            raise Cancelled("the wait for a lock was cancelled")
        handle = _acquire(path, shared)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            _release(handle)


def remove_lock(path: str) -> bool:
    """Remove the file of a lock, unless somebody holds it.

    Returns:
        Whether it is gone.
    """
    with hold_lock(path, wait=False) as held:
        if held:
            with suppress(FileNotFoundError):
                os.unlink(path)
    return held


def _acquire(path: str, shared: bool) -> int | None:
    """The descriptor of a lock that is held from now on, ``None`` if another has it."""
    handle = _open(path)
    held = False
    try:
        held = _try(handle, shared) and _has_its_name(handle, path)
    finally:
        if not held:
            _release(handle)
    return handle if held else None


def _release(handle: int) -> None:
    # Closing is not enough: a process forked meanwhile, say a worker, has the same lock.
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def _has_its_name(handle: int, path: str) -> bool:
    """Whether others who open the path find this file, and not a newer one or none."""
    try:
        held = os.fstat(handle)
        # Folders are not removed by us.
        return stat.S_ISDIR(held.st_mode) or os.path.samestat(
            held, os.stat(path, follow_symlinks=False)
        )
    except OSError as error:
        # By NFS, of a file that another machine has removed.
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return False
        raise


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
