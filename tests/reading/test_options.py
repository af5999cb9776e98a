"""How shards are read: numbers are checked where they are given."""

import pytest

from pcrshard import PrefixCache, ReadOptions, Retry


@pytest.mark.parametrize(
    ("name", "value"), [("prefetch", -1), ("cache_bytes", 0), ("cache_dir", "s3://bucket/cache")]
)
def test_impossible_values_are_refused(name, value):
    """A negative prefetch would give an empty epoch; it is an error at construction."""
    with pytest.raises(ValueError, match=f"expected {name} to be"):
        ReadOptions(**{"cache_dir": "cache", name: value})


@pytest.mark.parametrize(
    ("given", "folder"), [("~/c", "/home/me/c"), ("file:///c", "/c"), ("", None)]
)
def test_a_cache_is_a_folder_like_any_other(monkeypatch, given, folder):
    """A cache is where a shell would put it, and not in the current folder unless asked for."""
    monkeypatch.setenv("HOME", "/home/me")
    cache = ReadOptions(cache_dir=given).cache
    assert (cache and cache.folder) == folder


def test_a_cache_takes_a_size(tmp_path):
    """Its limit may be written as on the command line; a word that is no size is refused."""
    assert PrefixCache(str(tmp_path), "1.5 kB").max_bytes == 1500
    with pytest.raises(ValueError, match=r"expected max_bytes to be .* such as '50GB', got 'big'"):
        PrefixCache(str(tmp_path), "big")


def test_a_shard_is_opened_as_asked(shard_urls, tmp_path):
    """Checks, network and cache of the options are those of every shard."""
    retry = Retry(attempts=3)
    shard = ReadOptions(retry=retry, cache_dir=str(tmp_path)).open(shard_urls[0], None)
    assert isinstance(shard.cache, PrefixCache)
    assert len(list(shard.samples(2))) == shard.num_samples
    assert PrefixCache(str(tmp_path)).entries()[0].scan == 2
