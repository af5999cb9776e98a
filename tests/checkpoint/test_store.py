"""Every version loads as it was saved, exact unless stated."""

import gc
import logging
import math
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from children import start
from states import ADAM_GROUP, adam_state, bits, same, saved, tiny_state

from pcrshard.checkpoint import DeltaStore, Precision
from pcrshard.errorbound import Absolute
from pcrshard.errors import ConcurrentWriter, StorageError, UnsupportedState, VersionUnavailable


@pytest.mark.parametrize(("count", "every", "workers"), [(3, 1, 1), (6, 4, 3), (60, 1000, 1)])
def test_bounds_hold_for_weights_and_moments(count, every, workers):
    """Weights within 0.5 % of the std, second moments within 30 %, the rest exact: in any chain."""
    url = f"memory://bounds-{count}"
    store = saved(url, count, precision="balanced", keyframe_every=every, workers=workers)
    for number in {1, 2, count // 2, count}:
        exact, loaded = adam_state(number), store.load(number)
        weight = exact["model"]["weight"]
        error = (loaded["model"]["weight"] - weight).abs().max()
        assert 0 < error <= 1.1 * 0.005 * weight.std()
        moment = exact["opt"]["state"][0]["exp_avg_sq"]
        fraction = (loaded["opt"]["state"][0]["exp_avg_sq"] / moment - 1).abs().max()
        assert 0 < fraction <= 0.3
        assert torch.equal(loaded["model"]["b"], exact["model"]["b"])
        assert loaded["opt"]["param_groups"] == exact["opt"]["param_groups"]
        assert same(DeltaStore(url).load(number), loaded)


def test_an_unknown_version_is_an_error(tmp_path):
    """Loading a version that does not exist, or from an empty folder, raises an error."""
    store = saved(tmp_path / "store", 3)
    for number in (77, -7, 0):
        with pytest.raises(VersionUnavailable, match=f"got {number}"):
            store.load(number)
    nothing = DeltaStore(tmp_path / "nothing")
    assert nothing.versions() == []
    with pytest.raises(VersionUnavailable, match="there is no store"):
        nothing.load()


def test_metrics_are_any_scalars(tmp_path):
    """A mean of numpy or a loss of torch is recorded as a number."""
    given = {"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(1), "d": torch.tensor(0.25)}
    with DeltaStore(tmp_path) as store:
        store.save({}, metrics=given | {"e": None, "f": "x", "g": np.float64("nan")})
    found = store.versions()[0].metrics
    assert str(found) == "{'a': 0.5, 'b': 3, 'c': True, 'd': 0.25, 'e': None, 'f': 'x', 'g': nan}"


WRONG_METRICS = (
    {"a": np.ones(2)}, {"a": torch.ones(2)}, {"a": 1j}, {"a": [1]}, {"a": "\ud800"}, {1: 2},
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "metrics"),
    [({"precision": "good"}, {}), ({"keyframe_every": 0}, {}), *(({}, m) for m in WRONG_METRICS)],
)
def test_wrong_options_are_refused(tmp_path, options, metrics):
    """Invalid options and invalid metrics raise ValueError, and nothing is written."""
    with pytest.raises(ValueError, match="expected"):
        DeltaStore(tmp_path, **options).save({}, metrics=metrics)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Precision(exact="*.weight"),
        lambda: Precision(weights=0.01),
        lambda: Precision(weights=Absolute(1), lossy="model"),
        lambda: DeltaStore("unused", 0.01),
    ],
)
def test_a_precision_of_another_type_is_refused(make):
    """A forgotten comma or bound does not make a store lossy without a word."""
    with pytest.raises(TypeError, match="expected"):
        make()


