"""How shards are read: numbers are checked where they are given."""

import os

import pytest

from pcrshard import PrefixCache, ReadOptions


@pytest.mark.parametrize(
    ("name", "value"), [("prefetch", -1), ("cache_bytes", 0), ("cache_dir", "s3://bucket/cache")]
)
def test_impossible_values_are_refused(name, value):
    """A negative prefetch would give an empty epoch; it is an error at construction."""
    with pytest.raises(ValueError, match=f"expected {name} to be"):
        ReadOptions(**{"cache_dir": "cache", name: value})


@pytest.mark.parametrize(
    ("given", "folder"), [("~/c", "/home/me/c"), ("file:///c", "/c"), ("", "")]
)
def test_a_cache_is_a_folder_like_any_other(monkeypatch, given, folder):
    """A cache is where a shell would put it, and not in the current folder unless asked for."""
    monkeypatch.setenv("HOME", "/home/me")
    cache = ReadOptions(cache_dir=given).cache
    assert os.path.dirname(cache.folder if cache else "") == folder


def test_a_cache_takes_a_size(tmp_path):
    """Its limit may be written as on the command line; a word that is no size is refused."""
    assert PrefixCache(str(tmp_path), "1.5 kB").max_bytes == 1500
    with pytest.raises(ValueError, match=r"expected max_bytes to be .* such as '50GB', got 'big'"):
        PrefixCache(str(tmp_path), "big")
