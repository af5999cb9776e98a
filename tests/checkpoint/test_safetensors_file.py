"""Other tools can read an exported version."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from states import same

from pcrshard.checkpoint import DeltaStore, export_safetensors
from pcrshard.errors import UnsupportedState


def test_an_exported_version_is_read_by_safetensors(tmp_path):
    """All tensors under all their paths, or those of a model as its ``state_dict`` names them."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    weights = dict(sorted(model.state_dict().items()))
    expected = {f"model.{name}": tensor for name, tensor in weights.items()}
    others = {"empty": torch.empty(0), "half": torch.ones(3).bfloat16()}
    state = others | {"model": model.state_dict(), "epoch": 1, "list": [torch.ones(2).numpy()]}
    expected |= others | {"list.0": torch.ones(2)}
    path = tmp_path / "v.safetensors"
    with DeltaStore(tmp_path / "store") as store:
        store.save(state)
        assert export_safetensors(store, 1, str(path)) == path.stat().st_size
        with safe_open(path, "pt") as file:
            assert file.metadata()["pcrshard_id"] == store.versions()[0].id.hex()
            assert file.metadata()["format"] == "pt", "transformers asks for it"
        assert same(dict(sorted(load_file(path).items())), dict(sorted(expected.items())))
        export_safetensors(store, -1, str(path), names=["model"])
        assert same(dict(sorted(load_file(path).items())), weights)
        with pytest.raises(ValueError, match=r"expected a name like .*got 'model\.pt'"):
            export_safetensors(store, -1, str(tmp_path / "model.pt"))
        store.save({"model": weights, "ema": weights, "c": torch.ones(1).to(torch.complex128)})
        with pytest.raises(ValueError, match=r"several tensors .* 0\.bias"):
            export_safetensors(store, -1, str(path), names=["model", "ema"])
        with pytest.raises(UnsupportedState, match=r"no complex128 .*key=c"):
            export_safetensors(store, -1, str(path), names=["c"])
