"""A lost manifest can be rebuilt without losing versions or inventing any."""

import shutil

import pytest
import torch
from states import saved, tiny_state
from support import damage

from pcrshard.checkpoint import DeltaStore, pull, recover
from pcrshard.errors import ConcurrentWriter, CorruptCheckpoint, UnsupportedVersion


def make(url, count=6):
    return saved(url, count, tiny_state, keyframe_every=3).versions()


def lose(folder):
    for path in folder.glob("manifest*"):
        path.unlink()


def test_a_sound_manifest_is_not_replaced(tmp_path):
    """An intact manifest is kept, also one of a newer format version."""
    make(tmp_path, count=1)
    with pytest.raises(ValueError, match="nothing to recover"):
        recover(tmp_path)
    manifest = max(tmp_path.glob("manifest-*"))
    later = manifest.read_bytes().replace(b"\2\0\0\0", b"\3\0\0\0", 1)
    manifest.write_bytes(later)
    with pytest.raises(UnsupportedVersion):
        recover(tmp_path)
    assert manifest.read_bytes() == later


def test_what_is_lost_is_named(tmp_path):
    """With ``allow_loss``, damage loses only its version and the versions that need it."""
    records = make(tmp_path)
    lose(tmp_path)
    with pytest.raises(CorruptCheckpoint, match="expected a manifest beside the files of 6"):
        DeltaStore(tmp_path).save({})
    with pytest.raises(CorruptCheckpoint, match="expected a manifest beside the files of 6"):
        pull(saved(tmp_path / "other", 1).url, DeltaStore(tmp_path))
    victim = tmp_path / records[1].file
    damage(victim, -1)
    with pytest.raises(CorruptCheckpoint, match=rf"cannot recover the versions \[.*{victim.name}"):
        recover(tmp_path)
    assert not list(tmp_path.glob("manifest*"))
    found = recover(tmp_path, allow_loss=True)
    assert [record.number for record in found.versions] == [1, 4, 5, 6]
    assert victim.name in found.lost
    with DeltaStore(tmp_path) as store:
        assert store.save(tiny_state(7), blocking=True) == 7
    assert store.verify() == []


def test_a_version_that_needs_no_other_is_not_lost_with_another(tmp_path):
    """Where nothing is the same as in the version before, both can be recovered alone."""
    with DeltaStore(tmp_path) as store:
        for _ in range(2):
            store.save({"w": torch.randn(30, 20)}, blocking=True)
    first, second = store.versions()
    lose(tmp_path)
    (tmp_path / first.file).unlink()
    assert recover(tmp_path, allow_loss=True).versions == (second,)
    assert store.verify() == []


def test_of_two_files_of_a_version_one_is_used(tmp_path):
    """The file that others refer to is used, then the newest; a misnamed one is not."""
    stranger = saved(tmp_path / "stranger", 1)
    with DeltaStore(tmp_path / "store") as store:
        for number in (1, 2):
            store.save(tiny_state(number), blocking=True)
        shutil.copytree(tmp_path / "store", tmp_path / "killed")
        with DeltaStore(tmp_path / "killed") as killed:
            killed.save(tiny_state(9))
        store.save(tiny_state(3))
    before = store.versions()
    names = [f"{number:06d}-{0:016x}.pcd" for number in (1, 2, 3)]
    for name, source in zip(names, (stranger, stranger, killed), strict=True):
        shutil.copy(f"{source.url}/{source.versions()[-1].file}", tmp_path / "store" / name)
    damage(max((tmp_path / "store").glob("manifest-*")), 30)
    found = recover(tmp_path / "store")
    assert found.versions == tuple(before)
    assert sorted(found.lost) == names
    assert "another file of this version is used" in found.lost[names[0]]


@pytest.mark.parametrize("recovered", [False, True])
def test_a_writer_that_slept_through_many_versions_loses_nothing(tmp_path, recovered):
    """A suspended writer detects others, also if its manifest's number is free again."""
    with DeltaStore(tmp_path) as sleeper:
        sleeper.save(tiny_state(1), blocking=True)
        for number in range(2, 8):
            with DeltaStore(tmp_path) as other:
                other.save(tiny_state(number))
            if recovered:
                lose(tmp_path)
                recover(tmp_path)
        with pytest.raises(ConcurrentWriter):
            sleeper.save(tiny_state(99), blocking=True)
        assert [store.load()["epoch"] for store in (sleeper, other)] == [7, 7]
        assert sleeper.save(tiny_state(8), blocking=True) == 8
    assert other.verify() == []
