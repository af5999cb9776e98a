"""Which bound applies, and that a version's id stands for its content."""

import dataclasses

import pytest
import torch
from states import same, tiny_state

from pcrshard.checkpoint.held_version import (
    Bounds,
    each,
    make_version,
    restore_all,
    state_of,
    write_version,
)
from pcrshard.checkpoint.typed_tree import Leaf, flatten
from pcrshard.errorbound import Absolute, RelativeStd
from pcrshard.errors import CorruptCheckpoint

LOSSLESS = Bounds()


def version(state, bounds=LOSSLESS):
    return make_version(flatten(state), bounds, None, number=1, metrics={})


def test_the_bound_follows_role_and_path():
    """Patterns win over roles."""
    bounds = Bounds(Absolute(1.0), Absolute(2.0), Absolute(3.0), exact=("*.embedding.*",))

    def bound(path, role):
        return bounds.of(Leaf(path, torch.zeros(1), role))

    assert bound("m.w", "weight") == Absolute(1.0)
    assert bound("m.w", "optimizer") == Absolute(2.0)
    assert bound("m.w", "second-moment") == Absolute(3.0)
    assert bound("m.w", "exact") is None
    assert bound("m.embedding.w", "weight") is None


def test_the_id_stands_for_the_content():
    """Equal for equal states; another for any change of values, types, paths or plain values."""
    state = tiny_state(1)
    ids = {version(state).id}
    assert version(tiny_state(1)).id in ids
    for change in ("value", "type", "path", "plain"):
        other = tiny_state(1)
        if change == "value":
            other["model"]["w"][0, 0] += 1
        elif change == "type":
            other["model"]["b"] = other["model"]["b"].view(torch.int32)
        elif change == "path":
            other["model"]["c"] = other["model"].pop("b")
        else:
            other["epoch"] = 9
        ids.add(version(other).id)
    assert len(ids) == 5


@pytest.mark.parametrize("workers", [1, 3])
def test_a_state_comes_back_from_what_is_held(workers):
    """By one thread or several."""
    state = tiny_state(2)
    held = make_version(flatten(state), LOSSLESS, None, number=1, metrics={}, workers=workers)
    words = restore_all(held, workers=workers)
    assert same(state_of(held, words), state)
    assert each(workers, str, range(9)) == [str(i) for i in range(9)]


def test_loaded_tensors_have_memory_of_their_own():
    """Changing a loaded state changes neither the store's memory nor another loaded state."""
    held = version(tiny_state(2))
    words = restore_all(held)
    state_of(held, words)["model"]["w"].zero_()
    assert same(state_of(held, words), tiny_state(2))


def test_other_content_is_refused():
    """Whatever made it: both ids are named."""
    held = version(tiny_state(1))
    with pytest.raises(CorruptCheckpoint, match=r"version 1 restores to .*, expected 0000"):
        restore_all(dataclasses.replace(held, id=bytes(32)))


def test_equal_versions_are_equal_files(tmp_path):
    """Writing is deterministic: nothing in a file comes from the moment or the machine."""
    held = version(tiny_state(1), Bounds(RelativeStd(0.01)))
    for name in "ab":
        write_version(str(tmp_path / name), held, None, workers=2)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
