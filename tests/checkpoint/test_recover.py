"""A lost manifest can be rebuilt without losing versions or inventing any."""

import shutil

import pytest
from states import damage, saved, tiny_state

from pcrshard.checkpoint import DeltaStore, recover
from pcrshard.errors import ConcurrentWriter, CorruptCheckpoint, UnsupportedVersion


def make(url, count=6):
    return saved(url, count, tiny_state, keyframe_every=3).versions()


def lose(folder):
    for path in folder.glob("manifest*"):
        path.unlink()


def test_every_version_comes_back(tmp_path):
    """Recovered versions keep their numbers, ids, metrics, and parents, and saving continues."""
    before = make(tmp_path)
    damage(max(tmp_path.glob("manifest-*")), 30)
    found = recover(str(tmp_path))
    assert (found.versions, found.lost) == (tuple(before), {})
    with DeltaStore(str(tmp_path)) as store:
        assert store.save(tiny_state(7), blocking=True) == 7
    assert store.verify() == []


def test_a_sound_manifest_is_not_replaced(tmp_path):
    """An intact manifest is kept, also one of a newer format version."""
    make(tmp_path, count=2)
    manifest = max(tmp_path.glob("manifest-*"))
    before = manifest.read_bytes()
    with pytest.raises(ValueError, match="nothing to recover"):
        recover(str(tmp_path))
    later = bytearray(before)
    later[12] = 3
    manifest.write_bytes(later)
    with pytest.raises(UnsupportedVersion):
        recover(str(tmp_path))
    assert manifest.read_bytes() == bytes(later)


def test_what_is_lost_is_named(tmp_path):
    """With ``allow_loss``, damage loses only its version and the versions that need it."""
    records = make(tmp_path)
    lose(tmp_path)
    with pytest.raises(CorruptCheckpoint, match="expected a manifest beside the files of 6"):
        DeltaStore(str(tmp_path)).save({})
    victim = tmp_path / records[1].file
    damage(victim, -1)
    with pytest.raises(CorruptCheckpoint, match=rf"cannot recover the versions \[.*{victim.name}"):
        recover(str(tmp_path))
    assert not list(tmp_path.glob("manifest*"))
    found = recover(str(tmp_path), allow_loss=True)
    assert [record.number for record in found.versions] == [1, 4, 5, 6]
    assert victim.name in found.lost
    with DeltaStore(str(tmp_path)) as store:
        assert store.save(tiny_state(7), blocking=True) == 7
    assert store.verify() == []


def test_of_two_files_of_a_version_one_is_used(tmp_path):
    """The file that other versions refer to is used; a file under another number is not."""
    before = make(tmp_path / "store", count=3)
    stranger = saved(tmp_path / "stranger", 1).versions()[0].file
    misnamed = stranger.replace("000001", "000002")
    for name in (stranger, misnamed):
        shutil.copy(tmp_path / "stranger" / stranger, tmp_path / "store" / name)
    lose(tmp_path / "store")
    found = recover(str(tmp_path / "store"))
    assert found.versions == tuple(before)
    assert found.lost.keys() == {stranger, misnamed}
    assert "another file of this version" in found.lost[stranger]
    assert "the number in the name" in found.lost[misnamed]


def test_an_open_writer_notices_recoveries(tmp_path):
    """A writer that was open during two recoveries in a row does not replace a later version."""
    make(tmp_path, count=1)
    first, second = (DeltaStore(str(tmp_path)) for _ in range(2))
    lose(tmp_path)
    recover(str(tmp_path))
    assert first.save(tiny_state(2), blocking=True) == 2
    lose(tmp_path)
    recover(str(tmp_path))
    assert second.save(tiny_state(3), blocking=True) == 3
    with pytest.raises(ConcurrentWriter):
        first.save(tiny_state(4), blocking=True)
    assert first.save(tiny_state(4), blocking=True) == 4
    assert [record.number for record in first.versions()] == [1, 2, 3, 4]
