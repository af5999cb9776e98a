"""The commands that read shards and write something else: export, stage, card."""

import shutil

import fsspec
import pytest

from pcrshard import open_dataset


def test_stage_copies_the_difference(dataset, tmp_path, cli):
    """A second stage at a higher scan counts what was there, and copies what was missing."""
    index, _ = open_dataset(dataset)
    two, five = index.prefix_bytes(2), index.prefix_bytes(5)
    for scan, copied, kept in ((2, two, 0), (5, five - two, two)):
        _, figures, _ = cli("stage", dataset, tmp_path, "--scan", scan, "--json")
        counts = {"shards": 4, "samples": 24, "copied_bytes": copied, "kept_bytes": kept}
        assert figures == {"scan": scan} | counts
    assert "copied bytes: 0 B" in cli("stage", dataset, tmp_path, "--scan", "5")[1]


@pytest.mark.parametrize(
    ("damage", "layout"), [("cut", "folder"), ("head", "wds"), ("gone", "folder")]
)
def test_export_goes_on_after_a_damaged_shard(dataset, tmp_path, cli, damage, layout):
    """--on-error skip names a shard that cannot be read, exports the others, and ends with 1."""
    pcr, out = tmp_path / "pcr", tmp_path / "out"
    shutil.copytree(dataset, pcr)
    path = pcr / "data-000001.tar"
    data = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(data[:-3000] if damage == "cut" else data[:700])
    command = ["export", pcr, out, "--format", layout]
    status, text, _ = cli(*command)
    assert (status, text) == (1, "")
    status, text, err = cli(*command, "--on-error", "skip", "--overwrite")
    assert (status, err.count("left out: ")) == (1, 1)
    assert text == "samples: 18\nleft out: 6\nscan: full\n"
    assert "data-000001.tar" in err
    assert len(list(out.rglob("*.*"))) == (18 if layout == "folder" else 3)


def test_a_card_is_not_overwritten_by_accident(dataset, tmp_path, cli, fails):
    """Edits of README.md stay, until --overwrite."""
    folder = shutil.copytree(dataset, tmp_path / "pets")
    status, text, _ = cli("card", folder, "--url", "hf://datasets/me/pets")
    assert (status, "README.md\nnote: edit it to say" in text) == (0, True)
    card = (folder / "README.md").read_text()
    assert "# pets\n" in card
    assert "load_dataset('hf://datasets/me/pets', scan=5, streaming=True)" in card
    (folder / "README.md").write_text("mine")
    fails("card", folder, words=["--overwrite"])
    assert (folder / "README.md").read_text() == "mine"
    assert cli("card", folder, "--overwrite", "--name", "other")[0] == 0
    assert "# other\n" in (folder / "README.md").read_text()


def test_a_card_in_a_store(dataset, cli):
    """A card is written next to shards at any URL, with the storage options of its file system."""
    memory = fsspec.filesystem("memory")
    memory.put(f"{dataset}/", "/pets/", recursive=True)
    status, figures, _ = cli("card", "memory://pets", "--storage-option", "x=1", "--json")
    assert (status, figures["files"]) == (0, ["memory://pets/README.md"])
    assert b"# pets\n" in memory.cat("/pets/README.md")


def test_a_card_needs_a_dataset(tmp_path, fails):
    """An empty folder is refused in a sentence."""
    fails("card", tmp_path, words=["no pcr.json there", "pcrshard encode"])
