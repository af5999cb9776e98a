"""One writer at a time; what a killed one left is removed; files come before the manifest."""

import dataclasses
import os

import pytest
from states import tiny_state

from pcrshard.checkpoint import DeltaStore
from pcrshard.checkpoint.held_version import Bounds
from pcrshard.checkpoint.manifest import Manifest, VersionRecord, read_manifest
from pcrshard.checkpoint.typed_tree import flatten
from pcrshard.checkpoint.writer import (
    Place,
    Writer,
    clean,
    group_size,
    replace_manifest,
    writing,
)
from pcrshard.errors import ConcurrentWriter

EMPTY = Manifest("forward", 3, {})


def writer(tmp_path, empty=EMPTY):
    return Writer(Place(str(tmp_path)), Bounds(), empty)


def chain(order, parents):
    records = [
        VersionRecord(number, bytes(32), "", 0, 0, parent, 0, {}, 0.0)
        for number, parent in parents.items()
    ]
    return Manifest(order, 3, {}, versions=tuple(records))


@pytest.mark.parametrize(
    ("order", "parents", "size"),
    [
        ("forward", {}, 0),
        ("forward", {1: None}, 1),
        ("forward", {1: None, 2: 1, 3: 2}, 3),
        ("forward", {1: None, 2: None, 5: 2}, 2),
        ("hop", {1: None, 2: 1, 3: 1}, 3),
        ("backward", {}, 0),
        ("backward", {1: None}, 1),
        ("backward", {1: 2, 2: 3, 3: None}, 3),
        ("backward", {1: 2, 2: None, 3: None}, 1),
    ],
)
def test_the_last_group_is_counted(order, parents, size):
    """From the manifest alone, so that a job that resumes goes on in the same rhythm."""
    assert group_size(chain(order, parents)) == size


@pytest.mark.parametrize("order", ["forward", "backward", "hop"])
def test_keyframes_come_in_time_also_after_a_restart(tmp_path, order):
    """Three versions hang on one keyframe, whoever writes them."""
    empty = dataclasses.replace(EMPTY, order=order)
    for number in range(1, 8):
        fresh = writer(tmp_path, empty)
        fresh.append(flatten(tiny_state(number)), number, {})
    parents = [record.parent for record in read_manifest(str(tmp_path)).versions]
    assert (
        parents
        == {
            "forward": [None, 1, 2, None, 4, 5, None],
            "hop": [None, 1, 1, None, 4, 4, None],
            "backward": [2, 3, None, 5, 6, None, None],
        }[order]
    )


def test_a_second_writer_is_refused(tmp_path):
    """The one who did not see the other's version fails, and writes nothing."""
    first = writer(tmp_path)
    second = writer(tmp_path)
    first.append(flatten(tiny_state(1)), 1, {})
    second.append(flatten(tiny_state(2)), 2, {})
    files = sorted(os.listdir(tmp_path))
    with pytest.raises(ConcurrentWriter, match="expected generation 2 of the manifest, got 3"):
        first.append(flatten(tiny_state(3)), 3, {})
    assert sorted(os.listdir(tmp_path)) == files
    first.append(flatten(tiny_state(3)), 3, {})  # it has forgotten what it knew


def test_a_version_is_not_replaced_by_another_one(tmp_path):
    """A store that was opened before somebody else wrote has promised a number that is taken."""
    first = DeltaStore(str(tmp_path))
    second = DeltaStore(str(tmp_path))
    first.save(tiny_state(1), blocking=True)
    with pytest.raises(ConcurrentWriter, match="expected to write version 2, got 1"):
        second.save(tiny_state(5), blocking=True)
    assert DeltaStore(str(tmp_path)).load(1)["epoch"] == 1
    assert second.save(tiny_state(2), blocking=True) == 2
    first.close()
    second.close()


def test_two_at_the_same_moment_are_refused(tmp_path):
    """A lock on the folder."""
    place = Place(str(tmp_path))
    with writing(place):
        with pytest.raises(ConcurrentWriter, match="another process is writing"):
            with writing(place):
                pass
    with writing(place):
        pass


def test_a_generation_that_moved_is_found(tmp_path):
    """Also where there are no locks."""
    for url in (str(tmp_path), "memory://test-generation"):
        place = Place(url)
        manifest = dataclasses.replace(EMPTY, generation=1)
        replace_manifest(place, None, manifest)
        with pytest.raises(ConcurrentWriter, match="expected generation None"):
            replace_manifest(place, None, manifest)
        replace_manifest(place, 1, dataclasses.replace(EMPTY, generation=2))


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    """Temporary files and version files that no manifest names; not what the user put there."""
    writer(tmp_path).append(flatten(tiny_state(1)), 1, {})
    kept = {*os.listdir(tmp_path), "notes.txt", "model.pcd"}
    for name in ("notes.txt", "model.pcd", ".pcrshard-0123.tmp", "000002-01234567.pcd"):
        (tmp_path / name).write_bytes(b"x")
    clean(Place(str(tmp_path)), read_manifest(str(tmp_path)))
    assert set(os.listdir(tmp_path)) == kept
