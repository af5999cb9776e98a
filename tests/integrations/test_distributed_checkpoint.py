"""Sharded states that two ranks save load on one rank and on four."""

import os
import pathlib
import pickletools

import pytest
import servers
import torch
import torch.distributed.checkpoint as dcp
from support import torchrun
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils._pytree import tree_map_only

from pcrshard.checkpoint import DeltaStore
from pcrshard.errors import CorruptCheckpoint
from pcrshard.integrations.distributed_checkpoint import DeltaStorageReader, DeltaStorageWriter

pytestmark = pytest.mark.filterwarnings("ignore")

RANKS = pathlib.Path(__file__).with_name("distributed_ranks.py")


def run_ranks(what, folder, world):
    """Run the ranks, and return the digests that rank 0 prints."""
    said = torchrun(RANKS, what, folder, ranks=world)
    return [line for line in said.splitlines() if line.startswith("digest")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder and the digests of two versions that two ranks saved with FSDP."""
    folder = tmp_path_factory.mktemp("dcp")
    return folder, run_ranks("save", folder, 2)


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.long)])
def test_shards_of_two_ranks_are_loaded_on_other_numbers(saved, world):
    """Parameters and plain values load bit for bit in both versions."""
    folder, digests = saved
    assert len(set(digests)) == 2
    assert run_ranks("load", folder, world) == digests


def test_ranks_keep_deltas(saved):
    """Each rank has a sound store of its own, with deltas."""
    folder, _ = saved
    assert sorted(os.listdir(folder)) == ["index", "rank-00000", "rank-00001"]
    for name in os.listdir(folder):
        store = DeltaStore(folder / name)
        assert [record.number for record in store.versions()] == [1, 2]
        assert store.verify() == []
    assert [record.parent for record in store.versions()] == [None, 1]


def test_nothing_is_pickled(saved):
    """No file begins with a pickle."""
    folder, _ = saved
    for path in folder.rglob("*.pc*"):
        with pytest.raises(ValueError, match="opcode"):
            list(pickletools.genops(path.read_bytes()))


def test_an_index_that_is_none_is_refused(tmp_path):
    """A store of something else in place of the index raises CorruptCheckpoint."""
    with DeltaStore(tmp_path / "index") as store:
        store.save({"entries": {"w": {"dtype": "save"}}, "planner": None})
    with pytest.raises(CorruptCheckpoint, match="not an index"):
        DeltaStorageReader(tmp_path).read_metadata()


def test_tied_weights_load_under_each_name():
    """A single process restores a model with tied weights under all of their names, from S3."""
    weight = torch.randn(20, 20)
    names = ("emb.weight", "head.weight")
    target = {"model": {name: torch.zeros(20, 20) for name in names}}
    with servers.s3() as server:
        url, options = server.url("dcp"), server.storage_options
        writer = DeltaStorageWriter(url, precision="lossless", options=options)
        dcp.save({"model": dict.fromkeys(names, weight)}, storage_writer=writer)
        dcp.load(target, storage_reader=DeltaStorageReader(url, options=options))
    assert all(torch.equal(tensor, weight) for tensor in target["model"].values())


@pytest.mark.parametrize("master", [False, True])
def test_unknown_optimizer_state_is_exact(tmp_path, master):
    """AdamW's moments are within their bound; master weights beside them are bit for bit."""
    model = torch.nn.Linear(30, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 30)).square().mean().backward()
    optimizer.step()
    if master:
        for group in optimizer.param_groups:
            group["master_weights"] = True
        for parameter in model.parameters():
            optimizer.state[parameter]["master"] = parameter.detach() + 1e-7
    weights, moments = get_state_dict(model, optimizer)
    writer = DeltaStorageWriter(tmp_path, precision="balanced")
    dcp.save({"model": weights, "optim": moments}, storage_writer=writer)
    target = {"optim": tree_map_only(torch.Tensor, torch.zeros_like, moments)}
    dcp.load(target, storage_reader=DeltaStorageReader(tmp_path))
    for name, tensor in moments["state"]["weight"].items():
        equal = torch.equal(target["optim"]["state"]["weight"][name], tensor)
        assert equal == (master or name == "step"), name
