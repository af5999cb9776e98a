"""The parser parts that commands share."""

from argparse import ArgumentTypeError

import pytest

from pcrshard.cli.arguments import at_least, megabytes, open_source, positive, scan_argument
from pcrshard.errors import StorageError


@pytest.mark.parametrize(("text", "scan"), [("1", 1), ("10", 10), ("full", "full")])
def test_a_scan_is_a_number_or_full(text, scan):
    """What --scan takes is what Python's scan= takes."""
    assert scan_argument(text) == scan


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (scan_argument, "-1", "scan number or 'full'"),
        (scan_argument, "Full", "scan number or 'full'"),
        (at_least(1), "0", "of at least 1"),
        (at_least(1), "1.5", "of at least 1"),
        (at_least(0), "nan", "of at least 0"),
        (positive, "0", "above 0"),
        (positive, "nan", "above 0"),
        (megabytes, "-3", "above 0"),
        (megabytes, "fast", "above 0"),
    ],
)
def test_wrong_values_say_what_was_expected(kind, text, expected):
    """The message names the bound and what came."""
    with pytest.raises(ArgumentTypeError, match=f"{expected}, got '{text}'"):
        kind(text)


def test_numbers_at_the_bound_are_fine():
    """Bounds of whole numbers belong to them, and a bandwidth is kept in bytes a second."""
    assert at_least(0)("0") == 0
    assert positive("0.5") == 0.5
    assert megabytes("200") == 200e6


def test_a_shard_stands_for_a_dataset(dataset, shard_urls):
    """One shard alone has the same samples and prefixes as in its dataset."""
    index, urls = open_source(str(dataset))
    alone, url = open_source(shard_urls[0])
    assert (url, urls) == (shard_urls[:1], shard_urls)
    assert alone.num_samples == index.shards[0].num_samples
    assert alone.shards[0].prefix_stops == index.shards[0].prefix_stops
    assert alone.shards[0].shard_bytes == index.shards[0].shard_bytes


def test_no_dataset_says_how_to_make_one(tmp_path):
    """A folder without an index is not just a missing file."""
    with pytest.raises(StorageError, match="make a dataset with `pcrshard encode`"):
        open_source(str(tmp_path))
