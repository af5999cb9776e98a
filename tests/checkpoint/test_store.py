"""Every version loads as it was saved, exact unless stated."""

import logging
import math
import threading
import time

import numpy as np
import pytest
import torch
from states import ADAM_GROUP, adam_state, bits, same, tiny_state

from pcrshard.checkpoint import DeltaStore, Precision
from pcrshard.errorbound import Absolute, RelativeStd
from pcrshard.errors import (
    ConcurrentWriter,
    StorageError,
    VersionUnavailable,
)


def saved(url, count=6, state=adam_state, **options):
    with DeltaStore(str(url), keyframe_every=4, **options) as store:
        for number in range(1, count + 1):
            store.save(state(number), metrics={"acc": number / 10})
    return DeltaStore(str(url))


def test_bounds_hold_for_weights_and_moments(tmp_path):
    """Weights within 0.5 % of the std, second moments within 30 % of each value, the rest exact."""
    store = saved(tmp_path, workers=3)
    for number in range(1, 7):
        exact = adam_state(number)
        loaded = store.load(number)
        weight = exact["model"]["w"]
        error = (loaded["model"]["w"] - weight).abs().max()
        assert 0 < error <= 1.1 * 0.005 * weight.std()
        moment = exact["opt"]["state"][0]["exp_avg_sq"]
        fraction = (loaded["opt"]["state"][0]["exp_avg_sq"] / moment - 1).abs().max()
        assert 0 < fraction <= 0.3
        assert torch.equal(loaded["model"]["b"], exact["model"]["b"])
        assert loaded["opt"]["param_groups"] == exact["opt"]["param_groups"]
        assert same(DeltaStore(str(tmp_path), workers=3).load(number), loaded)


def test_versions_are_listed(tmp_path):
    """Versions are listed oldest first; loading an unknown version raises an error."""
    store = saved(tmp_path / "store")
    versions = store.versions()
    assert [record.number for record in versions] == [1, 2, 3, 4, 5, 6]
    assert [record.metrics["acc"] for record in versions] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert all(record.raw_bytes == 2 * 24 * 16 * 4 + 16 for record in versions)
    for number in (77, -7, 0):
        with pytest.raises(VersionUnavailable, match=f"got {number}"):
            store.load(number)
    nothing = DeltaStore(str(tmp_path / "nothing"))
    assert nothing.versions() == []
    with pytest.raises(VersionUnavailable, match="there is no store"):
        nothing.load()


WRONG_METRICS = ({"a": np.float64(1)}, {"a": [1]}, {"a": "\ud800"}, {1: 2})


@pytest.mark.parametrize(
    ("options", "metrics"),
    [({"precision": "good"}, {}), ({"keyframe_every": 0}, {}), *(({}, m) for m in WRONG_METRICS)],
)
def test_wrong_options_are_refused(tmp_path, options, metrics):
    """Invalid options and invalid metrics raise ValueError, and nothing is written."""
    with pytest.raises(ValueError, match="expected"):
        DeltaStore(str(tmp_path), **options).save({}, metrics=metrics)
    assert not list(tmp_path.iterdir())


SGD_GROUP = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": False, "params": [0]}


@pytest.mark.parametrize(
    ("group", "name", "is_exact"),
    [
        (ADAM_GROUP, "exp_avg", False),
        (ADAM_GROUP, "max_exp_avg_sq", False),
        (SGD_GROUP | {"initial_lr": 1.0}, "momentum_buffer", False),
        (ADAM_GROUP, "master_param", True),
        (ADAM_GROUP | {"weight_sum": 1.0, "r": 0.0}, "exp_avg_sq", True),  # Schedule-Free
        ({"lr": 0.1, "params": [0]}, "exp_avg", True),
    ],
)
def test_only_known_optimizer_entries_are_lossy(tmp_path, group, name, is_exact):
    """Master weights and the state of unknown optimizers are stored bit for bit."""
    tensor = torch.rand(40, 30)
    state = {"optimizer": {"state": {0: {name: tensor}}, "param_groups": [group]}}
    with DeltaStore(str(tmp_path)) as store:
        store.save(state)
        back = store.load()["optimizer"]["state"][0][name]
    assert torch.equal(back, tensor) == is_exact


