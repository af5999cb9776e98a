"""Room in a cache: who may keep what, and for how long."""

import os
import pathlib
import time

import pytest
from support import wait_for
from test_prefix_cache import SCANS, STOPS, Store, epoch, used_bytes

from pcrshard.reading.prefix_cache import PrefixCache

DAY = 86_400


def names(kind, count=20):
    return [f"mem://{kind}-{number}" for number in range(count)]


def age(folder, seconds):
    """Let all files be used so long ago."""
    then = time.time() - seconds
    for path in pathlib.Path(folder).glob("entries/*/*/*"):
        os.utime(path, (then, then))
    (pathlib.Path(folder) / "locks" / "usage-bytes").unlink()


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "cache")


def test_a_lower_scan_takes_the_room_of_higher_ones_of_the_same_job(folder):
    """A schedule or a tuner that goes down has all of the lower scan on disk soon."""
    room = 20 * SCANS[2] + STOPS[-1]
    store = Store(PrefixCache(folder, room))
    epoch(store, names("a"), 0)
    # Only what is read again shows that its high groups are not wanted any more, and only the next
    # look at the files shows that there is room.
    shares = [1.0]

    def all_there():
        shares.append(epoch(store, names("a"), len(shares), SCANS[2]))
        return shares[-1] == 0

    wait_for(all_there)
    assert shares[-1] == 0
    assert used_bytes(folder) <= room


@pytest.mark.parametrize("seconds", [2 * DAY, -365 * DAY], ids=["ended", "clock set back"])
def test_what_nobody_uses_does_not_shut_others_out(folder, seconds):
    """A job that used the cache after this one began, and ended, or files of a time to come."""
    room = 10 * STOPS[-1]
    store = Store(PrefixCache(folder, room, time.time() - 7 * DAY))
    other = Store(PrefixCache(folder, room))
    epoch(other, names("other", 10), 0)
    assert epoch(store, names("mine"), 0) == epoch(store, names("mine"), 1) == 1
    age(folder, seconds)
    epoch(store, names("mine"), 2)
    assert epoch(store, names("mine"), 3) <= 0.6


def test_a_full_cache_does_not_look_at_all_files_for_each_shard(folder, monkeypatch):
    """What is not kept costs no more than without a cache, however many shards it holds."""
    held = names("held", 40)
    store = Store(PrefixCache(folder, 40 * STOPS[-1]))
    epoch(store, held, 0)
    listed = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scandir(path))
    assert epoch(store, names("passing", 60), 0) == 1
    # A look at all files lists some 280 folders.
    assert len(listed) < 60 * 100
    assert epoch(store, held, 1) == 0


def test_a_cache_that_is_cleared_is_filled_at_once(folder):
    """Nobody waits for the next look at the files."""
    room = 10 * STOPS[-1]
    store = Store(PrefixCache(folder, room))
    epoch(store, names("first"), 0)
    store.cache.clear()
    epoch(store, names("second", 10), 0)
    assert epoch(store, names("second", 10), 1) == 0
