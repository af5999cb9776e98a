"""Versions are removed and deltas written again without changing a bit of any other version."""

import os
import pathlib

import pytest
from states import same, tiny_state

from pcrshard.checkpoint import DeltaStore, rewrite
from pcrshard.checkpoint.manifest import read_manifest
from pcrshard.errors import CorruptCheckpoint, VersionUnavailable


@pytest.fixture
def store(tmp_path):
    with DeltaStore(str(tmp_path), keyframe_every=4) as made:
        for number in range(1, 10):
            made.save(tiny_state(number))
        made.wait()
        yield made


def content(store):
    return {record.number: (record.id, store.load(record.number)) for record in store.versions()}


def equal(a, b):
    return a.keys() == b.keys() and all(
        a[number][0] == b[number][0] and same(a[number][1], b[number][1]) for number in a
    )


@pytest.mark.parametrize("order", ["forward", "hop", "backward"])
@pytest.mark.parametrize("keyframe_every", [1, 3, 100])
def test_another_order_changes_no_bit(store, order, keyframe_every):
    """Integers add up whichever way they are written."""
    before = content(store)
    store.rebase(order=order, keyframe_every=keyframe_every)
    assert equal(content(store), before)
    assert store.verify() == []
    assert store.order == order
    names = {record.file for record in store.versions()} | {"manifest.pcm"}
    assert set(os.listdir(store.url)) == names


@pytest.mark.parametrize("keep", [[9], [1], [1, 5, 9], [2, 3, 4, 7], [], range(1, 10)])
def test_versions_are_removed_and_the_rest_stays(store, keep):
    """Deltas to removed versions are written again; numbers are not used again."""
    before = content(store)
    store.compact(keep)
    assert equal(content(store), {number: before[number] for number in keep})
    assert store.verify() == []
    assert len(os.listdir(store.url)) == len(keep) + 1
    assert store.save(tiny_state(10), blocking=True) == 10
    assert same(store.load(10)["epoch"], 10)


def test_a_version_that_is_not_there_cannot_be_kept(store):
    """And then nothing is removed."""
    with pytest.raises(VersionUnavailable, match="no version 77"):
        store.compact([1, 77])
    assert len(store.versions()) == 9
    with pytest.raises(ValueError, match="expected an order"):
        store.rebase(order="sideways")


def test_a_damaged_version_is_not_rewritten(store):
    """Removing others must not make damage permanent: nothing changes."""
    record = store.versions()[6]
    path = pathlib.Path(store.url, record.file)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    manifest = read_manifest(store.url)
    with pytest.raises(CorruptCheckpoint):
        store.compact([1, 5, 7])
    assert read_manifest(store.url) == manifest
    problems = rewrite.verify(rewrite.Place(store.url), manifest, [5, 6, 7, 8])
    assert len(problems) == 3  # 5 and 6 are loaded through 7
