"""The head of a shard: found, checked, and known by its checksum."""

import io
import tarfile

import pytest

from pcrshard import Shard, open_dataset
from pcrshard.errors import NotAShard, TruncatedShard
from pcrshard.format.shard_head import HEAD_STOP, Head, is_tar, read_head

HEAD = Head(3, 100, 400, 7, (2048, 2560, 4096), (8, 8, 8), 900)


def first_bytes(url: str) -> bytes:
    with open(url, "rb") as file:
        return file.read(HEAD_STOP)


def test_the_head_is_read_from_the_first_kilobyte(dataset):
    """Head and checksum match the dataset index, so a replaced shard is detected; what is written
    is what is read.
    """
    index, urls = open_dataset(str(dataset))
    for entry, url in zip(index.shards, urls, strict=True):
        head = read_head(first_bytes(url))
        assert head == Shard(url).head
        assert head.crc32c == entry.head_crc32c
        assert head.stops == entry.stops
        stops = [head.prefix_stop(scan) for scan in (*range(11), "full")]
        assert stops == [entry.prefix_stop(scan) for scan in (*range(11), "full")]
        start = first_bytes(url)
        assert head.encode() == start[512:]
        assert read_head(start[:512] + head._replace(num_samples=4).encode()) != head


def plain_tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("a.txt"))
    return out.getvalue()


@pytest.mark.parametrize("start", [b"", b"nonsense" * 200, plain_tar()])
def test_other_files_are_not_shards(start):
    """An empty file, garbage and the tar of something else are told apart from damage."""
    with pytest.raises(NotAShard, match=r"expected a PCR shard.*here\.tar"):
        read_head(start, url="here.tar")
    assert is_tar(start) == (start == plain_tar())


def test_a_short_file_says_so(shard_urls):
    """A file that ends inside its head is truncated."""
    with pytest.raises(TruncatedShard, match="expected 1024 bytes of head, got 700"):
        read_head(first_bytes(shard_urls[0])[:700])
