"""A file that must not exist yet: of two writers one succeeds, on every store."""

import concurrent.futures
import errno
import os
import typing

import fsspec
import pytest
import servers
from fsspec.implementations.memory import MemoryFileSystem

from pcrshard import Retry, storage
from pcrshard.errors import StorageError
from pcrshard.storage import Store


def race(url, count=8):
    """Several threads create the same file; gives whose content is there, and who succeeded."""

    def work(number):
        try:
            storage.create(url, b"%d" % number)
        except FileExistsError:
            return None
        return number

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        winners = [n for n in pool.map(work, range(count)) if n is not None]
    return int(storage.read_bytes(url)), winners


def test_one_of_many_writers_succeeds_on_local_disk(tmp_path):
    """And leaves no temporary file."""
    for number in range(20):
        content, winners = race(str(tmp_path / "deep" / f"{number}"))
        assert winners == [content]
    assert len(os.listdir(tmp_path / "deep")) == 20


def test_the_second_writer_fails_on_s3():
    """By If-None-Match; that the store compares and writes in one step is its own promise."""
    with servers.s3() as server:
        url, how = server.url("a"), {"options": server.storage_options}
        storage.create(url, b"1", **how)
        with pytest.raises(FileExistsError):
            storage.create(url, b"2", **how)
        assert storage.read_bytes(url, **how) == b"1"
        assert 0 <= storage.age_seconds(url, **how) < 60


class Flaky(MemoryFileSystem):
    """A store with create-only writes whose answers are lost at times."""

    protocol = ("memory", "flaky")
    store: typing.ClassVar = {}
    pseudo_dirs: typing.ClassVar = [""]
    failures: typing.ClassVar = []

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        when = self.failures.pop(0) if self.failures else None
        if when == "before":
            raise ConnectionResetError("lost")
        super().pipe_file(path, value, mode=mode, **kwargs)
        if when == "after":
            raise ConnectionResetError("lost")


def test_a_write_whose_answer_is_lost_is_tried_again():
    """One request in a few is lost, before or after it took effect: the file is there once, and a
    file of another writer is still a conflict.
    """
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    how = {"options": Store.of(None, Retry(attempts=3, first_delay=0.001))}
    for number, failures in enumerate((["before"], ["after"], ["before", "after"], [])):
        Flaky.failures[:] = failures
        storage.create(f"flaky://{number}", b"mine", **how)
        assert storage.read_bytes(f"flaky://{number}") == b"mine"
        assert not Flaky.failures
    Flaky.failures[:] = ["before"]
    with pytest.raises(FileExistsError):
        storage.create("flaky://0", b"another", **how)
    Flaky.failures[:] = ["before"] * 3
    with pytest.raises(StorageError, match="cannot write"):
        storage.create("flaky://new", b"mine", **how)
    # Equal data of another writer are a conflict, unless an answer was lost.
    Flaky.failures[:] = []
    with pytest.raises(FileExistsError):
        storage.create("flaky://0", b"mine", **how)


class Plain(MemoryFileSystem):
    """A store without create-only writes."""

    protocol = ("plain",)
    store: typing.ClassVar = {}
    pseudo_dirs: typing.ClassVar = [""]


def test_a_store_without_such_writes_is_named(caplog, monkeypatch):
    """A lease keeps other writers away, and the log says so; a file is never replaced."""
    monkeypatch.setattr("pcrshard.storage.files._LEASE_SETTLE_SECONDS", 0.01)
    fsspec.register_implementation("plain", Plain, clobber=True)
    storage.create("plain://store/a", b"1")
    assert "no create-only writes" in caplog.text
    with pytest.raises(FileExistsError):
        storage.create("plain://store/a", b"2")
    assert storage.read_bytes("plain://store/a") == b"1"
    fs, path = fsspec.core.url_to_fs("plain://store/b")
    fs.pipe_file(f"{path}.lease", b"another process")
    with pytest.raises(FileExistsError):
        storage.create("plain://store/b", b"2")
    assert not fs.exists(path)


def test_a_folder_that_is_a_file_is_an_error_of_ours(tmp_path):
    """Not FileExistsError: nothing is there under the name."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError):
        storage.create(str(tmp_path / "file" / "a"), b"1")


def test_file_systems_without_hard_links_work(tmp_path, monkeypatch):
    """Some FUSE and FAT ones have none."""

    def refuse(source, target):
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    storage.create(str(tmp_path / "a"), b"1")
    with pytest.raises(FileExistsError):
        storage.create(str(tmp_path / "a"), b"2")
    assert (tmp_path / "a").read_bytes() == b"1"
    assert os.listdir(tmp_path) == ["a"]
