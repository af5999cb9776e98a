"""A store on S3 (moto's server): all that a local one does, without locks and renames."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import servers
from states import same, tiny_state
from support import wait_for

from pcrshard.checkpoint import DeltaStore
from pcrshard.checkpoint.manifest import read_manifest
from pcrshard.errors import ConcurrentWriter, CorruptCheckpoint, StorageError

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def s3():
    with servers.s3() as server:
        yield server


def make(server, name, count=5, **options):
    url = server.url(name)
    with DeltaStore(url, options=server.storage_options, keyframe_every=3, **options) as store:
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


@pytest.mark.parametrize("order", ["backward", "forward", "hop"])
def test_save_load_verify_compact_rebase(s3, order):
    """The same calls, the same versions; replaced objects are removed."""
    store = make(s3, f"all-{order}", order=order)
    check(store, range(1, 6))
    before = {record.number: record.id for record in store.versions()}
    store.compact([2, 3, 5])
    check(store, [2, 3, 5])
    store.rebase(order="forward", keyframe_every=2)
    check(store, [2, 3, 5])
    assert {r.number: r.id for r in store.versions()} == {n: before[n] for n in (2, 3, 5)}
    asked = s3.storage_options
    files = {record.file for record in store.versions()}
    import fsspec

    fs, path = fsspec.core.url_to_fs(store.url, **asked)
    fs.invalidate_cache()
    assert {name.rpartition("/")[2] for name in fs.find(path)} == files | {"manifest.pcm"}


def test_one_tensor_moves_few_bytes(s3):
    """Ranged requests for what is asked, not the whole object."""
    import torch

    state = {"big": torch.randn(1000, 1000), "small": torch.randn(30, 30)}
    with DeltaStore(s3.url("named"), bound=None, options=s3.storage_options) as store:
        store.save(state)
    s3.reset()
    loaded = store.load(1, names=["small"])["small"]
    assert torch.equal(loaded, state["small"])
    assert sum(request.body_bytes for request in s3.requests()) < 20_000


def test_two_writers_are_detected(s3):
    """The one who did not see the other's version is refused; the other's version stays."""
    first = make(s3, "writers", count=1)
    second = DeltaStore(first.url, options=s3.storage_options)
    first.save(tiny_state(2), blocking=True)
    with pytest.raises(ConcurrentWriter, match="expected to write version 3, got 2"):
        second.save(tiny_state(9), blocking=True)
    check(first, [1, 2])
    second.save(tiny_state(3), blocking=True)
    with pytest.raises(ConcurrentWriter, match="another process has written to this store"):
        first.save(tiny_state(9), blocking=True)
    check(first, [1, 2, 3])
    first.save(tiny_state(4), blocking=True)
    check(second, [1, 2, 3, 4])
    first.close()
    second.close()


def test_the_later_of_two_at_the_same_moment_is_told(s3):
    """Both have read the same generation; the first one finds the other's manifest in its place."""
    store = make(s3, "moment", count=1)
    manifest = f"/{s3.url('moment').removeprefix('s3://')}/manifest.pcm"
    written = []

    def overtake(ask):
        """After the manifest was put, before it is read back, the other one writes."""
        if ask.method == "PUT" and ask.path == manifest:
            written.append(ask.number)
        elif ask.method == "GET" and ask.path == manifest and len(written) == 1:
            written.append(ask.number)
            with DeltaStore(store.url, options=s3.storage_options) as other:
                other.save(tiny_state(7))

    with servers.faulty_proxy(s3.endpoint, overtake) as proxy:
        options = s3.storage_options_at(proxy.endpoint)
        slow = DeltaStore(store.url, options=options)
        with pytest.raises(ConcurrentWriter, match="another process has replaced the manifest"):
            slow.save(tiny_state(2), blocking=True)
    assert len(written) == 2
    assert store.verify() == []
    assert store.load()["epoch"] == 7


CHILD = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from states import tiny_state
from pcrshard.checkpoint import DeltaStore
options = json.loads(os.environ["STORE_OPTIONS"])
store = DeltaStore(sys.argv[2], options=options)
print("ready", flush=True)
store.save(tiny_state(4), blocking=True)
"""


def test_a_writer_that_dies_between_version_and_manifest(s3):
    """Its version is not in the store, all others are, and the next writer goes on."""
    store = make(s3, "killed", count=3)
    manifest = f"/{s3.url('killed').removeprefix('s3://')}/manifest.pcm"
    before = read_manifest(store.url, s3.storage_options)
    reached = []

    def hold(ask):
        if ask.method == "PUT" and ask.path == manifest:
            reached.append(ask.number)
            return servers.Fault(stall=60)
        return None

    with servers.faulty_proxy(s3.endpoint, hold) as proxy:
        options = s3.storage_options_at(proxy.endpoint)
        plain = {name: options[name] for name in ("key", "secret", "client_kwargs")}
        environment = os.environ | {
            "STORE_OPTIONS": json.dumps(plain),
            "PYTHONPATH": str(HERE.parent.parent),
        }
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(HERE), store.url],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        wait_for(lambda: reached or child.poll() is not None, 60)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert read_manifest(store.url, s3.storage_options) == before
    check(store, [1, 2, 3])
    store.save(tiny_state(4), blocking=True)
    check(store, [1, 2, 3, 4])
    store.close()


def test_a_lost_manifest_is_recovered(s3):
    """From the objects alone; until then nothing is written."""
    import fsspec

    store = make(s3, "lost")
    before = store.versions()
    fs, path = fsspec.core.url_to_fs(store.url, **s3.storage_options)
    fs.rm(f"{path.rstrip('/')}/manifest.pcm")
    again = DeltaStore(store.url, options=s3.storage_options)
    with pytest.raises(CorruptCheckpoint, match="files of 5 versions"):
        again.save(tiny_state(1), blocking=True)
    found = DeltaStore.recover(store.url, options=s3.storage_options)
    assert found.versions == tuple(before)
    check(store, range(1, 6))


def test_a_store_that_refuses_is_an_error_of_ours(s3):
    """A bucket that is not there."""
    url = "s3://no-such-bucket-at-all/run"
    with DeltaStore(url, options=s3.storage_options) as store, pytest.raises(StorageError):
        store.save(tiny_state(1), blocking=True)
