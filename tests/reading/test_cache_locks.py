"""The locks of a cache: a shard waits for nobody but who fetches the same shard, and locks do not
pile up.
"""

import contextlib
import math
import os
import threading

import pytest

from pcrshard.reading.prefix_cache import PrefixCache

NUM_SHARDS = 400
NUM_BYTES = 10


def read(cache, url):
    """The shard from the cache; what it lacks is fetched."""

    def fetch(start, view):
        view[:] = bytes(len(view))

    with cache.open_prefix(url, "1", (NUM_BYTES,), NUM_BYTES, fetch) as view:
        assert len(view) == NUM_BYTES


@contextlib.contextmanager
def stalled(cache, url):
    """A server that says nothing while another thread waits for a shard."""
    asked = threading.Event()
    answers = threading.Event()

    def fetch(start, view):
        asked.set()
        answers.wait(60)

    def wait():
        with cache.open_prefix(url, "1", (NUM_BYTES,), NUM_BYTES, fetch):
            pass

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert asked.wait(10)
    try:
        yield
    finally:
        answers.set()
        thread.join()


def locks(cache):
    return sorted(os.listdir(os.path.join(cache.folder, "locks")))


@pytest.fixture
def cache(tmp_path):
    return PrefixCache(str(tmp_path / "cache"))


def test_no_shard_waits_for_a_server_that_stalls_on_another(cache):
    """However many shards a dataset has, one that does not come stops none but itself; nor does it
    keep the others in the cache.
    """
    urls = [f"shard-{number:06d}.tar" for number in range(NUM_SHARDS)]
    with stalled(cache, "slow.tar"):
        reader = threading.Thread(target=lambda: [read(cache, url) for url in urls], daemon=True)
        reader.start()
        reader.join(30)
        assert len(cache.entries()) == NUM_SHARDS
        assert cache.clear() == NUM_SHARDS * NUM_BYTES
        assert len(locks(cache)) == 3  # of the slow shard two, and of the whole folder one


def test_locks_go_with_their_shards(cache):
    """A cache of changing datasets does not fill its folder with locks, also those of versions
    that had 256 for all shards.
    """
    for name in ("use-0a", "fetch-ff"):
        read(cache, "a.tar")
        with open(os.path.join(cache.folder, "locks", name), "w"):
            pass
    cache.max_bytes = 3 * NUM_BYTES
    cache.since = math.inf
    for number in range(20):
        read(cache, f"b-{number}.tar")
    assert len(cache.entries()) == 3
    held = locks(cache)
    # Two for each shard, and for the one that was dropped last; two for the whole folder.
    assert len(held) <= 2 * (3 + 1) + 2
    assert not {"use-0a", "fetch-ff"} & set(held)


def test_locks_go_with_versions_of_a_shard(cache):
    """A cache without a bound, of shards that are made anew each night, has the last ones only."""
    for version in range(20):

        def fetch(start, view):
            view[:] = bytes(len(view))

        with cache.open_prefix("a.tar", str(version), (NUM_BYTES,), NUM_BYTES, fetch):
            pass
    assert len(locks(cache)) == 3  # of the shard two, and of the whole folder one
    (folder,) = os.scandir(os.path.join(cache.folder, "entries"))
    assert len(os.listdir(folder)) == 1
