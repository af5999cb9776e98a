"""File systems after a fork."""

import multiprocessing
import sys
import time

import pytest
import servers

from pcrshard import storage
from pcrshard.errors import StorageError
from pcrshard.storage import stores


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


def test_an_address_of_ipv6_is_no_chain():
    """A server on an IPv6 network is reached, and its brackets are no pattern."""
    url = "http://[2001:db8::1]:80/a"
    assert stores.resolve(url, None)[1] == url
    assert not storage.is_pattern(url)


def test_a_missing_package_is_named(monkeypatch):
    """Who reads from a store for the first time is told what to install."""
    monkeypatch.setitem(sys.modules, "pcrshard.storage.redirects", None)
    with pytest.raises(StorageError, match=r"pip install 'pcrshard\[http\]'.*http://h/a"):
        storage.read("http://h/a", 0, 1)
