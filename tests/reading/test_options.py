"""How shards are read: numbers are checked where they are given."""

import pytest

from pcrshard import PrefixCache, ReadOptions, Retry


@pytest.mark.parametrize(("name", "value"), [("prefetch", -1), ("cache_bytes", 0)])
def test_impossible_numbers_are_refused(name, value):
    """A negative prefetch would give an empty epoch; it is an error at construction."""
    with pytest.raises(ValueError, match=f"expected {name} to be"):
        ReadOptions(cache_dir="cache", **{name: value})


def test_a_shard_is_opened_as_asked(shard_urls, tmp_path):
    """Checks, network and cache of the options are those of every shard."""
    retry = Retry(attempts=3)
    shard = ReadOptions(retry=retry, cache_dir=str(tmp_path)).open(shard_urls[0], None)
    assert isinstance(shard.cache, PrefixCache)
    assert len(list(shard.samples(2))) == shard.num_samples
    assert PrefixCache(str(tmp_path)).entries()[0].scan == 2
