"""Damage, death and full disks: all is detected, nothing wrong is loaded, old versions stay."""

import os
import resource
import shutil
import signal

import pytest
from states import same, tiny_state

from pcrshard.checkpoint import DeltaStore
from pcrshard.errors import BrokenChain, CorruptCheckpoint, PCRError, StorageError

COUNT = 4


def make(url, count=COUNT, **options):
    with DeltaStore(str(url), **options) as store:
        for number in range(1, count + 1):
            store.save(tiny_state(number))
    return DeltaStore(str(url))


def used(folder):
    """The files that a reader of a local store reads: versions, and the newest manifest."""
    return [*sorted(folder.glob("*.pcd")), max(folder.glob("manifest-*.pcm"))]


def load_all(url):
    """Each version's state, or the error that came instead."""
    found = {}
    for number in range(1, COUNT + 1):
        try:
            found[number] = DeltaStore(str(url)).load(number)
        except PCRError as error:
            found[number] = error
    return found


def flip_and_load(url, path, places, expected):
    """Flip one bit at each place: verify must find it, and no load may give another state."""
    data = path.read_bytes()
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        try:
            problems = DeltaStore(str(url)).verify()
        except PCRError as error:
            problems = [error]
        assert problems, f"{path.name}: byte {place} of {len(data)} is not found"
        if place % 16 == 0:
            for number, state in load_all(url).items():
                assert isinstance(state, PCRError) or same(state, expected[number])
    path.write_bytes(data)


def test_a_flipped_byte_is_found(tmp_path):
    """Every 23rd byte of every file of a small store; the long test flips all of them."""
    store = make(tmp_path)
    expected = {number: store.load(number) for number in range(1, COUNT + 1)}
    for path in used(tmp_path):
        flip_and_load(tmp_path, path, range(0, path.stat().st_size, 23), expected)
    assert store.verify() == []


@pytest.mark.long
def test_every_flipped_byte_is_found(tmp_path):
    """Each byte of each file in turn."""
    store = make(tmp_path)
    expected = {number: store.load(number) for number in range(1, COUNT + 1)}
    for path in used(tmp_path):
        flip_and_load(tmp_path, path, range(path.stat().st_size), expected)
    assert store.verify() == []


def test_cut_files_are_found(tmp_path):
    """At any length, manifest included."""
    store = make(tmp_path)
    expected = {number: store.load(number) for number in range(1, COUNT + 1)}
    for path in used(tmp_path):
        data = path.read_bytes()
        for stop in range(0, len(data), 97):
            path.write_bytes(data[:stop])
            for number, state in load_all(tmp_path).items():
                assert isinstance(state, PCRError) or same(state, expected[number])
            if path.suffix == ".pcd":
                assert DeltaStore(str(tmp_path)).verify()
        path.write_bytes(data)


def test_a_pruned_chain_is_refused(tmp_path):
    """A file that somebody removed: the versions that need it fail, the others load."""
    store = make(tmp_path, keyframe_every=3)
    records = store.versions()
    (tmp_path / records[1].file).unlink()
    for number, state in load_all(tmp_path).items():
        assert isinstance(state, StorageError) == (number in (2, 3)), number


def test_files_of_another_run_are_refused(tmp_path):
    """Swapped, reordered, or from another store: never partly replayed."""
    store = make(tmp_path / "a")
    first, second = (tmp_path / "a" / record.file for record in store.versions()[:2])
    expected = load_all(tmp_path / "a")
    for other in (second, make(tmp_path / "b")):
        source = other if other is second else tmp_path / "b" / other.versions()[0].file
        kept = first.read_bytes()
        shutil.copy(source, first)
        found = load_all(tmp_path / "a")
        kinds = (CorruptCheckpoint, BrokenChain, StorageError)
        # A version without deltas does not need the first one; equal content is the same version.
        assert all(isinstance(s, kinds) or same(s, expected[n]) for n, s in found.items())
        first.write_bytes(kept)
    assert store.verify() == []


def test_a_full_disk_leaves_what_was_there(tmp_path):
    """The error names the disk; earlier versions load; the next save works."""
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
