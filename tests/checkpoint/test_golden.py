"""Stores written by earlier versions of the package can still be read."""

import shutil

import pytest
import torch
from golden_states import store_states
from states import same
from support import ROOT

from pcrshard.checkpoint import DeltaStore

GOLDEN = ROOT / "tests" / "golden" / "checkpoints-2"


@pytest.mark.parametrize("name", ["balanced", "lossless"])
def test_old_stores_are_read_and_extended(tmp_path, name):
    """Every version of an old store loads as it was saved, and a new version can be added."""
    url = str(shutil.copytree(GOLDEN / name, tmp_path / name))
    with DeltaStore(url, name, keyframe_every=3) as store:
        assert store.save(store_states(6), blocking=True) == 6
        assert store.verify() == []
        assert store.versions()[-1].parent == 5
        for number in range(1, 7):
            state, expected = store.load(number), store_states(number)
            exact = {"ids", "array", "scalar", "values", "same", "empty"}
            assert all(same(state[key], expected[key]) for key in exact)
            assert same(state, expected) == (name == "lossless")
            assert state["tied"].data_ptr() == state["model"]["w"].data_ptr()
            assert torch.equal(state["view"], state["tied"][3:7].t())
