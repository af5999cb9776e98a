"""Other tools read an exported version."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from states import bits, same, tiny_state

from pcrshard.checkpoint import DeltaStore, export_safetensors


def test_an_exported_version_is_read_by_safetensors(tmp_path):
    """All tensors under all their paths, tied ones too; the id is in the metadata."""
    state = tiny_state(1) | {
        "tied": None,
        "half": torch.ones(3).bfloat16(),
        "empty": torch.empty(0),
    }
    state["tied"] = state["model"]["w"]
    with DeltaStore(str(tmp_path / "store")) as store:
        store.save(state)
        path = tmp_path / "v.safetensors"
        assert export_safetensors(store, 1, str(path)) == path.stat().st_size
        loaded = store.load(1)
    tensors = load_file(path)
    names = {"model.w", "tied", "model.b", "opt.state.0.exp_avg_sq", "half", "empty"}
    assert tensors.keys() == names
    assert bits(tensors["model.w"]) == bits(loaded["model"]["w"])
    assert tensors["half"].dtype == torch.bfloat16
    with safe_open(path, "pt") as file:
        assert file.metadata()["pcrshard_id"] == store.versions()[0].id.hex()


def test_a_model_is_exported_alone(tmp_path):
    """Under the names that its state_dict has, so that load_state_dict takes it; not as .pt."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    path = tmp_path / "model.safetensors"
    with DeltaStore.lossless(str(tmp_path / "store")) as store:
        store.save({"model": model.state_dict(), "x": torch.ones(2)})
        export_safetensors(store, -1, str(path), names=["model"])
        with pytest.raises(ValueError, match=r"expected a name like .*got 'model\.pt'"):
            export_safetensors(store, -1, str(tmp_path / "model.pt"))
    assert same(dict(load_file(path)), dict(sorted(model.state_dict().items())))
