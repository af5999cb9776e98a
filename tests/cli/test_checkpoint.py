"""The commands for stores of checkpoints, as a user types them."""

import pathlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support import damage

from pcrshard.checkpoint import DeltaStore
from pcrshard.integrations.distributed_checkpoint import DeltaStorageWriter


def state(number):
    generator = torch.Generator().manual_seed(number)
    weight = torch.arange(900.0).view(30, 30) + torch.randn(30, 30, generator=generator)
    return {"weight": weight, "b": torch.arange(5)}


@pytest.fixture
def store(tmp_path):
    with DeltaStore(tmp_path / "run", "balanced", keyframe_every=3) as made:
        for number in range(1, 6):
            made.save(state(number), metrics={"acc": number})
    return made


@pytest.fixture
def run(cli):
    """Return a function that runs a command and returns its status and output."""
    return lambda *words: cli("checkpoint", *words)[:2]


@pytest.fixture
def refused(fails):
    """Return a function that checks that a command fails with one line containing these words."""
    return lambda *args, words: fails("checkpoint", *args, words=words)


def damage_first(store):
    """Flip a bit of the first version's file, and return its path."""
    path = pathlib.Path(store.url, store.versions()[0].file)
    damage(path)
    return path


def test_ls_lists_versions(run, store):
    """``ls`` prints references, sizes and metrics of the versions, and the sizes of the run."""
    status, text = run("ls", store.url)
    assert status == 0
    listed = text.partition("\nversions:\n")[2].splitlines()
    assert listed[0].startswith("number  parent")
    assert "acc=3" in listed[3]
    _, figures = run("ls", store.url, "--json")
    assert [row["parent"] for row in figures["versions"]] == [None, 1, 2, None, 4]
    assert figures["file_bytes"] == sum(record.file_bytes for record in store.versions())


def test_show_tells_what_happened_to_each_tensor(run, store):
    """``show`` prints each tensor's coder, sizes, and error bound."""
    status, text = run("show", store.url, 1)
    assert status == 0
    assert "30, 30" in text
    assert "lossless" in text
    _, figures = run("show", store.url, 2, "--json")
    weight, bias = figures["tensors"]
    assert (weight["coder"], weight["bound_kind"], bias["bound_kind"]) == (
        "delta", "linear", "lossless"
    )  # fmt: skip
    error = (store.load(2)["weight"] - state(2)["weight"]).abs().max()
    assert 0 < error <= weight["error_bound"]


def test_verify_finds_damage(run, store):
    """``verify`` exits with status 1 and names the damaged file."""
    assert run("verify", store.url) == (0, "versions: 5\nproblems: 0\n")
    path = damage_first(store)
    status, figures = run("verify", store.url, "--json")
    assert status == 1
    assert len(figures["problems"]) == 3
    assert path.name in figures["problems"][0]


def test_export_writes_safetensors(run, store, tmp_path):
    """``export`` writes the requested version."""
    status, figures = run("export", store.url, 2, tmp_path / "v.safetensors", "--json")
    assert status == 0
    assert figures["file_bytes"] == (tmp_path / "v.safetensors").stat().st_size
    assert torch.equal(load_file(tmp_path / "v.safetensors")["weight"], store.load(2)["weight"])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--keep", 1, 4], [1, 4]),
        (["--keep-every", 2], [2, 4, 5]),
        (["--keep-last", 2], [4, 5]),
        (["--keep", 1, "--keep-last", 2], [1, 4, 5]),
    ],
)
def test_delete_removes_the_other_versions(run, store, options, kept):
    """Deleting versions leaves the remaining ones unchanged."""
    before = {record.number: record.id for record in store.versions()}
    status, figures = run("delete", store.url, *options, "--json")
    assert status == 0
    assert figures["versions"] == len(kept)
    assert {r.number: r.id for r in store.versions()} == {n: before[n] for n in kept}


def test_recover_writes_a_lost_manifest(run, refused, store, tmp_path):
    """``ls`` of a store without manifests names ``recover``, which restores all its versions."""
    for path in (tmp_path / "run").glob("manifest*"):
        path.unlink()
    for folder in (store.url, tmp_path / "nothing"):
        refused("ls", folder, words=["pcrshard checkpoint recover"])
    (tmp_path / "run" / "000001-0000000000000000.pcd").write_bytes(b"x")
    status, figures = run("recover", store.url, "--json")
    assert status == 0
    assert figures["versions"] == [1, 2, 3, 4, 5]
    assert list(figures["unused_files"]) == ["000001-0000000000000000.pcd"]
    assert run("verify", store.url) == (0, "versions: 5\nproblems: 0\n")
    refused("recover", store.url, words=["nothing to recover"])


def test_versions_are_pulled(run, store, tmp_path):
    """``pull`` fills a new store, and transfers nothing if the version is already there."""
    status, figures = run("pull", store.url, tmp_path / "client", "--version", 2, "--json")
    assert (status, figures["version"], figures["added_versions"]) == (0, 2, [1, 2])
    run("pull", store.url, tmp_path / "client")
    client = DeltaStore(tmp_path / "client")
    assert torch.equal(client.load()["weight"], store.load()["weight"])
    assert run("pull", store.url, client.url, "--json")[1]["moved_bytes"] == 0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_ls_lists_distributed_checkpoints(run, refused, tmp_path):
    """``ls`` of the folder of all ranks lists ids; other commands say to name a store in it."""
    writer = DeltaStorageWriter(tmp_path)
    for step in (1, 2):
        dcp.save({"w": torch.ones(9)}, storage_writer=writer, checkpoint_id=step, no_dist=True)
    status, found = run("ls", tmp_path, "--json")
    assert status == 0
    assert [row["checkpoint_id"] for row in found["versions"]] == ["1", "2"]
    assert (found["ranks"], found["raw_bytes"]) == (1, 72)
    assert "checkpoint id" in run("ls", tmp_path)[1]
    for more in (("verify",), ("export", 1, tmp_path / "a.safetensors")):
        refused(more[0], tmp_path, *more[1:], words=["stores of several ranks"])


def test_terminals_obey_nothing_in_a_store(run, refused, tmp_path):
    """Control characters in names and metrics are printed escaped."""
    with DeltaStore(tmp_path / "evil") as store:
        store.save({"\x1b]0;title\x07": torch.ones(3)}, metrics={"a\x1b[31m": "\r\u202eb"})
    for words in (("ls",), ("show", 1)):
        _, text = run(words[0], store.url, *words[1:])
        assert all(char.isprintable() or char == "\n" for char in text)
        assert "\\x1b" in text
    damage_first(store)
    refused("export", store.url, 1, tmp_path / "a.safetensors", words=["\\x1b"])
