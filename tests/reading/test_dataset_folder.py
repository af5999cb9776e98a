"""A dataset is named by its folder or by its index."""

import pathlib
import shutil
import threading
import time

import numpy as np
import pytest
import servers
from msgspec.structs import replace
from support import write_files

import pcrshard
from pcrshard import DatasetIndex, PCRDataset, Retry, ShardWriter, open_dataset
from pcrshard.cli.main import main
from pcrshard.errors import CorruptIndex, StorageError, TruncatedShard
from pcrshard.format.dataset_index import ShardEntry
from pcrshard.format.schema import Schema
from pcrshard.reading.dataset_folder import find_datasets, index_url
from pcrshard.testing import make_jpeg


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("shards", "shards/pcr.json"),
        ("shards/", "shards/pcr.json"),
        ("shards/pcr.json", "shards/pcr.json"),
        ("pcr.json", "pcr.json"),
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
    """Every URL that is handed out is a file, in the order of the index; braces name some."""
    index, urls = open_dataset(f"file://{dataset}/pcr.json")
    assert [url.rpartition("/")[2] for url in urls] == [entry.name for entry in index.shards]
    assert all(pathlib.Path(url.removeprefix("file://")).is_file() for url in urls)
    some, found = open_dataset(f"file://{dataset}/data-{{000000..000001}}.tar")
    assert (some.shards, found) == (index.shards[:2], urls[:2])


def test_what_is_no_dataset_is_an_error(tmp_path):
    """A folder without an index, and an index that is none, are named."""
    with pytest.raises(StorageError, match=r"name the folder of a dataset.*pcrshard encode"):
        open_dataset(tmp_path)
    with pytest.raises(ValueError, match="expected a dataset, got none"):
        open_dataset([])
    with pytest.raises(StorageError, match=r"expected braces instead of wildcards.*\*\.tar"):
        open_dataset(tmp_path / "*.tar")
    (tmp_path / "pcr.json").write_text("{}")
    with pytest.raises(CorruptIndex, match=r"pcr\.json"):
        open_dataset(tmp_path)


def test_a_dataset_in_an_archive(dataset, tmp_path):
    """A chain of protocols names a dataset, its splits and its shards like any other URL."""
    shutil.copytree(dataset, tmp_path / "d" / "val")
    archive = shutil.make_archive(tmp_path / "a", "zip", tmp_path / "d")
    assert find_datasets(f"zip://::{archive}") == {"val": f"zip:///val::{archive}"}
    index, urls = open_dataset(f"zip://val::{archive}")
    assert open_dataset(urls) == (index, urls)
    with pytest.raises(StorageError, match=r"none\.zip"):
        open_dataset(f"zip://val::{tmp_path}/none.zip")


def test_the_splits_of_a_folder(dataset, tmp_path):
    """The subfolders that are datasets are found, and opening their parent says what to do."""
    for name in ("train", "val"):
        (tmp_path / name).symlink_to(dataset)
    (tmp_path / "other").mkdir()
    assert find_datasets(tmp_path) == {name: f"{tmp_path}/{name}" for name in ("train", "val")}
    assert find_datasets(dataset) == {"": str(dataset)}
    with pytest.raises(StorageError, match="name the folder of a split: train, val"):
        open_dataset(tmp_path)


@pytest.fixture
def boasting(tmp_path):
    """A dataset index that claims 10 million samples, all of them in shards that are not there."""
    entry = ShardEntry("a-000000.tar", 1 << 23, 7, (1 << 40,) * 4)
    shards = (entry, replace(entry, name="a-000001.tar", num_samples=10_000_000 - (1 << 23)))
    (tmp_path / "pcr.json").write_bytes(
        DatasetIndex(Schema("standard", ("1", "2")), shards).encode()
    )
    return tmp_path


def test_many_samples_are_believed_when_their_shard_was_seen(boasting, capsys):
    """An index alone does not make a plan of gigabytes: its largest shard must be there, as long
    as an index of that many samples.
    """
    assert open_dataset(boasting)[0].num_samples == 10_000_000
    with pytest.raises(StorageError, match="a-000000"):
        pcrshard.PCRDataset(boasting)
    assert main(["plan", str(boasting), "--batch", "100"]) == 1
    assert "a-000000" in capsys.readouterr().err

    (boasting / "a-000000.tar").write_bytes(bytes(1024))
    with pytest.raises(TruncatedShard, match="the file has 1024"):
        pcrshard.PCRDataset(boasting)