def test_what_no_reader_accepts_is_not_saved(tmp_path):
    """A state or metrics beyond the limit of headers fail to be saved, and lose nothing."""
    with DeltaStore(tmp_path) as store:
        store.save({"a": 1})
        for state, metrics in (({"a": bytes(65 << 20)}, {}), ({}, {"log": "x" * (65 << 20)})):
            with pytest.raises(UnsupportedState, match="keep large values in tensors"):
                store.save(state, metrics=metrics, blocking=True)
        store.save({"a": 2})
        assert [store.load(n)["a"] for n in (1, 2)] == [1, 2]
    many = Precision(weights=Absolute(1), exact=tuple(f"model.{n:0200}" for n in range(99)))
    with DeltaStore(tmp_path, many) as store:
        store.save({"a": 3})
    assert DeltaStore(tmp_path).load()["a"] == 3


def test_moments_of_zeros_are_saved(tmp_path):
    """Large moments in float64 that are all 0 take next to nothing."""
    moments = {"exp_avg_sq": torch.zeros(1500, 1500, dtype=torch.float64)}
    state = {"state": {0: moments}, "param_groups": [ADAM_GROUP]}
    with DeltaStore(tmp_path, "balanced") as store:
        store.save(state)
        assert same(store.load(), state)
        assert store.versions()[0].file_bytes < 1000


def save_in_child(connection, store):
    store.save({"a": 2}, blocking=True)
    connection.send(True)


def test_a_forked_process_can_save(tmp_path):
    """After a save of the parent, a forked child saves, too."""
    store = saved(tmp_path, 1)
    process, saved_there = start(save_in_child, store, method="fork")
    assert saved_there.poll(30)
    process.join()
    assert store.load(2) == {"a": 2}


def test_other_folders_in_the_store_do_not_matter(tmp_path):
    """A folder beside the versions, such as lost+found, is never opened."""
    (tmp_path / "lost+found").mkdir(mode=0)
    (tmp_path / "lost+found" / "file").symlink_to(tmp_path)
    saved(tmp_path, 1)
    with pytest.raises(ValueError, match="empty"):
        DeltaStore("")


def test_patterns_and_special_values_stay_exact(tmp_path):
    """Tensors selected by any of their paths and special values, such as NaN, stay exact."""
    special = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-42])
    tied = torch.randn(30, 30)
    state = {"head": tied, "emb": {"w": tied}, "w": torch.randn(30, 30)}
    state["w"][0, :5] = special
    absolute = Precision(weights=Absolute(0.01), lossy=("*",), exact=("emb.*",))
    with DeltaStore(tmp_path, absolute) as store:
        store.save(state)
        loaded = store.load()
    assert torch.equal(loaded["emb"]["w"], state["emb"]["w"])
    assert bits(loaded["w"][0, :5]) == bits(special)
    assert 0 < (loaded["w"] - state["w"])[1:].abs().max() <= 0.01


def test_where_few_words_change_versions_are_exact(tmp_path):
    """While few words change, versions are exact and smaller; then they are quantized again."""
    generator = torch.Generator().manual_seed(0)
    words = (torch.randn(200, 200, generator=generator) * 0.02).bfloat16().view(torch.int16)
    states = []
    for step in range(8):
        few = torch.rand(words.shape, generator=generator) < 0.01
        words = words + (few if step < 6 else ~few).to(torch.int16)
        states.append({"weight": words.view(torch.bfloat16)})
        # Reopened for each, which must not interrupt exact deltas.
        if step != 1:
            store = DeltaStore(tmp_path, "balanced")
        store.save(states[-1], blocking=True)
    found = [n for n, state in enumerate(states, 1) if same(store.load(n), state)]
    assert found == [2, 3, 4, 5, 6]
    sizes = [record.file_bytes for record in store.versions()]
    assert sum(sizes[1:6]) < 1.5 * sizes[0]


def test_long_chains_begin_again_when_their_deltas_outweigh_the_keyframe():
    """Large deltas cause a new keyframe whatever ``keyframe_every`` allows; small deltas do not."""
    torch.manual_seed(0)
    weights = [torch.randn(100, 100) for _ in range(12)]
    for name, states, expected in (("far", weights, [1, 11]), ("near", weights[:1] * 12, [1])):
        with DeltaStore(f"memory://{name}", keyframe_every=1000) as store:
            for state in states:
                store.save({"w": state, "same": torch.arange(9)})
            assert [r.number for r in store.versions() if r.parent is None] == expected


