"""The commands for stores of checkpoints, as a user types them."""

import argparse
import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from pcrshard.checkpoint import DeltaStore
from pcrshard.cli import checkpoint
from pcrshard.errors import BrokenChain, VersionUnavailable


def state(number):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(30, 30, generator=generator)
    for _ in range(number):
        weight = weight + torch.randn(30, 30, generator=generator) * 0.01
    return {"w": weight, "b": torch.arange(5)}


@pytest.fixture
def store(tmp_path):
    with DeltaStore(str(tmp_path / "run"), keyframe_every=3) as made:
        for number in range(1, 6):
            made.save(state(number), metrics={"acc": number})
    return made


@pytest.fixture
def run(capsys):
    """Run a command; gives its status and what it printed, as JSON if it is."""
    parser = argparse.ArgumentParser()
    checkpoint.register(parser.add_subparsers(dest="command"))

    def command(*words):
        args = parser.parse_args(["checkpoint", *map(str, words)])
        status = args.run(args)
        text = capsys.readouterr().out
        return status, json.loads(text) if "--json" in words else text

    return command


def test_ls_lists_versions(run, store):
    """With references, sizes and metrics, and the ratio of the whole run."""
    status, text = run("ls", store.url)
    assert status == 0
    assert text.splitlines()[0].split() == [
        "version", "reference", "bytes", "ratio", "saved", "metrics"
    ]  # fmt: skip
    assert "acc=3" in text.splitlines()[3]
    assert text.splitlines()[-1].startswith("5 versions, ")
    _, rows = run("ls", store.url, "--json")
    assert [row["reference"] for row in rows] == [2, 3, None, 5, None]
    assert [row["id"] for row in rows] == [record.id.hex() for record in store.versions()]


def test_ls_of_what_is_no_store_is_an_error(run, store, tmp_path):
    """A lost manifest or a wrong folder does not look like a store without versions."""
    (tmp_path / "run" / "manifest.pcm").unlink()
    for folder in (store.url, tmp_path / "nothing"):
        with pytest.raises(VersionUnavailable, match="pcrshard checkpoint recover"):
            run("ls", folder)
    run("recover", store.url)
    assert run("ls", store.url)[1].splitlines()[-1].startswith("5 versions, ")


def test_show_tells_what_happened_to_each_tensor(run, store):
    """Coder, ratio, and the bound that holds for it."""
    status, text = run("show", store.url, 1)
    assert status == 0
    assert "30x30" in text
    assert "lossless" in text
    _, figures = run("show", store.url, 1, "--json")
    weight, bias = figures["tensors"]
    assert (weight["coder"], weight["bound_kind"], bias["bound_kind"]) == (
        "delta", "linear", "lossless"
    )  # fmt: skip
    error = (store.load(1)["w"] - state(1)["w"]).abs().max()
    assert 0 < error <= weight["error_bound"]


def test_show_measures_and_draws(run, store, tmp_path):
    """With the original: each error as a share of its bound; the figure is a picture."""
    save_file(state(2), tmp_path / "original.safetensors")
    options = ("--original", tmp_path / "original.safetensors", "--figure", tmp_path / "a.png")
    _, figures = run("show", store.url, 2, *options, "--json")
    weight, bias = figures["tensors"]
    assert 0.5 < weight["error"] <= 1
    assert bias["error"] == 0
    _, text = run("show", store.url, 2, *options)
    assert f"{weight['error']:.3f} of bound" in text
    run("show", store.url, 1, "--figure", tmp_path / "b.png")
    contents = []
    for name in ("a.png", "b.png"):
        with Image.open(tmp_path / name) as picture:
            assert picture.size[0] == 1100
            contents.append(picture.tobytes())
    assert contents[0] != contents[1]


def test_verify_finds_damage(run, store, tmp_path):
    """Status 1, and the file is named."""
    assert run("verify", store.url) == (0, "5 versions, 0 problems\n")
    path = tmp_path / "run" / store.versions()[2].file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    status, figures = run("verify", store.url, "--json")
    assert status == 1
    assert len(figures["problems"]) == 3
    assert path.name in figures["problems"][0]
    assert run("verify", store.url, 5) == (0, "1 versions, 0 problems\n")


def test_export_writes_safetensors(run, store, tmp_path):
    """The version that was asked for."""
    status, figures = run("export", store.url, 2, tmp_path / "v.safetensors", "--json")
    assert status == 0
    assert figures["file_bytes"] == (tmp_path / "v.safetensors").stat().st_size
    assert torch.equal(load_file(tmp_path / "v.safetensors")["w"], store.load(2)["w"])


@pytest.mark.parametrize(
    ("options", "kept"),
    [(["--keep", 1, 4], [1, 4]), (["--keep-every", 2], [2, 4, 5]), (["--keep-last", 2], [4, 5])],
)
def test_compact_removes_the_other_versions(run, store, options, kept):
    """Those that stay are as they were."""
    before = {record.number: record.id for record in store.versions()}
    status, figures = run("compact", store.url, *options, "--json")
    assert status == 0
    assert figures["versions"] == len(kept)
    assert {r.number: r.id for r in store.versions()} == {n: before[n] for n in kept}


def test_rebase_writes_the_deltas_in_another_order(run, store):
    """No version changes."""
    before = [record.id for record in store.versions()]
    status, figures = run("rebase", store.url, "--order", "hop", "--keyframe-every", 5, "--json")
    assert status == 0
    records = DeltaStore(store.url).versions()
    assert [record.id for record in records] == before
    assert [record.parent for record in records] == [None, 1, 1, 1, 1]
    assert figures["bytes"] == sum(record.file_bytes for record in records)


def test_recover_writes_a_lost_manifest(run, store, tmp_path):
    """The versions are those that were there; files that are of no use are named."""
    (tmp_path / "run" / "manifest.pcm").unlink()
    (tmp_path / "run" / "000001-00000000.pcd").write_bytes(b"x")
    status, figures = run("recover", store.url, "--json")
    assert status == 0
    assert figures["versions"] == [1, 2, 3, 4, 5]
    assert list(figures["unused_files"]) == ["000001-00000000.pcd"]
    assert run("verify", store.url)[0] == 0
    with pytest.raises(ValueError, match="nothing to recover"):
        run("recover", store.url)


def test_a_release_travels_as_a_patch(run, store, tmp_path):
    """The receiver gets exactly the new version; a stranger is refused."""
    other = DeltaStore(str(tmp_path / "client"))
    other.append(store.read(3))
    status, figures = run("diff", store.url, 3, 5, tmp_path / "p", "--json")
    assert status == 0
    assert figures["file_bytes"] == (tmp_path / "p").stat().st_size
    _, made = run("patch", other.url, tmp_path / "p", "--json")
    assert made == {"version": 2, "id": figures["new"]}
    assert torch.equal(DeltaStore(other.url).load()["w"], store.load(5)["w"])
    with pytest.raises(BrokenChain):
        run("patch", tmp_path / "stranger", tmp_path / "p")
