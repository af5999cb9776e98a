"""Locks among the processes of a node, by ``flock``.

The file of a lock may be unlinked by its exclusive holder. A waiter that locks an unlinked file
detects this and opens the path again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .retry import Cancel, Cancelled

_POLL_SECONDS = 0.02
# O_NOFOLLOW: never create or open the target of another user's link.
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_NEVER = threading.Event()
# On a file system without locks, every lock is granted.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK)


@contextmanager
def hold_lock(
    path: str,
    *,
    shared: bool = False,
    create: bool = True,
    mode: int = 0o666,
    wait: bool = True,
    cancel: Cancel = None,
) -> Iterator[int | None]:
    """Hold the lock of a local file or folder.

    Args:
        path: A folder, or a file in an existing folder.
        shared: Whether other shared holders are allowed at the same time.
        create: Whether to create a missing file.
        mode: Permissions of a new file, before the umask.
        wait: Whether to wait for the lock. The wait polls, so that it can be canceled.
        cancel: Set by another thread to end the wait.

    Yields:
        The descriptor of the locked file, also on a file system without locks. ``None`` if the
        file does not exist or another process holds the lock.

    Raises:
        OSError: The file cannot be created or opened, or is a link.
        Cancelled: The wait was canceled.
    """
    handle = None
    try:
        while (handle := _open(path, shared, create, mode)) is not None:
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
                raise Cancelled("the wait for a lock was canceled")
        yield handle
    finally:
        if handle is not None:
            # Closing is not enough: a process forked since then shares the lock.
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


def _open(path: str, shared: bool, create: bool, mode: int) -> int | None:
    if os.path.isdir(path):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    # A shared lock can be had on a read-only disk; NFS grants an exclusive one to writers only.
    access = os.O_RDONLY if shared else os.O_RDWR
    try:
        return os.open(path, _FLAGS | access | os.O_CREAT * create, mode)
    except FileNotFoundError:
        if create:
            raise
        return None


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
    """Return whether opening the path again would find this file."""
    with suppress(OSError):  # it was removed, perhaps on another machine, or will fail to open
        return os.path.samestat(os.fstat(handle), os.stat(path))
    return False
