"""A nested state loads with every type preserved, or is refused with the path of a value."""

import collections
import io
import random
import time
import uuid
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from states import same

from pcrshard.checkpoint import DeltaStore
from pcrshard.errors import UnsupportedState

# Characters that mean something in a path, and of all lengths in UTF-8.
TEXT = st.text("a.#0\0é€\U0001f600", max_size=8)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT | st.binary()
)
STATES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(SCALARS, inner),
    max_leaves=20,
)
DTYPES = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float8_e4m3fn float8_e5m2 "
DTYPES += "float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 float16 bfloat16 "
DTYPES += "float32 float64 complex64 complex128"


def there_and_back(*states):
    """Save states, and return the last one as it is loaded after checking the others."""
    with DeltaStore(f"memory://states-{uuid.uuid4().hex}") as store:
        for number, state in enumerate(states, 1):
            assert store.save(state) == number
        for number, state in enumerate(states[:-1], 1):
            assert same(store.load(number), state)
        return store.load()


@settings(max_examples=30)
@given(STATES)
def test_plain_states_come_back(state):
    """Any nesting of plain values loads as it was saved, with huge integers and any keys."""
    assert same(there_and_back(state), state)


@pytest.mark.parametrize("name", DTYPES.split())
def test_tensors_of_each_type_come_back(name):
    """Tensors of every type, shape, and stride load as saved, from keyframes and from deltas."""
    dtype = getattr(torch, name)
    size = torch.empty(0, dtype=dtype).element_size()

    def made(seed):
        generator = torch.Generator().manual_seed(seed)
        raw = torch.randint(0, 2, (40, 60 * size), dtype=torch.uint8, generator=generator)
        return raw.view(dtype)

    whole = made(0)
    few = whole.clone()
    few[3, ::9] = whole[4, ::9]
    shapes = {"scalar": whole[0, 0].clone(), "empty": whole[:0].clone(), "t": made(3).t()}
    shapes |= {"expanded": made(5)[:1].expand(6, -1), "cut": made(6)[:, 7:9]}
    states = [{"w": tensor} | shapes for tensor in (whole, few, made(1), made(1))]
    assert same(there_and_back(*states), states[-1])


def test_files_in_memory_come_back():
    """An ``io.BytesIO``, as Transformer Engine keeps its extra state, loads at its beginning."""
    state = {"_extra_state": io.BytesIO(b"scales")}
    state["_extra_state"].read(2)
    assert there_and_back(state)["_extra_state"].read() == b"scales"


def test_tied_weights_come_back_tied_under_each_name(tmp_path):
    """Tied parameters and views are stored once, share memory when loaded, and load by any name."""
    weight = torch.randn(30, 20)
    state = {
        "emb.weight": weight, "head.weight": weight, "view": weight.t(), "row": weight[3],
        "flat": weight.reshape(-1), "other": torch.randn(30, 20),
    }  # fmt: skip
    with DeltaStore(tmp_path) as store:
        store.save({"model": state})
    assert sum(r.raw_bytes for r in store.versions()) == 2 * weight.nbytes
    loaded = store.load()["model"]
    assert same(loaded, state)
    loaded["emb.weight"][3] = 7
    for name in ("head.weight", "view", "row", "flat"):
        assert (loaded[name] == 7).sum() == 20, name
    assert (loaded["other"] == 7).sum() == 0
    parts = store.load(names=[f"model.{name}" for name in state])
    assert same(list(parts.values()), list(state.values()))
    assert parts["model.emb.weight"] is parts["model.head.weight"]


def test_thousands_of_views_of_one_buffer_are_quick():
    """The parameters in a flat buffer are stored, each alone, without comparing all pairs."""
    flat = torch.randn(4000 * 6)
    state = dict(enumerate(part.view(2, 3) for part in flat.split(6)))
    start = time.process_time()
    assert same(there_and_back(state), state)
    assert time.process_time() - start < 8, "all pairs take 20 s"


def test_edge_cases_keep_their_values():
    """Versions of modules, random generators, lazy conjugates, and equal paths load as saved."""
    complex_tensor = torch.randn(3, dtype=torch.complex64)
    model = torch.nn.BatchNorm1d(4).state_dict()
    state = {
        "model": model,
        "rng": (random.getstate(), np.random.RandomState(0).get_state()),
        "generator": np.random.default_rng(0).bit_generator.state,
        "scalars": [np.int64(3), np.bool_(True), np.complex128(1j)],
        "b": complex_tensor.conj(),
        "c.d": torch.zeros(1),
        "c": {"d": torch.ones(1)},
        "c.d#2": torch.ones(2),
        "milestones": collections.Counter({30: 1, 60: 2}),
        "shape": torch.Size([3, 4]),
        "empty": [torch.empty(0), torch.empty(0)],
        "history": [{"loss": 0.5, "tags": []}] * 2000 + [0] * 20_000,
    }
    back = there_and_back(state | {"big": np.array([1, 256], ">i4")})
    assert back.pop("big").tolist() == [1, 256]
    state["b"] = state["b"].resolve_conj()
    assert same(back, state)
    assert back["model"]._metadata == model._metadata
    assert back["empty"][0] is not back["empty"][1]


class Point(NamedTuple):
    x: int
    y: int


class Subclass(torch.Tensor):
    pass


with warnings.catch_warnings(action="ignore"):  # they are a prototype
    NESTED = torch.nested.nested_tensor([torch.ones(2)])
LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({1, 2}, "a builtins.set"),
        (lambda: 1, "a builtins.function"),
        (Point(1, 2), "a test_states.Point"),
        (collections.defaultdict(int), "a collections.defaultdict"),
        (torch.float32, "a torch.dtype"),
        (torch.nn.Linear(1, 1), "Linear; save its state_dict"),
        ({(1, 2): 3}, "a key of tuple"),
        ("\ud800", "surrogate"),
        (np.array([object()]), "arrays of type"),
        (torch.empty(3, device="meta"), "dense tensor with values"),
        (NESTED, "dense tensor with values"),
        (torch.eye(3).to_sparse(), "dense tensor with values"),
        (torch.randn(3).as_subclass(Subclass), "store its values as a torch.Tensor"),
        (LOOP, "at most 100 levels"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else "",
)
def test_other_values_are_refused_with_their_path(value, what):
    """An unsupported value raises an error that names its path."""
    with pytest.raises(UnsupportedState, match=rf"{what}.*key=outer\.0"):
        there_and_back({"outer": [value]})
