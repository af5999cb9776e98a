"""Local files by descriptor: exact, and never silently short."""

import os
import sys

import numpy as np
import pytest

from pcrshard.errors import StorageError, TruncatedShard
from pcrshard.native import scatter
from pcrshard.storage import is_local, open_local, plain_path
from pcrshard.storage.local_file import LocalFile

NINETY = scatter.Groups(np.array([[90]], np.uint32), np.array([10], np.int64))
NOTHING = scatter.Groups(np.zeros((1, 0), np.uint32), np.zeros(1, np.int64))
pytestmark = pytest.mark.skipif(not hasattr(os, "pread"), reason=f"NO pread ON {sys.platform}")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    return path


def test_reads_what_was_asked_for(path):
    """Parts of one opened file, in any order."""
    with LocalFile(str(path)) as file:
        assert file.read(10, 20) == bytes(range(10, 20))
        assert file.read(0, 200) == bytes(range(200))
        assert file.read(7, 7) == b""


@pytest.mark.parametrize("cached", [True, False])
def test_what_is_expected_is_asked_for_at_once(tmp_path, cached):
    """Whether the file is in memory or still on its disk: the bytes are those of the file."""
    data = np.random.default_rng(1).bytes(300_000)
    path = tmp_path / "long"
    path.write_bytes(data)
    with open(path, "rb") as written:
        os.fsync(written.fileno())
        if not cached and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    sizes = np.array([[1000, 69_000, 5], [100, 7, 129_000]], np.uint32)
    places = scatter.Groups(sizes, np.array([100, 150_000], np.int64))
    starts = [100, 1100, 70_100]
    nexts = [150_000, 150_100, 150_107]
    expected = [
        data[start : start + size] + data[more : more + extra]
        for start, size, more, extra in zip(starts, sizes[0], nexts, sizes[1], strict=True)
    ]
    for first, known in ((0, 0), (50, 60), (50, 290_000), (120_000, 1 << 40), (1 << 40, 1 << 40)):
        with LocalFile(str(path), first, known) as file:
            assert file.read(0, 10) == data[:10]
            assert file.read(65_000, 66_000) == data[65_000:66_000]
            assert file.scatter(0, 290_000, places).values == expected
            with pytest.raises(TruncatedShard):
                file.read(0, 300_001)


def test_a_claim_beyond_the_end_takes_no_memory(path):
    """A length out of a damaged head is refused before anything of that length is made."""
    with LocalFile(str(path)) as file:
        with pytest.raises(TruncatedShard, match="expected bytes 10 to 1099511627776, got 190 of"):
            file.read(10, 1 << 40)
        with pytest.raises(TruncatedShard, match="expected bytes 300 to 400, got 0 of 100"):
            file.scatter(300, 400, NOTHING)


def test_a_file_that_shrinks_while_it_is_open(path):
    """A shard that is cut under a running job is an error, not zeros."""
    with LocalFile(str(path)) as file:
        os.truncate(path, 50)
        with pytest.raises(TruncatedShard, match="got 40 of 90"):
            file.read(10, 100)
        if scatter.available:
            with pytest.raises(
                TruncatedShard, match="expected bytes 10 to 100: the file ends at 50"
            ):
                file.scatter(10, 100, NINETY)


@pytest.mark.parametrize("name", ["missing", "."])
def test_errors_name_the_file(tmp_path, name):
    """What the system says, and the path that it is about."""
    with (
        pytest.raises(StorageError, match=f"cannot read.*{name}"),
        open_local(str(tmp_path / name)) as file,
    ):
        file.read(0, 1)
    assert not any(
        os.path.realpath(f"/proc/self/fd/{fd}") == str(tmp_path)
        for fd in os.listdir("/proc/self/fd")
    )


def test_a_fifo_does_not_wait(tmp_path):
    """What is no regular file is refused at once: a FIFO would wait for somebody to write, for
    ever.
    """
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises(OSError, match=f"expected a regular file, got .*{path}"):
            LocalFile(str(path))


@pytest.mark.parametrize("name", ["a\0b.tar", "a\udc80.tar", "x" * 5000])
def test_names_that_no_file_has(tmp_path, name):
    """A name that the system cannot take is an error of ours, like that of a file that is not
    there.
    """
    with (
        pytest.raises(StorageError, match="cannot read"),
        open_local(f"{tmp_path}/{name}"),
    ):
        pass


@pytest.mark.parametrize("url", ["{}", "file://{}", "local://{}"])
def test_a_path_and_its_urls_are_one_file(path, url):
    """``/x`` and ``file:///x`` read in the same way: by descriptor, without a buffer in between."""
    assert is_local(url.format(path))
    assert plain_path(url.format(path)) == str(path)
    with open_local(url.format(path)) as file:
        assert file.read(0, 3) == b"\0\1\2"
    assert not is_local("pipe:cat a.tar")
    assert not is_local("s3://bucket/a.tar")


def test_a_relative_path_and_one_below_home_are_found(path, monkeypatch):
    """The same names as everywhere else in the package: relative, and with a tilde."""
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("HOME", str(path.parent))
    for url in ("file", "~/file"):
        with open_local(url) as file:
            assert file.read(0, 3) == b"\0\1\2"
