"""Other processes read one step of a mirror, or fail."""

import os
import pathlib
import time

import numpy as np
import pytest
import torch
from children import start
from safetensors.torch import load_file
from support import damage

from pcrshard.errors import CorruptCheckpoint, VersionUnavailable
from pcrshard.weightsync import WeightMirror, WeightPublisher, read_consistent

SIZE = 300_000


def weights(step):
    """Four tensors whose every word says the step."""
    return {f"w{n}": torch.full((SIZE,), step, dtype=torch.int32) for n in range(4)}


def steps_of(found):
    return {int(each) for tensor in found.values() for each in tensor.unique()}


def read_outside(connection, folder, replace, count):
    """Load the weights again and again while they change; send the steps of each load."""
    torch.set_num_threads(1)
    seen = []
    while len(seen) < count:
        found = load_file(f"{folder}/model.safetensors") if replace else read_consistent(folder)
        seen.append(steps_of(found))
    connection.send(seen)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.long)])
def test_outside_loads_are_of_one_step(tmp_path, replace, count):
    """While a mirror updates without a pause, every load of another process has one step."""
    publisher = WeightPublisher(tmp_path / "stream")
    mirror = WeightMirror(tmp_path / "stream", tmp_path / "mirror", replace=replace)
    publisher.publish(weights(0))
    mirror.update()
    reader, pipe = start(read_outside, str(tmp_path / "mirror"), replace, count)
    step = 0
    while not pipe.poll():
        step += 1
        publisher.publish(weights(step))
        mirror.update()
        time.sleep(0.002)
    seen = pipe.recv()
    reader.join()
    assert [each for each in seen if len(each) != 1] == []
    assert len(set(map(tuple, seen))) > min(step, count) / 20  # they were read while they changed
    assert steps_of(read_consistent(tmp_path / "mirror")) == {step}


def test_a_file_that_changes_is_none_that_engines_load(tmp_path):
    """In place, there is no ``*.safetensors``; a replaced one is never changed afterwards."""
    publisher = WeightPublisher(tmp_path / "stream")
    place = WeightMirror(tmp_path / "stream", tmp_path / "place")
    other = WeightMirror(tmp_path / "stream", tmp_path / "other", replace=True)
    publisher.publish(weights(1))
    for mirror in (place, other):
        mirror.update()
    assert list((tmp_path / "place").glob("*.safetensors")) == []
    held, early = place.tensors(), other.tensors()
    loaded = load_file(other.path)  # maps the file
    publisher.publish(weights(2))
    for mirror in (place, other):
        mirror.update()
    assert steps_of(held) == {2}
    assert steps_of(early) == steps_of(loaded) == {1}
    assert steps_of(other.tensors()) == steps_of(load_file(other.path)) == {2}
    assert steps_of(read_consistent(tmp_path / "other")) == {2}


def test_a_damaged_step_leaves_a_replaced_file_as_it_was(tmp_path):
    """An update that fails does not touch a file that is replaced."""
    publisher = WeightPublisher(tmp_path / "stream")
    mirror = WeightMirror(tmp_path / "stream", tmp_path / "mirror", replace=True)
    publisher.publish(weights(1))
    mirror.update()
    publisher.publish(weights(2))
    damage(tmp_path / "stream" / "step-000000002.pcw")
    with pytest.raises(CorruptCheckpoint):
        mirror.update()
    assert mirror.step == 1
    assert steps_of(load_file(mirror.path)) == steps_of(mirror.tensors()) == {1}
    assert sorted(os.listdir(tmp_path / "mirror")) == [
        ".mirror.count", ".model.safetensors.pcw", "model.safetensors",
    ]  # fmt: skip


def test_an_interrupted_update_is_not_read(tmp_path, monkeypatch):
    """After a kill in the middle of an update, readers wait, until the folder is opened again."""
    publisher = WeightPublisher(tmp_path / "stream")
    mirror = WeightMirror(tmp_path / "stream", tmp_path / "mirror")
    with pytest.raises(VersionUnavailable, match="no mirrored weights"):
        read_consistent(tmp_path / "mirror")
    publisher.publish(weights(1))
    mirror.update()
    publisher.publish(weights(2))

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pcrshard.weightsync.mirror.parallel_map", stop)
    with pytest.raises(KeyboardInterrupt):
        mirror.update()
    monkeypatch.undo()
    with pytest.raises(TimeoutError, match="is a mirror of"):
        read_consistent(tmp_path / "mirror", timeout=0.1)
    again = WeightMirror(tmp_path / "stream", tmp_path / "mirror")
    assert again.update() == 2
    assert steps_of(read_consistent(tmp_path / "mirror")) == {2}


def test_a_file_that_was_damaged_is_not_read(tmp_path):
    """A word that changed on the disk is found by the checksums of the blocks."""
    WeightPublisher(tmp_path / "stream").publish(weights(1))
    mirror = WeightMirror(tmp_path / "stream", tmp_path / "mirror")
    mirror.update()
    damage(pathlib.Path(mirror.path), -5)
    with pytest.raises(TimeoutError):
        read_consistent(tmp_path / "mirror", timeout=0.1)


def test_a_folder_has_the_file_of_one_kind(tmp_path):
    """A mirror of the other kind removes the file that nobody would keep current, and no other."""
    publisher = WeightPublisher(tmp_path / "stream")
    publisher.publish(weights(1))
    folder = tmp_path / "mirror"
    for replace in (False, True, False):
        assert WeightMirror(tmp_path / "stream", folder, replace=replace).update() == 1
        names = {path.name for path in folder.iterdir() if path.name[0] != "."}
        assert names == {"model.safetensors" + ("" if replace else ".live")}
    (folder / "model.safetensors").write_bytes(b"the user's own")
    WeightMirror(tmp_path / "stream", folder).update()
    assert (folder / "model.safetensors").read_bytes() == b"the user's own"


def test_pinned_tensors_need_a_gpu(tmp_path):
    """``pinned=True`` copies to memory that a GPU reads directly, or says that there is none."""
    WeightPublisher(tmp_path / "stream").publish(weights(1))
    mirror = WeightMirror(tmp_path / "stream", tmp_path / "mirror")
    mirror.update()
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"accelerator|GPU"):
            mirror.tensors(pinned=True)
    else:
        found = mirror.tensors(pinned=True)
        assert steps_of(found) == {1}
        assert all(each.is_pinned() for each in found.values())


@pytest.mark.parametrize("replace", [False, True])
def test_a_mirror_of_thousands_of_small_tensors(tmp_path, replace):
    """Many tensors, empty ones and scalars arrive in every mode."""
    rng = np.random.default_rng(0)
    found = {f"t{n}": torch.from_numpy(rng.random(n % 5)) for n in range(2000)}
    publisher = WeightPublisher(tmp_path / "stream")
    mirror = WeightMirror(tmp_path / "stream", tmp_path / "mirror", replace=replace)
    for step in range(3):
        found["t4"] = torch.full((4,), float(step), dtype=torch.float64)
        publisher.publish(found | {"scalar": torch.tensor(step)})
        mirror.update()
        read = read_consistent(tmp_path / "mirror")
        assert all(torch.equal(read[name], found[name]) for name in found)
        assert int(read["scalar"]) == step
