"""A lost manifest costs nothing, and nothing is ever made up for it silently."""

import os
import shutil

import pytest
from states import same, tiny_state

from pcrshard.checkpoint import DeltaStore
from pcrshard.checkpoint.writer import Place
from pcrshard.errors import (
    ConcurrentWriter,
    CorruptCheckpoint,
    UnsupportedVersion,
    VersionUnavailable,
)

ORDERS = ("backward", "forward", "hop")


def make(url, order="backward", count=7):
    with DeltaStore(str(url), order=order, keyframe_every=3) as store:
        for number in range(1, count + 1):
            store.save(tiny_state(number), metrics={"acc": number / 10})
    return store.versions()


def damage(path, place=30):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("how", ["removed", "damaged", "cut"])
def test_every_version_comes_back(tmp_path, order, how):
    """With its number, id, metrics and reference; the store can be written to again."""
    before = make(tmp_path, order)
    manifest = tmp_path / "manifest.pcm"
    if how == "removed":
        manifest.unlink()
    elif how == "damaged":
        damage(manifest)
    else:
        manifest.write_bytes(manifest.read_bytes()[:-7])
    found = DeltaStore.recover(str(tmp_path))
    assert found.versions == tuple(before)
    assert found.lost == {}
    assert (tmp_path / "manifest.damaged").exists() == (how != "removed")
    store = DeltaStore(str(tmp_path), order=order)
    assert store.save(tiny_state(8), blocking=True) == 8
    assert store.verify() == []
    for number in range(1, 9):
        assert same(store.load(number)["model"]["b"], tiny_state(number)["model"]["b"])
    store.close()


def test_without_a_manifest_nothing_is_written_or_removed(tmp_path):
    """A job that is started again must not take a store for an empty one."""
    make(tmp_path)
    (tmp_path / "manifest.pcm").unlink()
    files = set(os.listdir(tmp_path))
    store = DeltaStore(str(tmp_path))
    with pytest.raises(CorruptCheckpoint, match="files of 7 versions, there is none: see Delta"):
        store.save(tiny_state(1), blocking=True)
    assert set(os.listdir(tmp_path)) == files
    with pytest.raises(VersionUnavailable):
        store.load()
    damage_it = tmp_path / "manifest.pcm"
    damage_it.write_bytes(b"x" * 100)
    with pytest.raises(CorruptCheckpoint, match=r"see DeltaStore\.recover"):
        DeltaStore(str(tmp_path))


def test_a_sound_manifest_is_not_replaced(tmp_path):
    """Nor is one of a later version of the format."""
    make(tmp_path, count=2)
    manifest = tmp_path / "manifest.pcm"
    before = manifest.read_bytes()
    with pytest.raises(ValueError, match="nothing to recover"):
        DeltaStore.recover(str(tmp_path))
    later = bytearray(before)
    later[12] = 2
    manifest.write_bytes(later)
    with pytest.raises(UnsupportedVersion):
        DeltaStore.recover(str(tmp_path))
    assert manifest.read_bytes() == bytes(later)


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_lost_is_named(tmp_path, order):
    """A damaged payload takes its version, and those that need it, along; only on request."""
    records = make(tmp_path, order, count=6)
    (tmp_path / "manifest.pcm").unlink()
    victim = tmp_path / records[1].file
    damage(victim, -1)
    with pytest.raises(CorruptCheckpoint, match=rf"cannot recover the versions \[.*{victim.name}"):
        DeltaStore.recover(str(tmp_path))
    assert not (tmp_path / "manifest.pcm").exists()
    found = DeltaStore.recover(str(tmp_path), allow_loss=True)
    kept = {"backward": [3, 4, 5, 6], "forward": [1, 4, 5, 6], "hop": [1, 3, 4, 5, 6]}[order]
    assert [record.number for record in found.versions] == kept
    assert victim.name in found.lost
    store = DeltaStore(str(tmp_path))
    assert store.verify() == []
    assert store.save(tiny_state(7), blocking=True) == 7
    assert store.verify() == []
    store.close()


def test_two_files_of_one_version(tmp_path):
    """A writer that was killed while it rewrote: either file will do, the other is named."""
    make(tmp_path / "store", "backward", count=3)
    shutil.copytree(tmp_path / "store", tmp_path / "other")
    with DeltaStore(str(tmp_path / "other")) as other:
        other.rebase(order="forward")
        copies = {record.file for record in other.versions()} - set(os.listdir(tmp_path / "store"))
    assert copies
    for name in copies:
        shutil.copy(tmp_path / "other" / name, tmp_path / "store")
    before = DeltaStore(str(tmp_path / "store")).versions()
    (tmp_path / "store" / "manifest.pcm").unlink()
    found = DeltaStore.recover(str(tmp_path / "store"))
    assert [record.id for record in found.versions] == [record.id for record in before]
    assert len(found.lost) == len(copies)
    assert DeltaStore(str(tmp_path / "store")).verify() == []


def test_a_version_of_another_run_does_not_get_in(tmp_path):
    """Two contents of one number: the one that others refer to is kept."""
    before = make(tmp_path / "a", "forward", count=3)
    with DeltaStore(str(tmp_path / "b"), order="forward") as other:
        other.save({"w": 1})
    stranger = other.versions()[0].file
    shutil.copy(tmp_path / "b" / stranger, tmp_path / "a")
    (tmp_path / "a" / "manifest.pcm").unlink()
    found = DeltaStore.recover(str(tmp_path / "a"))
    assert found.versions == tuple(before)
    assert "another file of this version" in found.lost[stranger]


def test_a_file_under_another_number_is_not_believed(tmp_path):
    """Its name must say what is in it."""
    records = make(tmp_path, "forward", count=2)
    (tmp_path / "manifest.pcm").unlink()
    os.rename(tmp_path / records[1].file, tmp_path / records[1].file.replace("000002", "000009"))
    with pytest.raises(CorruptCheckpoint, match=r"versions \[9\].*the number in the name"):
        DeltaStore.recover(str(tmp_path))


def test_a_writer_at_work_finds_out(tmp_path):
    """It knows a manifest that is not there any more."""
    make(tmp_path, count=2)
    writer = DeltaStore(str(tmp_path))
    writer.save(tiny_state(3), blocking=True)
    (tmp_path / "manifest.pcm").unlink()
    DeltaStore.recover(str(tmp_path))
    with pytest.raises(ConcurrentWriter):
        writer.save(tiny_state(4), blocking=True)
    assert len(writer.versions()) == 3


def test_an_empty_folder_is_not_made_a_store(tmp_path):
    """There is nothing to recover."""
    with pytest.raises(VersionUnavailable, match="got 0"):
        DeltaStore.recover(str(tmp_path))
    assert not (tmp_path / "manifest.pcm").exists()
    assert Place(str(tmp_path)).url == str(tmp_path)
