"""Sharded states that two ranks save load on one rank and on four."""

import os
import pathlib
import pickle
import pickletools

import pytest
import servers
import torch
import torch.distributed.checkpoint as dcp
from support import run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils._pytree import tree_map_only

from pcrshard.checkpoint import DeltaStore
from pcrshard.errors import CorruptCheckpoint, VersionUnavailable
from pcrshard.integrations.distributed_checkpoint import DeltaStorageReader, DeltaStorageWriter

pytestmark = pytest.mark.filterwarnings("ignore")

RANKS = pathlib.Path(__file__).with_name("distributed_ranks.py")


def digests(what, folder, world):
    """Run the ranks, and return the digests that rank 0 prints."""
    said = run_ranks(RANKS, what, folder, ranks=world)
    return [line for line in said.splitlines() if line.startswith("digest")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder and the digests of two versions that two ranks saved with FSDP."""
    folder = tmp_path_factory.mktemp("dcp")
    return folder, digests("save", folder, 2)


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.long)])
def test_shards_of_two_ranks_are_loaded_on_other_numbers(saved, world):
    """Parameters and plain values load bit for bit in both versions."""
    folder, expected = saved
    assert len(set(expected)) == 2
    assert digests("load", folder, world) == expected


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


def step_of(folder, version=-1, **how):
    target = {"step": 0}
    dcp.load(target, storage_reader=DeltaStorageReader(folder, version), no_dist=True, **how)
    return target["step"]


def save_steps(folder, steps, name="step-{}"):
    writer = DeltaStorageWriter(folder, keyframe_every=2)
    for step in steps:
        state = {"w": torch.full((20, 20), float(step)), "step": step}
        dcp.save(state, storage_writer=writer, checkpoint_id=name.format(step), no_dist=True)
    return writer


def test_a_checkpoint_id_is_a_version(tmp_path):
    """``checkpoint_id`` loads the version saved under it, an unknown id is refused with those that
    exist, and an id counts for one save or load only.
    """
    writer = save_steps(tmp_path, (100, 200, 300))
    assert [step_of(tmp_path, checkpoint_id=f"step-{n}00") for n in (1, 2, 3)] == [100, 200, 300]
    known = r"\['step-100', 'step-200', 'step-300'\], got 'step-400'"
    with pytest.raises(CheckpointException, match=known):
        step_of(tmp_path, checkpoint_id="step-400")
    dcp.save({"step": 350}, storage_writer=writer, no_dist=True)
    assert writer.versions()[-1].metrics == {}
    save_steps(tmp_path, (100,), "step-200")  # again, with another content
    assert step_of(tmp_path, checkpoint_id="step-200") == 100
    reader = DeltaStorageReader(tmp_path, 4)
    target = {"step": 0}
    with pytest.raises(CheckpointException, match="got '"):
        dcp.load(target, storage_reader=reader, checkpoint_id=tmp_path, no_dist=True)
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert target["step"] == 350
    with pytest.raises(ValueError, match="share one index"):
        reader.read_metadata(rank=1)


def test_checkpoints_are_pruned_in_all_stores(tmp_path):
    """``delete`` keeps what is named by number or id in the index and the ranks; what is kept loads
    as before, and training goes on.
    """
    writer = save_steps(tmp_path, range(1, 7))
    other = DeltaStorageWriter(tmp_path)  # of another process, which has the store open
    dcp.save({"step": 7}, storage_writer=other, no_dist=True)
    with pytest.raises(VersionUnavailable, match="got 'step-9'"):
        writer.delete(keep=["step-9"])
    writer.delete(keep=["step-2", "step-4", -1])
    assert [record.number for record in writer.versions()] == [2, 4, 7]
    for name in ("index", "rank-00000"):
        store = DeltaStore(tmp_path / name)
        assert len(store.versions()) == 3
        assert store.verify() == []
    assert [step_of(tmp_path, n) for n in (2, 4, 7)] == [2, 4, 7]
    dcp.save({"step": 8}, storage_writer=other, checkpoint_id="last", no_dist=True)
    assert step_of(tmp_path) == 8
    ids = [record.metrics.get("checkpoint_id") for record in writer.versions()]
    assert ids == ["step-2", "step-4", None, "last"]
    with pytest.raises(VersionUnavailable, match="stores of several ranks"):
        DeltaStore(tmp_path).load()


def test_asynchronous_saves_are_versions(tmp_path):
    """``async_save`` by a thread, with a state that changes meanwhile."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    try:
        writer = DeltaStorageWriter(tmp_path / "dcp")
        weight = torch.zeros(30, 30)
        for step in range(3):
            weight.fill_(step)
            saved = dcp.async_save(
                {"w": weight, "step": step}, storage_writer=writer, checkpoint_id=f"s{step}"
            )
            weight.fill_(-1)
            saved.result()
        for step in range(3):
            target = {"w": weight.clone(), "step": -1}
            reader = DeltaStorageReader(tmp_path / "dcp")
            dcp.load(target, storage_reader=reader, checkpoint_id=f"s{step}")
            assert (target["step"], target["w"].unique().tolist()) == (step, [step])
    finally:
        torch.distributed.destroy_process_group()


def test_a_writer_travels_to_another_process(tmp_path):
    """What ``async_save`` by a process sends: a pickled writer adds versions to the same folder."""
    writer = save_steps(tmp_path, (1,))
    other = pickle.loads(pickle.dumps(writer))
    dcp.save({"step": 2}, storage_writer=other, no_dist=True)
    assert [step_of(tmp_path, n) for n in (1, 2)] == [1, 2]


def test_unusual_plans_are_saved(tmp_path):
    """A state that is not flattened, sizes as values, and a part of a state load as saved; one that
    has no form in a store names its key.
    """
    state = {"model": {"w": torch.ones(4, 4)}, "size": torch.Size([2, 3]), "step": 3}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    writer = DeltaStorageWriter(tmp_path)
    dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    dcp.save(state, storage_writer=writer, no_dist=True)
    target = {"size": None, "step": 0}
    dcp.load(target, storage_reader=DeltaStorageReader(tmp_path), no_dist=True)
    assert (type(target["size"]), target) == (torch.Size, {"size": (2, 3), "step": 3})
    whole = DeltaStore(tmp_path / "rank-00000").load(1)["object"]
    assert torch.equal(whole["model"]["w"], state["model"]["w"])
    with pytest.raises(CheckpointException, match=r"cannot store a builtins\.set.*key=object\.a"):
        dcp.save({"a": {1}}, storage_writer=writer, no_dist=True)
