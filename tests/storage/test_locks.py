"""Locks among processes: one holder at a time, and none that outlives its process."""

import errno
import multiprocessing
import os
import time

from pcrshard.storage.locks import hold_lock


def _count(path, log, times):
    for _ in range(times):
        with hold_lock(path):
            with open(log, "a") as file:
                file.write("in\n")
            time.sleep(0.001)
            with open(log, "a") as file:
                file.write("out\n")


def _remove(path, ended):
    while not ended.is_set():
        with hold_lock(path, create=False, wait=False) as handle:
            if handle is not None:
                os.unlink(path)


def test_a_lock_that_is_removed_again_and_again_still_lets_in_one(tmp_path):
    """A waiter that opened the lock file before its removal does not lock an unlinked file."""
    log = tmp_path / "log"
    path = str(tmp_path / "lock")
    context = multiprocessing.get_context("fork")
    ended = context.Event()
    remover = context.Process(target=_remove, args=(path, ended))
    arguments = (path, str(log), 20)
    processes = [context.Process(target=_count, args=arguments) for _ in range(3)]
    for process in [remover, *processes]:
        process.start()
    for process in processes:
        process.join()
    ended.set()
    remover.join()
    assert log.read_text().split() == ["in", "out"] * 60


def test_readers_share_and_writers_do_not(tmp_path):
    """Several processes can share a lock; a non-blocking attempt reports that it is taken."""
    path = str(tmp_path / "lock")
    with hold_lock(path, shared=True), hold_lock(path, shared=True) as second:
        assert second
        with hold_lock(path, wait=False) as held:
            assert not held
    with hold_lock(path, wait=False) as held:
        assert held


def test_a_stale_handle_is_a_lock_that_was_removed(tmp_path, monkeypatch):
    """What NFS says of a file that another machine has removed: the new file's lock is taken."""
    fstat = os.fstat
    answers = [OSError(errno.ESTALE, "Stale file handle")]

    def once_stale(handle):
        if answers:
            raise answers.pop()
        return fstat(handle)

    monkeypatch.setattr(os, "fstat", once_stale)
    with hold_lock(str(tmp_path / "lock")) as held:
        assert held
    assert answers == []
