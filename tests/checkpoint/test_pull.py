"""Pulls transfer only missing bytes, resume after a kill, and add nothing that is damaged."""

import contextlib
import itertools
import os
import pathlib
import struct
import threading
import time

import pytest
from forge import manifest_path, rewrite_manifest
from servers import nginx
from states import same, saved, tiny_state
from support import damage

from pcrshard.checkpoint import DeltaStore, pull
from pcrshard.errors import (
    BrokenChain,
    ConcurrentWriter,
    CorruptCheckpoint,
    PCRError,
    StorageError,
)
from pcrshard.storage.locks import hold_lock


def state(step):
    return tiny_state(step, 200, 100)["model"]


@pytest.fixture
def sender(tmp_path):
    """Return a store of versions 1 to 5, with keyframes at 1 and 4."""
    return saved(tmp_path / "web", 5, state, precision="balanced", keyframe_every=3)


@pytest.fixture
def client(tmp_path):
    return DeltaStore(tmp_path / "client")


def ids(store):
    return {record.number: record.id for record in store.versions()}


def test_only_missing_files_move(sender, client):
    """An empty client fetches a keyframe, and later one delta, as nginx's log confirms."""
    told = []
    with nginx(sender.url) as server:
        first = pull(server.url(), client, version=4, progress=lambda *far: told.append(far))
        assert (first.added, told[-1]) == ((4,), (first.moved_bytes, first.moved_bytes))
        server.reset()
        second = pull(server.url(), client)
        asked = [request for request in server.requests() if request.path.endswith(".pcd")]
        again = pull(server.url(), client)
        assert same(DeltaStore(server.url()).load(), client.load())
    assert second.added == (5,)
    assert sum(request.body_bytes for request in asked) == second.moved_bytes
    assert 5 * second.moved_bytes < sender.versions()[4].raw_bytes
    assert same(client.load(), sender.load())
    assert (again.version, again.added, again.moved_bytes) == (5, (), 0)


def test_a_chain_of_deltas_is_followed(sender, client, tmp_path):
    """Earlier deltas come along; a pull that failed at a later file keeps the files it has."""
    last = tmp_path / "web" / sender.versions()[2].file
    last.rename(tmp_path / "away")
    with pytest.raises(StorageError):
        pull(sender.url, client, version=3)
    (tmp_path / "away").rename(last)
    got = pull(sender.url, client, version=3)
    assert (got.added, got.moved_bytes) == ((1, 2, 3), last.stat().st_size)
    assert ids(client) == {n: ids(sender)[n] for n in (1, 2, 3)}
    assert client.save(state(9), blocking=True) == 4
    with pytest.raises(BrokenChain, match="of another run"):
        pull(sender.url, client, version=4)


def test_pulling_while_versions_are_saved(tmp_path, client):
    """Each pull yields a complete version while a writer saves and deletes."""
    stop = threading.Event()
    store = saved(tmp_path / "web", 1, state, keyframe_every=3)

    def write():
        for number in itertools.takewhile(lambda _: not stop.is_set(), itertools.count(2)):
            store.save({"n": number}, blocking=True)
            store.delete(keep=[-1, -2])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = []
        end = time.monotonic() + 60
        while len(set(seen)) < 4 and time.monotonic() < end:
            # A file may be deleted after the manifest was read.
            with contextlib.suppress(StorageError):
                seen.append(pull(store.url, client).version)
                assert client.load().get("n", 1) == seen[-1]
    finally:
        stop.set()
        writer.join()
        store.close()
    assert seen == sorted(seen)
    assert len(set(seen)) >= 4
    assert client.verify() == []


def test_a_pull_goes_on_in_the_middle_of_a_file(sender, client):
    """The bytes that a killed pull left are not transferred again; two pulls exclude each other."""
    record = sender.versions()[3]
    os.makedirs(client.url)
    part = pathlib.Path(client.url) / f".{record.file}.part"
    part.write_bytes((pathlib.Path(sender.url) / record.file).read_bytes()[:1000])
    with hold_lock(str(part)), pytest.raises(ConcurrentWriter, match="another process pulls"):
        pull(sender.url, client, version=4)
    assert pull(sender.url, client, version=4).moved_bytes == record.file_bytes - 1000
    assert client.verify() == []
    assert not part.exists()


def test_what_is_wrong_adds_nothing(sender, client, tmp_path):
    """A flipped bit, or lies about ids, parents, sizes, or files, leave the store as it was."""
    pull(sender.url, client, version=4)

    def refused():
        with pytest.raises(PCRError):
            pull(sender.url, client)
        assert list(ids(client)) == [4]
        assert client.verify() == []

    key, delta = sender.versions()[3:]
    path, manifest = tmp_path / "web" / delta.file, manifest_path(tmp_path / "web")
    whole, honest = path.read_bytes(), manifest.read_bytes()
    lies = [{"id": key.id}, {"parent": 3}, {"raw_bytes": 1}, {"file": key.file}]
    lies += [{"file_bytes": delta.file_bytes + n} for n in (-1, 1)] + [{"header_bytes": 100}]
    for lie in lies:
        rewrite_manifest(tmp_path / "web", lambda raw, lie=lie: raw["versions"][-1].update(lie))
        refused()
        refused()  # also with what the first attempt left
    manifest.write_bytes(honest)
    damage(path)
    refused()
    path.write_bytes(whole)
    pull(sender.url, client)
    assert list(ids(client)) == [4, 5]


def test_more_than_max_bytes_is_refused(sender, client, tmp_path):
    """A version larger than ``max_bytes`` is refused before any of it is transferred."""
    with nginx(sender.url) as server:
        with pytest.raises(CorruptCheckpoint, match=r"at most 10000 bytes.*max_bytes"):
            pull(server.url(), client, max_bytes=10_000)
        assert [request.path for request in server.requests()] == ["/manifest.pcm"]
        with pytest.raises(CorruptCheckpoint, match="at most 0 bytes"):
            pull(server.url(), client, max_bytes=0)
    (tmp_path / "endless").mkdir()
    head = b"\x89PCM\r\n\x1a\n" + struct.pack("<IIQ", 0, 2, 1 << 25)
    with (tmp_path / "endless" / "manifest.pcm").open("wb") as file:
        file.write(head)
        file.truncate(1 << 33)
    with nginx(tmp_path / "endless") as server, pytest.raises(PCRError):
        pull(server.url(), client, max_bytes=1 << 20)
