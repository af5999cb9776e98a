"""Other tools read an exported version."""

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from states import bits, tiny_state

from pcrshard.checkpoint import DeltaStore


def test_an_exported_version_is_read_by_safetensors(tmp_path):
    """All tensors under their paths, tied ones once; the id is in the metadata."""
    state = tiny_state(1) | {
        "tied": None,
        "half": torch.ones(3).bfloat16(),
        "empty": torch.empty(0),
    }
    state["tied"] = state["model"]["w"]
    with DeltaStore(str(tmp_path / "store")) as store:
        store.save(state)
        path = tmp_path / "v.safetensors"
        assert store.export(1, str(path)) == path.stat().st_size
        loaded = store.load(1)
    tensors = load_file(path)
    names = {"model.w", "model.b", "opt.state.0.exp_avg_sq", "half", "empty"}
    assert tensors.keys() == names
    assert bits(tensors["model.w"]) == bits(loaded["model"]["w"])
    assert tensors["half"].dtype == torch.bfloat16
    with safe_open(path, "pt") as file:
        assert file.metadata()["pcrshard_id"] == store.versions()[0].id.hex()
