"""Sharded states of two ranks are saved, and loaded on one, two and four."""

import os
import pathlib
import pickletools
import socket
import subprocess
import sys

import pytest

from pcrshard.checkpoint import DeltaStore
from pcrshard.errors import CorruptCheckpoint
from pcrshard.integrations.distributed_checkpoint import DeltaStorageReader

HERE = pathlib.Path(__file__).parent


def run_ranks(what, folder, world):
    """Start the ranks; gives the digests that rank 0 printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(HERE.parent.parent), "PYTHONWARNINGS": "ignore"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "distributed_ranks.py"), what, str(folder), str(rank),
             str(world), str(port)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(world)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=200) for rank in ranks]
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors[-3000:]
    return [line for line in outputs[0][0].splitlines() if line.startswith("digest")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, digests) of three versions that two ranks of FSDP saved."""
    folder = tmp_path_factory.mktemp("dcp")
    return folder, run_ranks("save", folder, 2)


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.long)])
def test_shards_of_two_ranks_are_loaded_on_other_numbers(saved, world):
    """Parameters are equal bit for bit in all three versions; so are plain values."""
    folder, digests = saved
    assert len(set(digests)) == 3
    assert run_ranks("load", folder, world) == digests


def test_ranks_keep_deltas(saved):
    """Each rank has a store of its own, sound, with references; the index names versions."""
    folder, _ = saved
    assert sorted(os.listdir(folder)) == ["index", "rank-00000", "rank-00001"]
    for name in os.listdir(folder):
        store = DeltaStore(str(folder / name))
        assert [record.number for record in store.versions()] == [1, 2, 3]
        assert store.verify() == []
    assert [record.parent for record in store.versions()] == [2, 3, None]


def test_nothing_is_pickled(saved):
    """No file is a pickle, and none has one at its beginning."""
    folder, _ = saved
    for path in folder.rglob("*.pc*"):
        with pytest.raises(ValueError, match="opcode"):
            list(pickletools.genops(path.read_bytes()))


def test_an_index_that_is_none_is_refused(tmp_path):
    """A store of something else under the index's name."""
    with DeltaStore(str(tmp_path / "index")) as store:
        store.save({"entries": {"w": {"dtype": "save"}}, "planner": None, "places": []})
    with pytest.raises(CorruptCheckpoint, match="not an index"):
        DeltaStorageReader(str(tmp_path)).read_metadata()