def test_parts_are_loaded_alone(tmp_path):
    """Any part of a state loads by its path, on any device; an unclear path raises an error."""
    store = saved(tmp_path, 3)
    whole = store.load(2)
    parts = store.load(2, names=["model.weight", "model", "epoch"])
    assert list(parts) == ["model.weight", "model", "epoch"]
    assert same(parts["model"], whole["model"])
    assert parts["model.weight"] is parts["model"]["weight"]
    assert parts["epoch"] == 2
    with pytest.raises(VersionUnavailable, match=r"found 0 .*key=model\.nothing"):
        store.load(2, names=["model.nothing"])
    with pytest.raises(TypeError, match=r"write \['model'\]"):
        store.load(2, names="model")
    # The meta device stands for an accelerator; arrays stay on the CPU.
    with store:
        store.save({"w": torch.randn(20, 20), "a": np.arange(6.0), "n": [np.float32(2)]})
        store.save({1: torch.ones(3), "1": 5, "a.b": [6, 7], "a": {"b": [8], "c": 9}})
    assert store.load(names=["a.b.1", "a.c"]) == {"a.b.1": 7, "a.c": 9}
    for name in ("1", "a.b", "a.b.0"):
        with pytest.raises(VersionUnavailable, match="found 2"):
            store.load(names=[name])
    store.delete(keep=[-2])
    loaded = store.load(map_location="meta")
    assert loaded["w"].is_meta
    assert loaded["a"].tolist() == [0, 1, 2, 3, 4, 5]
    assert store.load(names=["w"], map_location="meta")["w"].is_meta


def test_training_goes_on_while_a_version_is_written(tmp_path):
    """Once ``save`` returns, changes of the state do not affect the version being written."""
    state = adam_state(1)
    gate = threading.Event()
    start = time.monotonic()
    with DeltaStore(tmp_path) as store:
        store.save({}, on_saved=lambda number: gate.wait(10))
        threading.Timer(0.2, gate.set).start()
        number = store.save(state)
        state["model"]["weight"].zero_()
        state["opt"]["param_groups"][0] = None
        loaded = store.load(number)
        assert time.monotonic() - start < 5
    assert same(loaded, adam_state(1))


def test_a_failing_callback_is_no_failing_save(tmp_path, caplog):
    """If ``on_saved`` fails, the version is still stored, and the log says so."""
    with DeltaStore(tmp_path) as store:
        with pytest.raises(TypeError):
            store.save(tiny_state(1), on_saved=len, blocking=True)
        assert "version 1 is saved, but on_saved failed" in caplog.text
        assert [record.number for record in store.versions()] == [1]
        assert store.save(tiny_state(2), blocking=True) == 2


def test_what_is_lossy_is_said(tmp_path, caplog):
    """The first save logs the precision, and reopening with another one logs a warning."""
    caplog.set_level(logging.INFO)
    weight = torch.randn(50, 50)
    with DeltaStore(tmp_path, "fine") as store:
        store.save({"weight": weight})
    assert "weights within 0.1 % of their std, first moments within 6 % of their" in caplog.text
    assert not any(record.levelno > logging.INFO for record in caplog.records)
    with DeltaStore(tmp_path) as store:
        store.save({"weight": weight})
    assert "now: everything bit for bit" in caplog.text
    assert [torch.equal(store.load(n)["weight"], weight) for n in (1, 2)] == [False, True]


def test_versions_of_one_content_in_different_forms_are_not_confused(tmp_path):
    """A delta refers to the form that its parent's file holds, also after a deletion."""
    state = saved(tmp_path, 2, precision="balanced").load()
    with DeltaStore(tmp_path) as store:
        store.save(state)
    with DeltaStore(tmp_path, "balanced") as store:
        store.delete(keep=[2, 3])
        assert store.versions()[0].id == store.versions()[1].id
        store.save(adam_state(3))
    with DeltaStore(tmp_path) as store:
        assert store.verify() == []
        weights = store.load()["model"]["weight"]
    assert (weights - adam_state(3)["model"]["weight"]).abs().max() < 1e-3


