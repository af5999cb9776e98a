"""Stores and streams written by earlier versions of the package can still be read."""

import hashlib
import pathlib
import shutil

import pytest
import torch
from golden_states import store_states
from states import same
from support import ROOT

from pcrshard.checkpoint import DeltaStore
from pcrshard.checkpoint.sync import WeightMirror

GOLDEN = ROOT / "tests" / "golden" / "checkpoints-2"
# Of model.safetensors at step 5; its tensors have every word size.
STREAM_SHA256 = "dfb26b7d63198dd0804167b568660d3d4749138596342d90dc4b3304bb9e615c"


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


@pytest.mark.parametrize("name", ["stream", "slow"])
def test_old_streams_are_mirrored(tmp_path, name):
    """A mirror can follow an old stream from its first step or start at its last keyframe."""
    url = shutil.copytree(GOLDEN / name, tmp_path / name)
    early = WeightMirror(url, tmp_path / "early")
    for number in (1, 5):
        (url / "latest").write_text(str(number))
        assert early.update() == number
    late = WeightMirror(url, tmp_path / "late")
    assert late.update() == 5
    for mirror in (early, late):
        data = pathlib.Path(mirror.path).read_bytes()
        assert hashlib.sha256(data).hexdigest() == STREAM_SHA256
