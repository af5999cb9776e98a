"""A store on S3 (moto's server): what the property test cannot see."""

import signal

import fsspec
import pytest
import servers
import torch
from children import start
from states import same, tiny_state
from support import wait_for

from pcrshard.checkpoint import DeltaStore
from pcrshard.errors import StorageError


@pytest.fixture(scope="module")
def s3():
    with servers.s3() as server:
        yield server


def make(server, name, count=5):
    url = server.url(name)
    with DeltaStore(url, options=server.storage_options, keyframe_every=3) as store:
        for number in range(1, count + 1):
            store.save(tiny_state(number))
    return DeltaStore(url, options=server.storage_options)


def check(store, numbers):
    assert [record.number for record in store.versions()] == list(numbers)
    assert store.verify() == []
    for number in numbers:
        loaded = store.load(number)
        assert loaded["epoch"] == number
        assert same(loaded["model"]["b"], tiny_state(number)["model"]["b"])


def names_in(store, server):
    fs, path = fsspec.core.url_to_fs(store.url, **server.storage_options)
    fs.invalidate_cache()
    return sorted(name.rpartition("/")[2] for name in fs.ls(path, detail=False))


def test_one_tensor_reads_little(s3):
    """Ranged requests for its payload, and the headers on its way."""
    state = {"large": torch.randn(1000, 1000), "small": torch.randn(4, 4)}
    with DeltaStore(s3.url("names"), options=s3.storage_options) as store:
        store.save(state, blocking=True)
        s3.reset()
        assert torch.equal(store.load(names=["small"])["small"], state["small"])
    assert sum(request.body_bytes for request in s3.requests()) < 20_000


def save_fourth(connection, url, options):
    DeltaStore(url, options=options).save(tiny_state(4), blocking=True)


def test_leftovers_of_a_killed_writer_are_removed_after_an_hour(s3, monkeypatch):
    """Killed between version and manifest: nothing is lost, and the object goes later."""
    store = make(s3, "killed", count=3)
    prefix = f"/{s3.url('killed').removeprefix('s3://')}/manifest-"
    reached = []

    def hold(ask):
        if ask.method == "PUT" and ask.path.startswith(prefix):
            reached.append(ask.number)
            return servers.Fault(stall=60)
        return None

    with servers.faulty_proxy(s3.endpoint, hold) as proxy:
        options = s3.storage_options_at(proxy.endpoint)
        plain = {name: options[name] for name in ("key", "secret", "client_kwargs")}
        child, _ = start(save_fourth, store.url, plain)
        wait_for(lambda: reached or not child.is_alive(), 60)
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    check(store, [1, 2, 3])
    store.save(tiny_state(4), blocking=True)
    check(store, [1, 2, 3, 4])
    store.close()
    assert sum(name.endswith(".pcd") for name in names_in(store, s3)) == 5
    monkeypatch.setattr("pcrshard.checkpoint.manifest._LEFTOVER_SECONDS", -100.0)
    with DeltaStore(store.url, options=s3.storage_options) as later:
        later.save(tiny_state(5))
    assert sum(name.endswith(".pcd") for name in names_in(store, s3)) == 5
    check(store, range(1, 6))


def test_a_store_that_refuses_is_an_error_of_ours(s3):
    """A bucket that is not there."""
    url = "s3://no-such-bucket-at-all/run"
    with (
        pytest.raises(StorageError),
        DeltaStore(url, options=s3.storage_options) as store,
    ):
        store.save(tiny_state(1), blocking=True)
