"""The token bucket and the slow file system."""

import time
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest

from pcrshard import Shard, open_dataset
from pcrshard.testing import ThrottledFS, TokenBucket


@pytest.fixture(autouse=True)
def _registered():
    fsspec.register_implementation("throttled", ThrottledFS, clobber=True)


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


def test_a_bucket_is_shared(tmp_path):
    """Users of a bucket together get its rate, less the burst; a rate of nothing is refused."""
    buckets = [TokenBucket(200_000, str(tmp_path / "state"), burst=1000) for _ in range(2)]
    begun = time.monotonic()
    with ThreadPoolExecutor() as threads:
        for place in range(60):
            threads.submit(buckets[place % 2].take, 1000)
    assert 0.25 < time.monotonic() - begun < 20
    with pytest.raises(ValueError, match="rate above 0"):
        TokenBucket(float("nan"), "state")
