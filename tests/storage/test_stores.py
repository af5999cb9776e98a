"""The fsspec layer: store selection, and our own errors that name the file."""

import multiprocessing
import time

import fsspec
import pytest
import servers
from fsspec.implementations.memory import MemoryFileSystem

from pcrshard import storage
from pcrshard.errors import StorageError


class Fails(MemoryFileSystem):
    """A store whose every call fails with a password in the message."""

    protocol = "fails"

    def info(self, path, **kwargs):
        raise OSError("http://me:hunter2@host/a refused")


@pytest.fixture(autouse=True, scope="module")
def _file_system():
    fsspec.register_implementation("fails", Fails, clobber=True)


@pytest.mark.parametrize("call", [storage.file_bytes, storage.identity, storage.list_files])
def test_secrets_of_other_libraries_stay_out_of_errors(call, monkeypatch):
    """Neither the error nor the cause that a traceback prints has the password."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(StorageError) as caught:
        call("fails:///a")
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_an_unknown_protocol_says_so():
    """A typo in a URL's protocol raises an error that quotes the URL."""
    with pytest.raises(StorageError, match="s4://bucket"):
        storage.exists("s4://bucket/a")


def _seconds_to_read(url, answer):
    begun = time.monotonic()
    storage.file_bytes(url)
    answer.put(time.monotonic() - begun)


def test_a_forked_process_reads_at_once(tmp_path):
    """A DataLoader's worker does not wait for connections that its parent has open: the first
    read of each forked process took a second more.
    """
    (tmp_path / "a").write_bytes(b"bytes")
    fork = multiprocessing.get_context("fork")
    with servers.nginx(tmp_path) as server:
        assert storage.file_bytes(server.url("a")) == 5
        answer = fork.SimpleQueue()
        child = fork.Process(target=_seconds_to_read, args=(server.url("a"), answer))
        child.start()
        child.join()
        assert answer.get() < 0.9
