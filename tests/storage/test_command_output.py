"""``pipe:`` URLs: the prefix of a command's output, and no more of the command than that."""

import os
import threading
import time

import pytest

from pcrshard import Shard, storage
from pcrshard.errors import PCRError, StorageError, TruncatedShard
from pcrshard.storage import command_output


def gone(pid):
    """Return whether a process has ended; an unreaped zombie counts as ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(check, seconds=5):
    deadline = time.monotonic() + seconds
    while not check() and time.monotonic() < deadline:
        time.sleep(0.01)
    return check()


def test_samples_are_those_of_the_file(shard_urls, tmp_path):
    """``pipe:cat FILE`` reads as FILE does, at every scan, and in one run when the index is
    known.
    """
    entry = {entry.name: entry for entry in _index(shard_urls).shards}[
        os.path.basename(shard_urls[0])
    ]
    log = tmp_path / "runs"
    for scan in (1, 5, "full"):
        log.write_text("")
        shard = Shard(f"pipe:echo run >> {log}; cat {shard_urls[0]}", entry=entry)
        assert list(shard.samples(scan)) == list(Shard(shard_urls[0]).samples(scan))
        assert log.read_text() == "run\n"


def _index(shard_urls):
    from pcrshard import open_dataset

    return open_dataset(os.path.dirname(shard_urls[0]))[0]


def test_endless_command_ends_with_the_prefix(tmp_path):
    """What the command would write behind the prefix is not waited for, and the command and its
    children are gone.
    """
    pids = tmp_path / "pids"
    command = f"pipe:(echo $BASHPID >> {pids}; yes) & echo $$ >> {pids}; wait"
    begin = time.monotonic()
    found = storage.read(f"pipe:bash -c '{command.removeprefix('pipe:')}'", 1000, 5000)
    assert found.tobytes() == b"y\n" * 2000
    assert time.monotonic() - begin < 30  # of 60
    assert wait_until(lambda: all(gone(int(pid)) for pid in pids.read_text().split()))


def test_command_that_ignores_sigterm_is_ended(tmp_path):
    """A command that ignores the polite signal does not stay behind."""
    pid = tmp_path / "pid"
    found = storage.read(
        f"pipe:trap '' TERM; echo $$ > {pid}; printf 0123456789; while :; do sleep 0.1; done", 2, 5
    )
    assert found.tobytes() == b"234"
    assert wait_until(lambda: gone(int(pid.read_text())))


def test_failed_command_is_an_error_with_its_own_words():
    """A command that fails says why, with its exit status; a short prefix is never taken for a
    whole one.
    """
    with pytest.raises(
        StorageError, match=r"exit status 3 after 5 of 100 bytes: no such bucket"
    ) as caught:
        storage.read("pipe:printf 12345; echo no such bucket >&2; exit 3", 0, 100)
    assert isinstance(caught.value, PCRError)
    with pytest.raises(StorageError, match="not found"):
        storage.read("pipe:there-is-no-such-command-7", 0, 10)


def test_short_output_is_truncated():
    """A command that succeeds with too little is a truncated shard."""
    with pytest.raises(TruncatedShard, match="expected bytes 0 to 100, the command's output has 5"):
        storage.read("pipe:printf 12345", 0, 100)


def test_a_command_that_closes_its_output_and_stays_is_an_error():
    """A command that ends its output early but goes on running is ended, and reported in our
    words.
    """
    begin = time.monotonic()
    with pytest.raises(StorageError, match="closed its output after 3 of 10 bytes"):
        storage.read("pipe:printf abc; exec >&-; sleep 60", 0, 10)
    assert time.monotonic() - begin < 30  # of 60


def test_a_silent_command_can_be_cancelled(tmp_path):
    """Leaving an epoch does not wait for a command that hangs, and takes it along."""
    pid, cancel = tmp_path / "pid", threading.Event()
    threading.Timer(0.3, cancel.set).start()
    begin = time.monotonic()
    with pytest.raises(StorageError, match="cancelled"):
        command_output.read_range(
            f"echo $$ > {pid}; exec sleep 60", 0, memoryview(bytearray(10)), cancel
        )
    assert time.monotonic() - begin < 30  # of 60
    assert wait_until(lambda: gone(int(pid.read_text())))


def test_error_output_may_be_larger_than_a_pipe():
    """A chatty command does not block on its error output."""
    found = storage.read("pipe:head -c 2000000 /dev/zero | tr '\\0' e >&2; printf 12345", 0, 5)
    assert found.tobytes() == b"12345"
