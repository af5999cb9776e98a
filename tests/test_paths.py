"""Local folders are given as strings or as paths."""

import torch

import pcrshard
from pcrshard.checkpoint import pull
from pcrshard.testing import make_jpeg
from pcrshard.weightsync import WeightMirror, WeightPublisher


def test_folders_may_be_paths(tmp_path):
    """Every way in takes a ``pathlib.Path``, as torch.save does."""
    with pcrshard.ShardWriter(tmp_path / "shards") as writer:
        writer.write({"__key__": "a", "jpg": make_jpeg(1, 16, 16), "cls": 0})
    pcrshard.stage(tmp_path / "shards", tmp_path / "staged", 2)
    dataset = pcrshard.PCRDataset(tmp_path / "staged", scan=2, cache_dir=tmp_path / "cache")
    assert dataset[0]["cls"] == 0
    weights = {"weight": torch.ones(3)}
    with pcrshard.DeltaStore(tmp_path / "store") as store:
        store.save(weights)
    assert pull(tmp_path / "store", pcrshard.DeltaStore(tmp_path / "copy")).added == (1,)
    WeightPublisher(tmp_path / "steps").publish(weights)
    assert WeightMirror(tmp_path / "steps", tmp_path / "mirror").wait() == 1
