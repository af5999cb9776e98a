"""Locks among the processes of a node, by ``flock``.

The file of a lock may be unlinked by its exclusive holder. A waiter that locks an unlinked file
detects this and opens the path again.
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

_POLL_SECONDS = 0.02
# What another user's link leads to is neither made nor opened.
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_NEVER = threading.Event()
# A file system without locks grants all of them.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK)


@contextmanager
def hold_lock(
    path: str,
    *,
    shared: bool = False,
    create: bool = True,
    wait: bool = True,
    cancel: Cancel = None,
) -> Iterator[int | None]:
    """Hold the lock of a local file or folder.

    Args:
        path: The file, in a folder that is there, or a folder.
        shared: Whether others may hold it at the same time, if they share it too.
        create: Whether to make a file that is not there; without it a read-only one will do.
        wait: Whether to wait for it, by polling, so that the wait can be canceled.
        cancel: Ends the wait from another thread.

    Yields:
        The descriptor of the locked file, also on a file system without locks. ``None`` if there
        is no file, or another process holds it.

    Raises:
        OSError: The file cannot be made or opened, or is a link.
        Cancelled: The wait was canceled.
    """
    handle = None
    try:
        while (handle := _open(path, create)) is not None:
            held = _lock(handle, shared)
            if held and _has_its_name(handle, path):
                break
            os.close(handle)
            handle = None
            if held:
                continue  # it was unlinked
            if not wait:
                break
            if (cancel or _NEVER).wait(_POLL_SECONDS):
                raise Cancelled("the wait for a lock was cancelled")
        yield handle
    finally:
        if handle is not None:
            # Closing is not enough: a process that was forked since then shares the lock.
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


def _open(path: str, create: bool) -> int | None:
    if os.path.isdir(path):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.open(path, _FLAGS | os.O_RDWR | os.O_CREAT * create, 0o666)
    except FileNotFoundError:
        if create:
            raise
        return None
    except OSError as error:
        # On a read-only disk it may still be read. NFS grants no exclusive lock then.
        if create or error.errno not in (errno.EROFS, errno.EACCES):
            raise
        return os.open(path, _FLAGS | os.O_RDONLY)


def _lock(handle: int, shared: bool) -> bool:
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(handle, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _has_its_name(handle: int, path: str) -> bool:
    """Return whether others who open the path find this file."""
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