def test_what_no_version_needs_is_removed(tmp_path):
    """Deleted versions free their space, and manifests do not pile up; a version that is still
    being saved can be kept.
    """
    told = []
    with DeltaStore(tmp_path) as store:
        for number in range(6):
            store.save(tiny_state(number))
        store.delete(keep=[2, 6], progress=lambda *far: told.append(far))
    assert told == [(1, 2), (2, 2)]
    manifests = {"manifest.pcm", *(f"manifest-{number:06d}.pcm" for number in (6, 7, 8))}
    assert {*os.listdir(tmp_path)} == manifests | {record.file for record in store.versions()}


def test_a_manifest_that_cannot_be_read_ends_with_an_error(tmp_path):
    """A dangling link among the manifests is named."""
    store = saved(tmp_path, 1)
    (tmp_path / "manifest-000999.pcm").symlink_to(tmp_path / "nothing")
    with pytest.raises(StorageError, match="manifest-000999"):
        store.versions()


def test_no_tensor_waits_for_garbage_collection(tmp_path):
    """Memory of a saved or loaded state is free at once: the next save or load reuses it."""
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        with DeltaStore(tmp_path) as store:
            store.save({"weight": torch.ones(64, 64), "shared": [torch.ones(9)] * 2}, blocking=True)
            store.load(1)
        gc.collect()
        assert [each for each in gc.garbage if isinstance(each, torch.Tensor)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def stale_load(store, other_url):
    """Save, let another writer add a version, load that one, and change what was loaded."""
    state = {"w": torch.arange(900.0).view(30, 30), "n": 1}
    store.save(state, blocking=True)
    DeltaStore(other_url).save(state | {"n": 2}, blocking=True)
    loaded = store.load()
    loaded["w"].zero_()
    return state


def test_a_loaded_state_is_the_users(tmp_path):
    """Changing a loaded state in place never changes what later versions refer to."""
    with DeltaStore(tmp_path) as store:
        state = stale_load(store, tmp_path)
        with pytest.raises(ConcurrentWriter):
            store.save(state, blocking=True)
        store.save(state | {"n": 3}, blocking=True)
    with DeltaStore(tmp_path) as store:
        assert store.verify() == []
        assert same(store.load(), state | {"n": 3})


MEMORY = r"""
import gc, re, sys, tempfile
import torch
from pcrshard.checkpoint import DeltaStore

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def run(folder, weight):
    with DeltaStore(folder, sys.argv[1]) as store:
        for _ in range(3):
            state = {"model": {f"{n}.weight": part for n, part in enumerate(weight)}}
            store.save(state, blocking=sys.argv[2] == "blocking")
            weight[0] += 1
        store.versions()
        with open("/proc/self/status") as file:
            peak = int(re.search(r"VmHWM:\s+(\d+)", file.read())[1]) * 1024
        print((peak - before) / weight.nbytes)
        store.load()
    return store

with tempfile.TemporaryDirectory() as folder:
    before = resident()
    run(folder + "/first", torch.randn(20, 10, 1000))
    weight = torch.randn(50, 750, 1000)
    before = resident()
    kept = run(folder + "/second", weight)
    print((resident() - before) / 1e6)
"""


@pytest.mark.parametrize(
    ("precision", "how", "most"),
    [
        ("lossless", "background", 1.3),
        ("balanced", "background", 1.4),
        pytest.param("lossless", "blocking", 0.3, marks=pytest.mark.long),
        pytest.param("balanced", "blocking", 0.5, marks=pytest.mark.long),
    ],
)
def test_a_store_takes_little_memory(precision, how, most):
    """Saving in the background takes a copy of the state and little else; a closed store that is
    still referenced takes less than 5 MB.
    """
    command = [sys.executable, "-c", MEMORY, precision, how]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    _, peak, left = map(float, said.stdout.split())
    assert (peak < most, left < 5) == (True, True), said.stdout
