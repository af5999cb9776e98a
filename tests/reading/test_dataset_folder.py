"""A dataset is named by its folder or by its index."""

import pathlib

import pytest

from pcrshard import open_dataset
from pcrshard.errors import CorruptIndex, StorageError
from pcrshard.reading.dataset_folder import index_url


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("shards", "shards/pcr.json"),
        ("shards/", "shards/pcr.json"),
        ("shards/pcr.json", "shards/pcr.json"),
        ("pcr.json", "./pcr.json"),
        ("/", "/pcr.json"),
        ("s3://b/d/", "s3://b/d/pcr.json"),
        ("https://h/d?sig=1", "https://h/d/pcr.json?sig=1"),
        (pathlib.Path("d"), "d/pcr.json"),
    ],
)
def test_where_the_index_lies(given, expected):
    """The folder, with or without a slash, and the index itself mean the same dataset."""
    assert index_url(given) == expected


def test_shards_lie_beside_the_index(dataset):
    """Every URL that is handed out is a file, in the order of the index."""
    index, urls = open_dataset(f"file://{dataset}/pcr.json")
    assert [url.rpartition("/")[2] for url in urls] == [entry.name for entry in index.shards]
    assert all(pathlib.Path(url.removeprefix("file://")).is_file() for url in urls)


def test_what_is_no_dataset_is_an_error(tmp_path):
    """A folder without an index, and an index that is none, are named."""
    with pytest.raises(StorageError, match=r"pcr\.json"):
        open_dataset(tmp_path)
    (tmp_path / "pcr.json").write_text("{}")
    with pytest.raises(CorruptIndex, match=r"pcr\.json"):
        open_dataset(tmp_path)
