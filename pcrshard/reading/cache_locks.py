"""The locks of a prefix cache, outside of the entries' folders: those may go while others wait.

Each entry has its own: if they shared some, a shard would wait for a server that stalls on another.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from ..storage.locks import hold_lock, remove_lock
from ..storage.retry import Cancel, Cancelled
from . import cache_folder
from .cache_extents import list_folder

_ENTRY_LOCKS = ("use", "fetch")


@contextmanager
def hold(
    folder: str,
    name: str,
    *,
    shared: bool = False,
    wait: bool = True,
    cancel: Cancel = None,
) -> Iterator[bool]:
    """Hold a lock of a cache's folder; see :func:`pcrshard.storage.locks.hold_lock`.

    Where none can be made, because the folder is read-only or full, the cache only reads, which
    needs no lock.
    """
    locks = os.path.join(folder, "locks")
    with ExitStack() as stack:
        held = wait
        try:
            os.makedirs(locks, exist_ok=True)
            path = os.path.join(locks, name)
            lock = hold_lock(path, shared=shared, wait=wait, cancel=cancel)
            held = stack.enter_context(lock)
        except Cancelled:
            raise
        except OSError as error:
            cache_folder.warn_going_on(folder, "lock", error)
        yield held


@contextmanager
def hold_entry(
    kind: str,
    entry: str,
    *,
    shared: bool = False,
    wait: bool = True,
    cancel: Cancel = None,
) -> Iterator[bool]:
    """Hold the lock of an entry.

    Args:
        kind: "use" for who reads or drops it, "fetch" for who adds to it.
        entry: Its folder, ``FOLDER/entries/<url>/<identity>``.
        shared: Whether others may hold it at the same time, if they share it too.
        wait: Whether to wait for it.
        cancel: Ends the wait from another thread.

    Yields:
        Whether it is held.
    """
    folder, name = _place(kind, entry)
    with hold(folder, name, shared=shared, wait=wait, cancel=cancel) as held:
        yield held


def _place(kind: str, entry: str) -> tuple[str, str]:
    """The cache's folder, and the name of a lock of an entry."""
    parent, identity = os.path.split(entry)
    entries, url = os.path.split(parent)
    return os.path.dirname(entries), f"{kind}-{url}-{identity}"


def drop(entry: str) -> None:
    """Remove the locks of an entry that is gone, but those that somebody holds."""
    for kind in _ENTRY_LOCKS:
        folder, name = _place(kind, entry)
        with suppress(OSError):
            remove_lock(os.path.join(folder, "locks", name))


def sweep(folder: str) -> None:
    """Remove the locks of entries that are gone, but those that somebody holds."""
    for file in list_folder(os.path.join(folder, "locks")):
        kind, *entry = file.name.split("-")
        there = os.path.isdir(os.path.join(folder, "entries", *entry))
        if kind in _ENTRY_LOCKS and not there:
            with suppress(OSError):
                remove_lock(file.path)
