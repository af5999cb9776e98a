"""What a stream keeps, and for how long."""

import os
import time
import tracemalloc

import pytest
import torch
from support import run_python

from pcrshard import memory, storage
from pcrshard.weightsync import WeightMirror, WeightPublisher


def weights(step, size=4096):
    """Weights of which one word changes with each step."""
    found = torch.zeros(size, dtype=torch.bfloat16)
    found[step % size] = 1
    return {"w": found}


def numbers(folder, kind="step"):
    return sorted(int(path.name[len(kind) + 1 :][:9]) for path in folder.glob(f"{kind}-*"))


@pytest.mark.parametrize("layout", ["pcrshard", "disk-delta"])
def test_each_of_many_folders_gets_changes_only(tmp_path, layout):
    """A trainer that publishes to five folders in turn sends to each what changed."""
    publishers = [WeightPublisher(tmp_path / str(n), layout=layout) for n in range(5)]
    for step in range(4):
        for publisher in publishers:
            publisher.publish(weights(step))
    for folder in tmp_path.iterdir():
        newest = max(each for each in folder.iterdir() if each.name != "latest")
        files = [newest] if newest.is_file() else newest.iterdir()
        assert sum(each.stat().st_size for each in files) < 1200


@pytest.mark.parametrize("layout", ["pcrshard", "disk-delta"])
def test_a_publisher_that_is_restarted_removes_what_is_old(tmp_path, layout):
    """Thirty short runs leave one checkpoint; a mirror follows across each restart."""
    mirror = WeightMirror(tmp_path / "stream", tmp_path / "mirror")
    for run in range(30):
        publisher = WeightPublisher(tmp_path / "stream", keyframe_every=4, keep=4, layout=layout)
        for step in (2 * run, 2 * run + 1):
            assert publisher.publish(weights(step)) == step + 1
            if run % 3 == 0:
                assert mirror.update() == step + 1
                assert torch.equal(mirror.tensors()["w"], weights(step)["w"])
    assert len(os.listdir(tmp_path / "stream")) <= 9
    assert mirror.update() == 60
    late = WeightMirror(tmp_path / "stream", tmp_path / "late")
    assert late.update() == 60


def test_changing_shapes_remove_what_is_old(tmp_path):
    """Weights of a new shape at each step leave one checkpoint, which mirrors load."""
    publisher = WeightPublisher(tmp_path / "stream", keyframe_every=4, keep=4)
    mirror = WeightMirror(tmp_path / "stream", tmp_path / "mirror")
    for step in range(1, 31):
        assert publisher.publish({"w": torch.ones(step)}) == mirror.update() == step
        assert mirror.tensors()["w"].shape == (step,)
    assert len(os.listdir(tmp_path / "stream")) == 2


@pytest.mark.parametrize(("keep", "every"), [(1, 1), (1, 5), (7, 3), (20, 4)])
def test_a_mirror_that_is_behind_catches_up(tmp_path, keep, every):
    """A mirror that is ``keep`` steps behind reads patches; a new one starts from a keyframe."""
    publisher = WeightPublisher(tmp_path / "stream", keep=keep, keyframe_every=every)
    mirror = WeightMirror(tmp_path / "stream", tmp_path / "mirror")
    for step in range(1, 43):
        publisher.publish(weights(step))
        if step == 42 - keep:
            mirror.update()
    kept = numbers(tmp_path / "stream")
    assert kept[-1] == 42
    assert len(kept) <= keep + 2 * every
    for path in (tmp_path / "stream").glob("keyframe-*"):
        path.unlink()
    assert mirror.update() == 42  # without a keyframe
    assert torch.equal(mirror.tensors()["w"], weights(42)["w"])


