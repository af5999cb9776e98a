"""What a user relies on: every version can be loaded as it was saved, within the bound."""

import logging
import threading
import time

import numpy as np
import pytest
import torch
from states import bits, same, tiny_state

from pcrshard.checkpoint import DeltaStore
from pcrshard.checkpoint.store import Background
from pcrshard.errorbound import PointwiseRelative, RelativeStd
from pcrshard.errors import StorageError, UnsupportedState, VersionUnavailable

ORDERS = ["backward", "forward", "hop"]


def saved(url, count=6, **options):
    with DeltaStore(str(url), keyframe_every=4, **options) as store:
        for number in range(1, count + 1):
            store.save(tiny_state(number), metrics={"acc": number / 10})
    return DeltaStore(str(url))


@pytest.mark.parametrize("url", ["", "memory://checkpoints-lossless"])
@pytest.mark.parametrize("order", ORDERS)
def test_lossless_versions_come_back_bit_for_bit(tmp_path, url, order):
    """All of them, on local disk and in an object store."""
    options = {"bound": None, "optimizer_bound": None, "second_moment_bound": None}
    store = saved(f"{url or tmp_path}/{order}", order=order, **options)
    for number in range(1, 7):
        assert same(store.load(number), tiny_state(number))
    assert same(store.load(), tiny_state(6))
    assert store.verify() == []


def test_bounds_hold_for_weights_and_moments(tmp_path):
    """0.5 % of the deviation for weights, 30 % of each value for second moments, rest exact."""
    store = saved(tmp_path)
    for number in range(1, 7):
        exact = tiny_state(number)
        loaded = store.load(number)
        weight = exact["model"]["w"]
        error = (loaded["model"]["w"] - weight).abs().max()
        assert 0 < error <= 1.1 * 0.005 * weight.std()
        moment = exact["opt"]["state"][0]["exp_avg_sq"]
        share = (loaded["opt"]["state"][0]["exp_avg_sq"] / moment - 1).abs().max()
        assert 0 < share <= 0.3
        assert torch.equal(loaded["model"]["b"], exact["model"]["b"])
        assert loaded["opt"]["param_groups"] == exact["opt"]["param_groups"]


def test_all_orders_restore_the_same_bits():
    """Forward = backward = hop, whatever the rhythm of keyframes, also after reopening."""
    loaded = []
    for order in ORDERS:
        for every in (1, 3, 100):
            url = f"memory://same-bits/{order}-{every}"
            for number in range(1, 6):
                with DeltaStore(url, order=order, keyframe_every=every) as store:
                    store.save(tiny_state(number))
            loaded.append([DeltaStore(url).load(number) for number in range(1, 6)])
    assert all(same(each, loaded[0]) for each in loaded)


