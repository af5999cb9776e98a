"""A nested state comes back with each type as it was, or is refused with its path."""

import collections
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from states import same

from pcrshard.checkpoint.typed_tree import flatten, unflatten
from pcrshard.errors import CorruptCheckpoint, UnsupportedState

# Other jobs may have the machine.
PATIENT = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

LEGACY = np.random.RandomState(0)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)
STATES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(SCALARS, inner),
    max_leaves=20,
)


def there_and_back(state):
    flat = flatten(state)
    return unflatten(flat.tree, lambda number: flat.leaves[number].tensor)


@PATIENT
@given(STATES)
def test_plain_states_come_back(state):
    """Any nesting of plain values, with integers of any size and keys of any plain type."""
    assert same(there_and_back(state), state)


def test_the_state_of_a_training_run_comes_back():
    """Model, AdamW, scheduler and the generators of torch, numpy and Python."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    schedule.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "rng": (torch.get_rng_state(), random.getstate(), LEGACY.get_state()),
        "generator": np.random.default_rng(0).bit_generator.state,
        "scalars": [np.float32(0.1), np.int64(3), np.bool_(True), np.complex128(1j)],
    }
    back = there_and_back(state)
    assert same(back, state)
    assert back["model"]._metadata == state["model"]._metadata
    optimizer.load_state_dict(back["optimizer"])


def test_empty_tensors_are_not_tied():
    """They have no memory by which they could be told apart."""
    state = {"a": torch.empty(0), "b": torch.empty(0)}
    assert len(flatten(state).leaves) == 2


def test_equal_paths_become_distinct():
    """Keys with dots in them can spell the same path twice."""
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    assert [leaf.path for leaf in flatten(state).leaves] == ["a.b", "a.b#2"]
    assert same(there_and_back(state), state)


class Point(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({1, 2}, "builtins.set"),
        (object(), "builtins.object"),
        (lambda: 1, "builtins.function"),
        (Point(1, 2), "test_typed_tree.Point"),
        (collections.defaultdict(int), "collections.defaultdict"),
        (torch.float32, "torch.dtype"),
        ({(1, 2): 3}, "key of tuple"),
    ],
)
def test_other_values_are_refused_with_their_path(value, what):
    """Instead of a pickle that executes, or a value that comes back as another type."""
    with pytest.raises(UnsupportedState, match=rf"cannot store a.*{what}.*key=outer\.0"):
        flatten({"outer": [value]})


def test_bottomless_states_are_refused():
    """A list that holds itself ends with an error instead of a crash."""
    loop = []
    loop.append(loop)
    with pytest.raises(UnsupportedState, match="at most 100 levels"):
        flatten(loop)


@pytest.mark.parametrize(
    "tree",
    [
        [],
        ["d"],
        ["q", 1],
        [["d"], 1],
        {"a": 1},
        ["d", 3],
        ["d", [[1]]],
        ["d", [[["l", []], 1]]],
        ["l", "text"],
        ["x", "0"],
        ["x", 5],
        ["i", 3],
        ["i", bytes(1 << 17)],
        ["s", "object", b""],
        ["s", "float32", b"abc"],
        ["s", [], b"abc"],
        ["s", "bfloat16", b"ab"],
        ["a", 0],
        ["v", 0],
        ["v", 0, 0, [3], [1]],
        ["v", 0, 1, [2], [1]],
        ["v", 0, -1, [1], [1]],
        ["v", 0, 0, [1 << 40], [1]],
        ["v", 0, 0, [1], ["1"]],
    ],
)
def test_hostile_trees_are_refused(tree):
    """Nothing of the kind makes an object, or an error that is not ours."""

    def leaf(number):
        if number:
            raise CorruptCheckpoint("no such tensor")
        return torch.zeros(2, dtype=torch.bfloat16)

    with pytest.raises(CorruptCheckpoint):
        unflatten(tree, leaf)


def test_deep_hostile_trees_are_refused():
    """A thousand levels do not end the process."""
    tree = 1
    for _ in range(500):
        tree = ["l", [tree]]
    with pytest.raises(CorruptCheckpoint, match="more than 100 levels"):
        unflatten(tree, lambda number: None)
