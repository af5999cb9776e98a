"""The token bucket and the slow file system."""

import multiprocessing
import time

import fsspec
import pytest

from pcrshard import Shard, open_dataset
from pcrshard.testing import ThrottledFS, TokenBucket


@pytest.fixture(autouse=True)
def _registered():
    fsspec.register_implementation("throttled", ThrottledFS, clobber=True)


def take(state, count):
    bucket = TokenBucket(100_000, state)
    for _ in range(count):
        bucket.take(1000)


def test_a_bucket_lets_through_what_it_should(tmp_path):
    """A hundred kilobytes at a rate of two hundred a second take half a second, less the burst."""
    bucket = TokenBucket(200_000, str(tmp_path / "state"), burst=1000)
    begun = time.monotonic()
    for _ in range(100):
        bucket.take(1000)
    assert 0.45 < time.monotonic() - begun < 20


def test_processes_share_a_bucket(tmp_path):
    """Four processes together get what one would: workers of a node share its bandwidth."""
    state = str(tmp_path / "state")
    begun = time.monotonic()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=take, args=(state, 15)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert time.monotonic() - begun > 0.4


def test_a_throttled_shard_is_the_same_but_slow(dataset, tmp_path):
    """Bytes are those of the file behind, and come no faster than the rate."""
    index, urls = open_dataset(str(dataset))
    stop = index.shards[0].prefix_stop(2)
    options = {"rate": stop / 0.3, "state": str(tmp_path / "state")}
    begun = time.monotonic()
    slow = list(
        Shard(f"throttled://{urls[0]}", entry=index.shards[0], storage_options=options).samples(2)
    )
    assert time.monotonic() - begun > 0.15
    assert slow == list(Shard(urls[0]).samples(2))
    with (
        fsspec.open(f"throttled://{urls[0]}", "rb", **options) as file,
        open(urls[0], "rb") as plain,
    ):
        assert file.read(3000) == plain.read(3000)


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_bucket_without_a_rate_is_refused(tmp_path, rate):
    """A bandwidth of nothing is a mistake."""
    with pytest.raises(ValueError, match="rate above 0"):
        TokenBucket(rate, str(tmp_path / "state"))