@pytest.mark.parametrize("order", ORDERS)
def test_after_a_hundred_links_the_error_is_that_of_one(order):
    """No drift: the last of a hundred versions is as near as the first one."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 32, generator=generator) * 0.02
    bound = RelativeStd(0.05)
    exact = []
    url = f"memory://hundred-links/{order}"
    with DeltaStore(url, bound=bound, order=order, keyframe_every=1000) as store:
        for _ in range(100):
            weight = weight + torch.randn(32, 32, generator=generator) * 1e-4
            exact.append(weight)
            store.save({"w": weight})
    loaded = [store.load(number)["w"] for number in (1, 50, 100)]
    for i, tensor in zip((0, 49, 99), loaded, strict=True):
        error = (tensor.double() - exact[i].double()).abs().max()
        held = store.read(i + 1).tensors["w"]
        assert error <= held.lattice.error_bound


def test_named_tensors_are_loaded_alone(tmp_path):
    """With their checksums; unknown names are an error."""
    store = saved(tmp_path)
    whole = store.load(2)
    some = store.load(2, names=["model.w", "model.b"])
    assert list(some) == ["model.w", "model.b"]
    assert bits(some["model.w"]) == bits(whole["model"]["w"])
    some["model.b"].zero_()
    assert store.load(2, names=["model.b"])["model.b"].abs().sum() > 0
    with pytest.raises(VersionUnavailable, match=r"no such tensor.*key=model\.nothing"):
        store.load(2, names=["model.nothing"])


def test_tensors_go_where_they_are_asked_to(tmp_path):
    """The meta device stands for any other one on a machine without accelerator."""
    store = saved(tmp_path)
    assert store.load(1, map_location="meta")["model"]["w"].is_meta
    assert store.load(1, names=["model.w"], map_location="meta")["model.w"].is_meta


def test_the_list_of_versions_tells_sizes_and_metrics(tmp_path):
    """Oldest first."""
    versions = saved(tmp_path).versions()
    assert [record.number for record in versions] == [1, 2, 3, 4, 5, 6]
    assert [record.metrics["acc"] for record in versions] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert all(record.raw_bytes == 2 * 24 * 16 * 4 + 16 for record in versions)
    assert DeltaStore(str(tmp_path / "nothing")).versions() == []


def test_a_version_that_is_not_there_is_named(tmp_path):
    """Also in an empty store, and without a store."""
    with pytest.raises(VersionUnavailable, match="got 77"):
        saved(tmp_path).load(77)
    with pytest.raises(VersionUnavailable, match="there is none"):
        DeltaStore(str(tmp_path / "nothing")).load()


def test_training_goes_on_while_a_version_is_written(tmp_path):
    """save returns after the copy: a change that comes later is not in the version."""
    state = tiny_state(1)
    with DeltaStore(str(tmp_path), bound=None) as store:
        gate = threading.Event()
        store._background.submit(lambda: gate.wait(10))
        threading.Timer(0.2, gate.set).start()
        start = time.monotonic()
        number = store.save(state)
        assert time.monotonic() - start < 5
        state["model"]["w"].zero_()
        state["opt"]["param_groups"][0]["lr"] = None
        loaded = store.load(number)
    assert bits(loaded["model"]["w"]) == bits(tiny_state(1)["model"]["w"])
    assert loaded["opt"]["param_groups"] == tiny_state(1)["opt"]["param_groups"]


def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path):
    """And the number that was not used is given again."""
    store = DeltaStore(str(tmp_path / "file" / "store"))
    (tmp_path / "file").write_text("not a folder")
    store.save(tiny_state(1))
    with pytest.raises(StorageError):
        store.wait()
    (tmp_path / "file").unlink()
    assert store.save(tiny_state(1), blocking=True) == 1
    store.close()


def test_keys_come_and_go(tmp_path):
    """A version has exactly the keys that it was saved with, whatever the others have."""
    states = [
        {"a": torch.randn(20, 20), "b": torch.randn(20, 20)},
        {"a": torch.randn(20, 20), "c": torch.randn(20, 20).double()},
        {"c": torch.randn(20, 20), "a": torch.randn(10, 40)},
        {},
    ]
    for order in ORDERS:
        with DeltaStore(str(tmp_path / order), order=order) as store:
            numbers = [store.save(state) for state in states]
        for number, state in zip(numbers, states, strict=True):
            loaded = store.load(number)
            assert list(loaded) == list(state)
            for key, tensor in state.items():
                assert loaded[key].dtype == tensor.dtype
                assert torch.allclose(loaded[key], tensor, atol=0.02)


def test_a_changed_bound_starts_the_tensors_again(tmp_path):
    """A store that is opened with a finer bound keeps to it from then on."""
    weight = torch.randn(50, 50)
    for fraction in (0.1, 0.001):
        with DeltaStore(str(tmp_path), bound=RelativeStd(fraction)) as store:
            store.save({"w": weight})
    coarse = (store.load(1)["w"] - weight).abs().max() / weight.std()
    fine = (store.load(2)["w"] - weight).abs().max() / weight.std()
    assert fine <= 0.0011 < coarse <= 0.11


def test_paths_can_be_kept_exact(tmp_path):
    """Patterns of paths, for tables that must not change by a bit."""
    state = {"emb": {"w": torch.randn(30, 30)}, "w": torch.randn(30, 30)}
    with DeltaStore(str(tmp_path), exact=["emb.*"]) as store:
        store.save(state)
    loaded = store.load()
    assert torch.equal(loaded["emb"]["w"], state["emb"]["w"])
    assert not torch.equal(loaded["w"], state["w"])


def test_settings_of_a_store_do_not_change_by_opening_it(tmp_path):
    """Another order is asked for by rebase."""
    saved(tmp_path, order="forward")
    assert DeltaStore(str(tmp_path)).order == "forward"
    for wrong in ({"order": "hop"}, {"keyframe_every": 5}):
        with pytest.raises(ValueError, match=r"see DeltaStore\.rebase"):
            DeltaStore(str(tmp_path), **wrong)
    for wrong in ({"order": "sideways"}, {"keyframe_every": 0}):
        with pytest.raises(ValueError, match="expected"):
            DeltaStore(str(tmp_path / "new"), **wrong)


def test_what_cannot_be_stored_is_refused_by_save_itself(tmp_path):
    """Before anything is written; also metrics that are not plain."""
    with DeltaStore(str(tmp_path)) as store:
        with pytest.raises(UnsupportedState, match=r"builtins\.set.*key=a\.b"):
            store.save({"a": {"b": {1}}})
        with pytest.raises(ValueError, match="metrics of plain numbers"):
            store.save({}, metrics={"a": np.float64})
        assert store.save({"a": 1}, blocking=True) == 1


def test_a_version_moves_to_another_store_exactly(tmp_path):
    """Codes and lattices move, not values that are quantised again."""
    store = saved(tmp_path / "a")
    with DeltaStore(str(tmp_path / "b"), order="forward") as other:
        assert [other.append(store.read(number)) for number in (2, 5)] == [1, 2]
        assert same(other.load(1), store.load(2))
        assert [record.id for record in other.versions()] == [
            store.versions()[1].id,
            store.versions()[4].id,
        ]


def test_threads_restore_the_same(tmp_path):
    """By one thread or three."""
    store = saved(tmp_path, second_moment_bound=PointwiseRelative(0.05), workers=3)
    several = DeltaStore(str(tmp_path), workers=3)
    assert same(store.load(2), several.load(2))
    assert several.verify() == []


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(tmp_path):
    """Losslessly: the losses of the next steps are equal, bit for bit."""

    def start():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(20, 20), torch.nn.ReLU(), torch.nn.Linear(20, 2)
        )
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def steps(model, optimizer, count):
        losses = []
        for _ in range(count):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 20)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = start()
    steps(model, optimizer, 3)
    options = {"bound": None, "optimizer_bound": None, "second_moment_bound": None}
    with DeltaStore(str(tmp_path), **options) as store:
        store.save(
            {"m": model.state_dict(), "o": optimizer.state_dict(), "r": torch.get_rng_state()}
        )
        expected = steps(model, optimizer, 3)
    model, optimizer = start()
    state = DeltaStore(str(tmp_path)).load()
    model.load_state_dict(state["m"])
    optimizer.load_state_dict(state["o"])
    torch.set_rng_state(state["r"])
    assert steps(model, optimizer, 3) == expected


def test_work_is_done_in_order_and_not_by_the_caller():
    """Two pieces; the second one waits for the first."""
    done = []
    background = Background()
    gate = threading.Event()
    background.submit(lambda: (gate.wait(10), done.append(threading.current_thread().name)))
    assert done == []
    gate.set()
    background.submit(lambda: done.append("second"))
    background.close()
    assert done[0].startswith("pcrshard-checkpoint")
    assert done[1] == "second"


def test_an_error_is_logged_and_raised_once(caplog):
    """By the next call, whichever it is."""

    def fail():
        raise OSError("full")

    background = Background()
    with caplog.at_level(logging.ERROR):
        background.submit(fail)
        with pytest.raises(OSError, match="full"):
            background.wait()
    assert "a checkpoint was not saved" in caplog.text
    background.wait()
    background.submit(fail)
    with pytest.raises(OSError, match="full"):
        background.submit(lambda: None)
    background.close()