def test_memory_shared_with_an_exact_tensor_stays_exact(tmp_path):
    """If a master weight is the model's own parameter, the parameter stays exact, too."""
    weight = torch.randn(30, 20)
    optimizer = {"state": {0: {"master": weight}}, "param_groups": [ADAM_GROUP]}
    with DeltaStore(str(tmp_path)) as store:
        store.save({"model": {"w": weight}, "optimizer": optimizer})
        assert torch.equal(store.load()["model"]["w"], weight)


def test_patterns_and_special_values_stay_exact(tmp_path):
    """Tensors selected by path and special values, such as NaN payloads, stay exact."""
    special = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-42])
    state = {"emb": {"w": torch.randn(30, 30)}, "w": torch.randn(30, 30)}
    state["w"][0, :5] = special
    absolute = Precision(weights=Absolute(0.01), exact=("emb.*",))
    with DeltaStore(str(tmp_path), absolute) as store:
        store.save(state)
        loaded = store.load()
    assert torch.equal(loaded["emb"]["w"], state["emb"]["w"])
    assert bits(loaded["w"][0, :5]) == bits(special)
    assert 0 < (loaded["w"] - state["w"])[1:].abs().max() <= 0.01


def rl_step(generator, words):
    """Return words after a step that changes 1 % of them by one unit."""
    changed = torch.rand(words.shape, generator=generator) < 0.01
    return words + changed.to(torch.int16)


def test_where_few_words_change_versions_are_exact(tmp_path):
    """If few words change, whole versions are stored exactly, also after the store is reopened."""
    generator = torch.Generator().manual_seed(0)
    words = (torch.randn(300, 400, generator=generator) * 0.02).bfloat16().view(torch.int16)
    states = []
    exact = DeltaStore.lossless(str(tmp_path / "exact"))
    store = DeltaStore(str(tmp_path / "default"))
    for number in range(1, 13):
        words = rl_step(generator, words)
        states.append({"w": words.view(torch.bfloat16)})
        exact.save(states[-1])
        store.save(states[-1])
        if number == 5:
            store.close()
            store = DeltaStore(str(tmp_path / "default"))
    sizes = [sum(r.file_bytes for r in s.versions()[1:]) for s in (store, exact)]
    assert all(same(store.load(n), states[n - 1]) for n in range(2, 13))
    assert not same(store.load(1), states[0])
    keyframe = store.versions()[1].file_bytes
    assert sizes[0] <= sizes[1] + keyframe
    store.close()
    exact.close()


def test_where_all_words_change_again_versions_are_quantized_again(tmp_path):
    """Once all words change again, versions are quantized again."""
    torch.manual_seed(0)
    weight = torch.randn(200, 200)
    with DeltaStore(str(tmp_path)) as store:
        for step in range(8):
            state = weight.clone()
            if step < 4:
                weight = weight.clone()
                weight[step] += 1
            else:
                weight = weight + 0.01 * torch.randn(200, 200)
            store.save({"w": state})
        store.save({"w": weight})
        exact = [r.number for r in store.versions() if r.file_bytes > 90_000]
        assert not torch.equal(store.load()["w"], weight)
    assert len(exact) <= 2


