"""Damaged files, kills, and full disks are detected; earlier versions stay intact."""

import os
import resource
import shutil
import signal

import pytest
from states import same, tiny_state

from pcrshard.checkpoint import DeltaStore
from pcrshard.errors import PCRError, StorageError

COUNT = 4


def make(url, count=COUNT, **options):
    with DeltaStore(str(url), **options) as store:
        for number in range(1, count + 1):
            store.save(tiny_state(number))
    return DeltaStore(str(url))


def load_all(url):
    """Return each version's state, or the error that it raised."""
    found = {}
    for number in range(1, COUNT + 1):
        try:
            found[number] = DeltaStore(str(url)).load(number)
        except PCRError as error:
            found[number] = error
    return found


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]


@pytest.mark.parametrize(
    ("damage", "every"),
    [
        pytest.param(flipped, 61, id="flipped"),
        pytest.param(lambda data, stop: data[:stop], 211, id="truncated"),
        pytest.param(lambda data, _: data + b"x", 1 << 30, id="extended"),
        pytest.param(flipped, 1, id="each-byte-flipped", marks=pytest.mark.long),
    ],
)
def test_damage_is_found(tmp_path, damage, every):
    """``verify`` finds damage in any file of a store, and no load returns a wrong state."""
    store = make(tmp_path)
    expected = load_all(tmp_path)
    for path in [*sorted(tmp_path.glob("*.pcd")), max(tmp_path.glob("manifest-*.pcm"))]:
        data = path.read_bytes()
        for place in range(0, len(data), every):
            path.write_bytes(damage(data, place))
            try:
                problems = DeltaStore(str(tmp_path)).verify()
            except PCRError as error:
                problems = [error]
            assert problems, f"{path.name}: {place} of {len(data)} is not found"
            if place % 16 == 0:
                for number, state in load_all(tmp_path).items():
                    assert isinstance(state, PCRError) or same(state, expected[number])
        path.write_bytes(data)
    assert store.verify() == []


def test_a_pruned_chain_is_refused(tmp_path):
    """If a file is removed, only the versions that need it fail to load."""
    store = make(tmp_path, keyframe_every=3)
    records = store.versions()
    (tmp_path / records[1].file).unlink()
    for number, state in load_all(tmp_path).items():
        assert isinstance(state, StorageError) == (number in (2, 3)), number


def test_files_of_another_run_are_refused(tmp_path):
    """A delta is never applied to a file that was swapped or copied from another store."""
    store = make(tmp_path / "a")
    other = make(tmp_path / "b")
    first, second = (tmp_path / "a" / record.file for record in store.versions()[:2])
    expected = load_all(tmp_path / "a")
    kept = first.read_bytes()
    for source in (second, tmp_path / "b" / other.versions()[0].file):
        shutil.copy(source, first)
        for number, state in load_all(tmp_path / "a").items():
            # Equal content is the same version.
            assert isinstance(state, PCRError) or same(state, expected[number])
    first.write_bytes(kept)
    assert store.verify() == []


def test_a_full_disk_leaves_what_was_there(tmp_path):
    """On a full disk, a save fails clearly, earlier versions load, and the next save works."""
    store = make(tmp_path)
    expected = load_all(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        # Below the size of a version, then below that of the manifest.
        for limit in (0, 100, 700):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            with pytest.raises(StorageError, match="cannot write"):
                store.save(tiny_state(5), blocking=True)
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            assert all(map(same, load_all(tmp_path).values(), expected.values()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert store.save(tiny_state(5), blocking=True) == 5
    assert store.verify() == []
    left = [name for name in os.listdir(tmp_path) if "manifest" not in name]
    assert len(left) == 5, "what failed is gone"
    store.close()
