"""Chains of deltas lead to the right version, or to an error that names both."""

import dataclasses

import pytest
import torch
from states import tiny_state

from pcrshard.checkpoint.chain import chain_of, plan_layers, read_tensors, read_version
from pcrshard.checkpoint.held_version import Bounds, make_version, write_version
from pcrshard.checkpoint.typed_tree import flatten
from pcrshard.checkpoint.version_file import VersionFile
from pcrshard.errorbound import RelativeStd
from pcrshard.errors import BrokenChain, CorruptCheckpoint

BOUNDS = Bounds(RelativeStd(0.01), RelativeStd(0.1))


@pytest.fixture
def versions():
    made = []
    for number in (1, 2, 3):
        before = made[-1] if made else None
        noise = torch.randn(20, 20, generator=torch.Generator().manual_seed(number))
        state = flatten(tiny_state(number) | {"noise": noise})
        made.append(make_version(state, BOUNDS, before, number=number, metrics={}))
    return made


def folder(tmp_path, versions, parents):
    """Write versions with the parents of a dict; returns what opens them."""
    by_number = {version.number: version for version in versions}
    for version in versions:
        parent = parents.get(version.number)
        write_version(str(tmp_path / str(version.number)), version, by_number.get(parent))
    return lambda number: VersionFile(str(tmp_path / str(number)))


def test_any_direction_restores_the_same(tmp_path, versions):
    """Forward, backward and hop: what is held is equal, bit for bit."""
    for parents in ({2: 1, 3: 2}, {1: 2, 2: 3}, {2: 1, 3: 1}, {}):
        opener = folder(tmp_path, versions, parents)
        for version in versions:
            found = read_version(opener(version.number), opener)
            assert found.id == version.id
            for path, held in version.tensors.items():
                assert (found.tensors[path].values == held.values).all()


def test_only_needed_files_are_opened(tmp_path, versions):
    """A tensor that is stored on its own does not open the reference."""
    opened = []
    opener = folder(tmp_path, versions, {2: 1, 3: 2})

    def counting(number):
        opened.append(number)
        return opener(number)

    file = opener(3)
    layers = plan_layers(chain_of(file, counting), ["noise"])
    assert opened == []
    assert list(read_tensors(layers)) == ["noise"]
    plan_layers(chain_of(file, counting), ["model.w"])
    assert opened == [2, 1]


def test_another_parent_is_refused(tmp_path, versions):
    """A version of the same number from another run: both ids are named."""
    opener = folder(tmp_path, versions, {2: 1, 3: 2})
    other = make_version(flatten(tiny_state(9)), BOUNDS, None, number=2, metrics={})
    write_version(str(tmp_path / "2"), other, None)
    message = f"expected version 2 to be {versions[1].id.hex()}, got {other.id.hex()}"
    with pytest.raises(BrokenChain, match=message):
        read_version(opener(3), opener)


def test_a_parent_without_the_tensor_is_refused(tmp_path, versions):
    """The tensor is named."""
    first = versions[0]
    tensors = {path: held for path, held in first.tensors.items() if path != "model.w"}
    cut = dataclasses.replace(first, tensors=tensors)
    opener = folder(tmp_path, versions, {2: 1, 3: 2})
    write_version(str(tmp_path / "1"), cut, None)
    with pytest.raises(BrokenChain, match=r"expected the reference of a tensor.*key=model\.w"):
        read_version(opener(2), opener)


def test_a_circle_is_refused(tmp_path, versions):
    """Two versions that refer to each other end with an error, not with the end of memory."""
    opener = folder(tmp_path, versions, {1: 2, 2: 1})
    with pytest.raises(BrokenChain, match="its own reference"):
        read_version(opener(1), opener)


def test_wrong_content_is_refused(tmp_path, versions):
    """Right checksums of the payload, wrong restored bytes: never served."""
    wrong = dict(versions[0].content_crcs) | {"model.w": 1}
    broken = dataclasses.replace(versions[0], content_crcs=wrong)
    write_version(str(tmp_path / "1"), broken, None)
    file = VersionFile(str(tmp_path / "1"))
    layers = plan_layers(chain_of(file, VersionFile), ["model.w"])
    with pytest.raises(CorruptCheckpoint, match=r"checksum.*expected 00000001.*key=model\.w"):
        read_tensors(layers)
    broken = dataclasses.replace(versions[0], id=bytes(32))
    write_version(str(tmp_path / "1"), broken, None)
    with pytest.raises(CorruptCheckpoint, match="restores to"):
        read_version(VersionFile(str(tmp_path / "1")), VersionFile)