@pytest.fixture(scope="module")
def many_shards(tmp_path_factory):
    """A dataset of 48 shards."""
    folder = tmp_path_factory.mktemp("many")
    with ShardWriter(folder, samples_per_shard=1, classes=("cat", "dog")) as writer:
        for number in range(48):
            writer.write({"__key__": f"{number}", "jpg": make_jpeg(0, 16, 16), "cls": number % 2})
    return folder


@pytest.mark.parametrize("what", ["keys", "heads"])
def test_metadata_of_shards_is_read_sixteen_at_a_time(many_shards, tmp_path, what):
    """What costs one request a shard takes as long as a sixteenth of them, on every Python, and
    never more requests at once.
    """
    lock, busy, most = threading.Lock(), [0], [0]

    def count(ask):
        with lock:
            busy[0] += 1
            most[0] = max(most[0], busy[0])
        time.sleep(0.05)
        with lock:
            busy[0] -= 1

    with servers.faulty(many_shards, count) as server:
        names = [path.name for path in sorted(many_shards.glob("*.tar"))]
        if what == "keys":
            assert len(PCRDataset(server.url("")).keys) == 48
        else:
            bare = write_files(tmp_path, {n: (many_shards / n).read_bytes() for n in names})
            with servers.faulty(bare, count) as other:
                found, _ = open_dataset([other.url(name) for name in names])
            assert found.num_samples == 48
    assert 12 <= most[0] <= 16


def test_a_full_cache_starts_a_job_while_the_server_is_down(dataset, tmp_path, caplog):
    """A new job needs no server if the cache holds all prefixes; without one it is told why."""
    reading = {"scan": 2, "retry": Retry(attempts=2)}
    with servers.nginx(dataset) as server:
        url = server.url()
        first = PCRDataset(url, cache_dir=tmp_path / "cache", **reading)
        expected = [first[number]["jpg"] for number in range(len(first))]
    again = PCRDataset(url, cache_dir=tmp_path / "cache", **reading)
    assert "continuing with the dataset index that the cache keeps" in caplog.text
    assert [again[number]["jpg"] for number in range(len(again))] == expected
    assert again.cache_stats().fetched_bytes == 0
    with pytest.raises(StorageError, match="connection refused"):
        again.at(5)[0]
    with pytest.raises(StorageError, match="connection refused: ClientConnectorError"):
        PCRDataset(url, **reading)
    assert main(["cache", "ls", str(tmp_path / "cache")]) == 0


@pytest.mark.parametrize("column", ["labels", "sizes", "decodable"])
def test_a_full_cache_has_what_is_said_of_all_samples(dataset, tmp_path, column, caplog):
    """A script that begins with a split by labels starts from a full cache, too."""
    how = {"scan": 1, "retry": Retry(attempts=2)}
    with servers.nginx(dataset) as server:
        url = server.url()
        first = PCRDataset(url, cache_dir=tmp_path / "cache", **how)
        expected = getattr(first, column)
        _ = [first[number] for number in range(len(first))]
        without = PCRDataset(url, **how)
    again = PCRDataset(url, cache_dir=tmp_path / "cache", **how)
    assert np.array_equal(getattr(again, column), expected)
    assert "reading the index of each shard from the cache" in caplog.text
    with pytest.raises(StorageError, match="connection refused"):
        getattr(without, column)


def test_a_dataset_that_is_gone_is_not_taken_from_the_cache(dataset, tmp_path):
    """A server that answers is believed, and what it sends replaces what the cache keeps."""
    folder = shutil.copytree(dataset, tmp_path / "served")
    with servers.nginx(folder) as server:
        PCRDataset(server.url(), cache_dir=tmp_path / "cache")
        (folder / "pcr.json").rename(tmp_path / "pcr.json")
        with pytest.raises(StorageError, match=r"no pcr\.json there"):
            PCRDataset(server.url(), cache_dir=tmp_path / "cache")
        text = (tmp_path / "pcr.json").read_text()
        (folder / "pcr.json").write_text(text.replace('"cat"', '"cow"').replace('"dog"', '"elk"'))
        assert "cow" in PCRDataset(server.url(), cache_dir=tmp_path / "cache").classes
        url = server.url()
    assert "cow" in PCRDataset(url, cache_dir=tmp_path / "cache", retry=Retry(attempts=2)).classes


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://localhost:9"])
def test_a_refused_connection_of_s3_is_named(endpoint):
    """Nothing listens there: that is no slow server, and known within the timeout."""
    options = {"endpoint_url": endpoint, "key": "a", "secret": "b"}
    with pytest.raises(StorageError, match="connection refused: EndpointConnectionError"):
        PCRDataset("s3://b/x", storage_options=options, retry=Retry(attempts=2, timeout=3))