def test_what_is_young_is_kept(tmp_path):
    """Within ``keep_seconds``, a mirror on a slow link finds the files that it began to read."""
    options = {"keep": 1, "keyframe_every": 2, "keep_seconds": 100}
    publisher = WeightPublisher(tmp_path / "stream", **options)
    for step in range(6):
        publisher.publish(weights(step))
    assert numbers(tmp_path / "stream") == [1, 2, 3, 4, 5, 6]
    past = time.time() - 1000
    for number in (1, 2, 3):
        os.utime(tmp_path / "stream" / f"step-{number:09d}.pcw", (past, past))
    WeightPublisher(tmp_path / "stream", **options).publish(weights(7))
    # The keyframe of step 2 is young, and everything after it.
    assert numbers(tmp_path / "stream") == [2, 3, 4, 5, 6, 7]


def test_a_publisher_continues_after_a_failure(tmp_path, monkeypatch):
    """If the disk was full, the next step holds all weights, and mirrors follow."""
    publisher = WeightPublisher(tmp_path / "stream")
    mirror = WeightMirror(tmp_path / "stream", tmp_path / "mirror")
    publisher.publish(weights(1))
    mirror.update()

    def fail(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "atomic_write", fail)
    with pytest.raises(OSError, match="No space"):
        publisher.publish(weights(2))
    monkeypatch.undo()
    assert mirror.update() == 1
    assert publisher.publish(weights(3)) == mirror.update() == 2
    assert torch.equal(mirror.tensors()["w"], weights(3)["w"])


def test_a_step_that_is_removed_while_it_is_read_is_no_error(tmp_path, monkeypatch):
    """A mirror that finds its files removed by a restarted trainer reads the new ones."""
    publisher = WeightPublisher(tmp_path / "stream")
    for step in range(3):
        publisher.publish(weights(step))
    mirror = WeightMirror(tmp_path / "stream", tmp_path / "mirror")
    latest, known = mirror._latest, []

    def older():
        known.append(latest())
        if len(known) == 1:  # the trainer restarts right after the mirror has looked
            WeightPublisher(tmp_path / "stream").publish(weights(9))
        return known[-1]

    monkeypatch.setattr(mirror, "_latest", older)
    assert mirror.update() == 4
    assert torch.equal(mirror.tensors()["w"], weights(9)["w"])


def test_what_is_dropped_takes_no_memory(tmp_path):
    """Publishers and mirrors keep no buffers beyond their own weights."""
    before = memory.pool.num_idle
    publisher = WeightPublisher(tmp_path / "stream")
    mirror = WeightMirror(tmp_path / "stream", tmp_path / "mirror")
    for step in range(3):
        publisher.publish(weights(step, 1 << 20))
        mirror.update()
    assert memory.pool.num_idle == before


@pytest.mark.parametrize("layout", ["pcrshard", "disk-delta"])
def test_a_keyframe_is_written_from_the_publishers_copy(tmp_path, layout):
    """Writing all weights takes no memory beyond the copy that the publisher keeps."""
    found = {"w": torch.randn(4, 1 << 20)}
    publisher = WeightPublisher(tmp_path, keyframe_every=1, layout=layout)
    publisher.publish(found)
    tracemalloc.start()
    try:
        publisher.publish(found)
        assert tracemalloc.get_traced_memory()[1] < found["w"].nbytes / 2
    finally:
        tracemalloc.stop()


MEMORY = """
import re, sys
import torch
from pcrshard.weightsync import WeightPublisher

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

WeightPublisher("memory://first").publish({"w": torch.randn(9, 9).t()})
weights = {str(n): torch.randn(900, 1000).t() for n in range(30)}
before = resident()
WeightPublisher(sys.argv[1]).publish(weights)
with open("/proc/self/status") as file:
    peak = int(re.search("VmHWM:\\s+([0-9]+)", file.read())[1]) * 1024
print((peak - before) / sum(each.nbytes for each in weights.values()))
"""


def test_weights_are_copied_one_after_the_other(tmp_path):
    """Tensors on a GPU, or not contiguous, take no memory beyond the copy that is kept."""
    assert float(run_python("-c", MEMORY, tmp_path)) < 1.5
