"""The head of a shard: found, checked, and known by its checksum."""

import io
import tarfile

import pytest

from pcrshard.errors import NotAShard, TruncatedShard
from pcrshard.format.shard_head import HEAD_STOP, is_tar, read_head


def first_bytes(url):
    with open(url, "rb") as file:
        return file.read(HEAD_STOP)


def plain_tar():
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
