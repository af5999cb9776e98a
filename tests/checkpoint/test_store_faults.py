"""Damage, death and full disks: all is detected, nothing wrong is loaded, old versions stay."""

import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
from states import same, tiny_state

from pcrshard.checkpoint import DeltaStore
from pcrshard.errors import BrokenChain, CorruptCheckpoint, PCRError, StorageError

HERE = pathlib.Path(__file__).parent
COUNT = 4


def make(url, count=COUNT, **options):
    with DeltaStore(str(url), **options) as store:
        for number in range(1, count + 1):
            store.save(tiny_state(number))
    return DeltaStore(str(url))


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


@pytest.mark.parametrize("order", ["backward", "forward", "hop"])
def test_a_flipped_byte_is_found(tmp_path, order):
    """Every 23rd byte of every file of a small store; the long test flips all of them."""
    store = make(tmp_path, order=order)
    expected = {number: store.load(number) for number in range(1, COUNT + 1)}
    for path in sorted(tmp_path.iterdir()):
        flip_and_load(tmp_path, path, range(0, path.stat().st_size, 23), expected)
    assert store.verify() == []


@pytest.mark.long
@pytest.mark.parametrize("order", ["backward", "forward", "hop"])
def test_every_flipped_byte_is_found(tmp_path, order):
    """Each byte of each file in turn."""
    store = make(tmp_path, order=order)
    expected = {number: store.load(number) for number in range(1, COUNT + 1)}
    for path in sorted(tmp_path.iterdir()):
        flip_and_load(tmp_path, path, range(path.stat().st_size), expected)
    assert store.verify() == []


def test_cut_files_are_found(tmp_path):
    """At any length, manifest included."""
    store = make(tmp_path)
    expected = {number: store.load(number) for number in range(1, COUNT + 1)}
    for path in sorted(tmp_path.iterdir()):
        data = path.read_bytes()
        for stop in range(0, len(data), 97):
            path.write_bytes(data[:stop])
            for number, state in load_all(tmp_path).items():
                assert isinstance(state, PCRError) or same(state, expected[number])
            if path.name != "manifest.pcm":
                assert DeltaStore(str(tmp_path)).verify()
        path.write_bytes(data)


def test_a_pruned_chain_is_refused(tmp_path):
    """A file that somebody removed: the versions that need it fail, the others load."""
    store = make(tmp_path, order="forward", keyframe_every=3)
    records = store.versions()
    (tmp_path / records[1].file).unlink()
    for number, state in load_all(tmp_path).items():
        assert isinstance(state, StorageError) == (number in (2, 3)), number


def test_files_of_another_run_are_refused(tmp_path):
    """Swapped, reordered, or from another store: never partly replayed."""
    store = make(tmp_path / "a", order="forward")
    first, second = (tmp_path / "a" / record.file for record in store.versions()[:2])
    for other in (second, make(tmp_path / "b")):
        source = other if other is second else tmp_path / "b" / other.versions()[0].file
        kept = first.read_bytes()
        shutil.copy(source, first)
        found = load_all(tmp_path / "a")
        kinds = (CorruptCheckpoint, BrokenChain, StorageError)
        assert all(isinstance(state, kinds) for state in found.values()), found
        first.write_bytes(kept)
    assert store.verify() == []


def test_a_full_disk_leaves_what_was_there(tmp_path):
    """The error names the disk; earlier versions load; the next save works."""
    store = make(tmp_path)
    expected = load_all(tmp_path)
    names = set(os.listdir(tmp_path))
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
    assert len(os.listdir(tmp_path)) == len(names) + 1  # what failed is gone
    store.close()


def kill_at_random(tmp_path, times):
    """Run kill_writer.py, which forks writers and kills them; its report."""
    command = [sys.executable, str(HERE / "kill_writer.py"), str(tmp_path), str(times)]
    environment = os.environ | {"PYTHONPATH": f"{HERE.parent.parent}:{HERE}"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def test_killed_writers_leave_sound_stores(tmp_path):
    """kill -9 at random moments of writing, in all orders; the long test does it 100 times."""
    start = time.monotonic()
    report = kill_at_random(tmp_path, 6)
    assert "6 kills" in report, report
    print(report, time.monotonic() - start)


@pytest.mark.long
def test_a_hundred_killed_writers_leave_sound_stores(tmp_path):
    """The same, 100 times."""
    assert "100 kills" in kill_at_random(tmp_path, 100)