def test_after_a_hundred_links_the_error_is_that_of_one():
    """Errors do not accumulate: after a hundred deltas, the bound still holds."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 32, generator=generator) * 0.02
    exact = []
    precision = Precision(weights=RelativeStd(0.05))
    with DeltaStore("memory://hundred-links", precision, keyframe_every=1000) as store:
        for _ in range(100):
            weight = weight + torch.randn(32, 32, generator=generator) * 1e-4
            exact.append(weight)
            store.save({"w": weight})
    for number in (1, 50, 100):
        error = (store.load(number)["w"] - exact[number - 1]).abs().max()
        assert error <= 1.1 * 0.05 * exact[number - 1].std()


def test_long_chains_begin_again_when_their_deltas_outweigh_the_keyframe(tmp_path):
    """Large deltas cause a new keyframe whatever ``keyframe_every`` allows; small deltas do not."""
    torch.manual_seed(0)
    with DeltaStore(str(tmp_path / "far"), keyframe_every=1000) as far:
        for _ in range(25):
            far.save({"w": torch.randn(60, 60)})
    with DeltaStore(str(tmp_path / "near"), keyframe_every=1000) as near:
        weight = torch.randn(300, 300)
        for _ in range(25):
            near.save({"w": weight})
    keyframes = [[r.number for r in s.versions() if r.parent is None] for s in (far, near)]
    assert keyframes == [[1, 11, 21], [1]]


def test_parts_are_loaded_alone(tmp_path):
    """Any part of a state loads by its path; an unknown path raises an error."""
    store = saved(tmp_path)
    whole = store.load(2)
    parts = store.load(2, names=["model.w", "model", "epoch"])
    assert list(parts) == ["model.w", "model", "epoch"]
    assert same(parts["model"], whole["model"])
    assert parts["model.w"] is parts["model"]["w"]
    assert parts["epoch"] == 2
    parts["model"]["b"].zero_()
    assert store.load(2, names=["model.b"])["model.b"].abs().sum() > 0
    with pytest.raises(VersionUnavailable, match=r"no such tensor.*key=model\.nothing"):
        store.load(2, names=["model.nothing"])


def test_tensors_go_where_they_are_asked_to(tmp_path):
    """Tensors move to ``map_location`` (meta stands for an accelerator); arrays stay on the CPU."""
    with DeltaStore(str(tmp_path)) as store:
        store.save({"w": torch.randn(20, 20), "a": np.arange(6.0), "n": [np.float32(2)]})
        loaded = store.load(map_location="meta")
        assert loaded["w"].is_meta
        assert loaded["a"].tolist() == [0, 1, 2, 3, 4, 5]
        assert store.load(names=["w"], map_location="meta")["w"].is_meta


def test_training_goes_on_while_a_version_is_written(tmp_path):
    """Once ``save`` returns, changes of the state do not affect the version being written."""
    state = adam_state(1)
    gate = threading.Event()
    with DeltaStore.lossless(str(tmp_path)) as store:
        store.save({}, on_saved=lambda number: gate.wait(10))
        threading.Timer(0.2, gate.set).start()
        number = store.save(state)
        start = time.monotonic()
        state["model"]["w"].zero_()
        state["opt"]["param_groups"][0] = None
        loaded = store.load(number)
        assert time.monotonic() - start < 5
    assert same(loaded, adam_state(1))


def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path):
    """The next call raises a background error, and the unused version number is reused."""
    store = DeltaStore(str(tmp_path / "store"))
    store.save(tiny_state(1), blocking=True)
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").write_text("not a folder")
    store.save(tiny_state(2))
    with pytest.raises(StorageError):
        store.versions()
    (tmp_path / "store").unlink()
    (tmp_path / "away").rename(tmp_path / "store")
    assert store.save(tiny_state(2), blocking=True) == 2
    store.close()


def test_a_failing_callback_is_no_failing_save(tmp_path, caplog):
    """If ``on_saved`` fails, the version is still stored, and the log says so."""

    def fail(number):
        raise RuntimeError("no pointer")

    store = DeltaStore(str(tmp_path))
    with pytest.raises(RuntimeError, match="no pointer"):
        store.save(tiny_state(1), on_saved=fail, blocking=True)
    assert "version 1 is saved, but on_saved failed" in caplog.text
    assert len(store.versions()) == 1
    assert store.save(tiny_state(2), blocking=True) == 2
    store.close()


def test_what_is_lossy_is_said(tmp_path, caplog):
    """The first save logs the precision, and reopening with another one logs a warning."""
    caplog.set_level(logging.INFO)
    weight = torch.randn(50, 50)
    with DeltaStore(str(tmp_path), "fine") as store:
        store.save({"w": weight})
    assert "weights within 0.1 % of their std, first moments within 6 % of their" in caplog.text
    assert not any(record.levelno > logging.INFO for record in caplog.records)
    with DeltaStore.lossless(str(tmp_path)) as store:
        store.save({"w": weight})
    assert "now: everything bit for bit" in caplog.text
    assert 0 < (store.load(1)["w"] - weight).abs().max() <= 0.0011 * weight.std()
    assert torch.equal(store.load(2)["w"], weight)


def test_a_writer_that_slept_through_many_versions_loses_nothing(tmp_path):
    """A suspended writer detects other writers even if its next manifest number was pruned."""
    sleeper = DeltaStore(str(tmp_path))
    sleeper.save(tiny_state(1), blocking=True)
    with DeltaStore(str(tmp_path)) as other:
        for number in range(2, 12):
            other.save(tiny_state(number))
    with pytest.raises(ConcurrentWriter):
        sleeper.save(tiny_state(99), blocking=True)
    assert [store.load()["epoch"] for store in (sleeper, other)] == [11, 11]
    assert sleeper.save(tiny_state(12), blocking=True) == 12
    assert other.verify() == []
    sleeper.close()
