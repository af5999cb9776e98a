"""``pipe:`` URLs: the prefix of a command's output, and no more of the command than that."""

import os
import threading
import time

import pytest
from support import is_alive, wait_for

from pcrshard import PrefixCache, Shard, open_dataset, storage
from pcrshard.errors import StorageError, TruncatedShard


def test_samples_are_those_of_the_file(shard_urls, tmp_path):
    """``pipe:cat FILE`` reads as FILE does, at every scan, and in one run when the index is
    known.
    """
    entry = {entry.name: entry for entry in open_dataset(os.path.dirname(shard_urls[0]))[0].shards}[
        os.path.basename(shard_urls[0])
    ]
    log = tmp_path / "runs"
    for scan in (1, 5, "full"):
        log.write_text("")
        shard = Shard(f"pipe:echo run >> {log}; cat {shard_urls[0]}", entry=entry)
        assert list(shard.samples(scan)) == list(Shard(shard_urls[0]).samples(scan))
        assert log.read_text() == "run\n"


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
    assert wait_for(lambda: not any(map(is_alive, pids.read_text().split())))


@pytest.mark.parametrize(
    ("command", "error", "message"),
    [
        ("printf 12345", TruncatedShard, "expected bytes 0 to 10, got 5"),
        ("printf 12345; exit 3", StorageError, "got 5; the exit status is 3"),
        ("there-is-no-such-command-7", StorageError, "exit status is 127"),
        ("printf abc; exec >&-; sleep 60", StorageError, "got 3; the exit status is None"),
    ],
)
def test_a_short_output_is_an_error(command, error, message):
    """A short prefix is never taken for a whole one, whether the command succeeds, fails, or
    closes its output and stays.
    """
    begin = time.monotonic()
    with pytest.raises(error, match=message):
        storage.read(f"pipe:{command}", 0, 10)
    assert time.monotonic() - begin < 30  # of 60


def test_a_silent_command_can_be_canceled(tmp_path):
    """Leaving an epoch does not wait for a command that hangs, and takes it along."""
    pid, cancel = tmp_path / "pid", threading.Event()
    threading.Timer(0.3, cancel.set).start()
    begin = time.monotonic()
    with pytest.raises(StorageError, match="canceled"):
        storage.read(f"pipe:echo $$ > {pid}; exec sleep 60", 0, 10, cancel=cancel)
    assert time.monotonic() - begin < 30  # of 60
    assert wait_for(lambda: not is_alive(int(pid.read_text())))


def test_what_a_command_writes_is_not_cached(shard_urls, tmp_path):
    """A command may write another shard each time, so that without a dataset index nothing of it is
    kept.
    """
    link = tmp_path / "today.tar"
    for url in shard_urls[:2]:
        link.unlink(missing_ok=True)
        link.symlink_to(url)
        shard = Shard(f"pipe:cat {link}", cache=PrefixCache(str(tmp_path / "cache")))
        assert list(shard.samples(5)) == list(Shard(url).samples(5))
