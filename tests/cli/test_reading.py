"""The commands that read shards and write something else: export, stage, cache."""

import json
import os
import shutil

import pytest

from pcrshard import EncodeOptions, PrefixCache, Shard, encode, open_dataset
from pcrshard.cli.main import main
from pcrshard.testing import make_jpeg


@pytest.mark.parametrize("layout", ["folder", "wds"])
def test_an_export_is_what_a_reader_gets(layout, dataset, tmp_path, capsys):
    """Exported files hold the bytes that a job reads at the same scan."""
    assert main(["export", str(dataset), str(tmp_path), "--scan", "3", "--format", layout]) == 0
    assert f"24 samples at scan 3 in {tmp_path}" in capsys.readouterr().out
    _, urls = open_dataset(dataset)
    samples = [sample for url in urls for sample in Shard(url).samples(3)]
    if layout == "folder":
        files = {path.relative_to(tmp_path).stem: path for path in tmp_path.rglob("*.jpg")}
        assert len(files) == len(samples)
        for sample in samples:
            path = tmp_path / f"{sample['__key__']}.jpg"
            assert path.read_bytes() == sample["jpg"]
    else:
        data = b"".join(path.read_bytes() for path in tmp_path.glob("*.tar"))
        assert all(sample["jpg"] in data for sample in samples)


def test_export_refuses_to_mix(dataset, tmp_path, fails):
    """The dataset's own folder and a folder with files are refused, until --overwrite."""
    (tmp_path / "mine.txt").write_text("mine")
    fails("export", dataset, dataset, words=["a folder other than"])
    fails("export", dataset, tmp_path, words=["not empty", "--overwrite"])
    assert main(["export", str(dataset), str(tmp_path), "--overwrite"]) == 0
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_stage_copies_the_difference(dataset, tmp_path, capsys):
    """A second stage at a higher scan counts what was there, and copies what was missing."""
    index, _ = open_dataset(dataset)
    counted = []
    for scan in ("2", "5"):
        assert main(["stage", str(dataset), str(tmp_path), "--scan", scan, "--json"]) == 0
        counted.append(json.loads(capsys.readouterr().out))
    assert counted[0]["copied_bytes"] == counted[1]["kept_bytes"] == index.prefix_bytes(2)
    assert counted[1]["copied_bytes"] == index.prefix_bytes(5) - index.prefix_bytes(2)
    assert (counted[1]["shards"], counted[1]["samples"]) == (4, 24)
    assert main(["stage", str(dataset), str(tmp_path), "--scan", "5"]) == 0
    assert "4 shards at scan 5" in capsys.readouterr().out


def test_a_cache_is_listed_and_cleared(shard_urls, tmp_path, capsys, fails):
    """ls shows what a job has kept, clear frees it, and a folder that is not there is an error."""
    with Shard(shard_urls[0], cache=PrefixCache(str(tmp_path))).load(2):
        pass
    assert main(["cache", "ls", str(tmp_path), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["scan"], entry["name"]) == (2, os.path.basename(shard_urls[0]))
    assert main(["cache", "ls", str(tmp_path)]) == 0
    assert "1 shard, " in capsys.readouterr().out
    assert main(["cache", "clear", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["freed_bytes"] == entry["num_bytes"]
    assert main(["cache", "ls", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    fails("cache", "ls", tmp_path / "none", words=["none"])


@pytest.mark.parametrize("action", ["ls", "clear"])
@pytest.mark.parametrize("kind", ["empty", "dataset", "file"])
def test_what_is_no_cache_is_left_alone(dataset, tmp_path, fails, action, kind):
    """A folder that no job used as its cache is refused, and nothing is made or removed in it."""
    folder = tmp_path / "folder"
    if kind == "dataset":
        shutil.copytree(dataset, folder)
    elif kind == "empty":
        folder.mkdir()
    else:
        folder.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    fails("cache", action, folder, words=["used as cache_dir", str(folder)])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("layout", ["folder", "wds"])
@pytest.mark.parametrize("damage", ["cut", "head", "empty", "gone"])
def test_export_goes_on_after_a_cut_shard(dataset, tmp_path, capsys, damage, layout):
    """--on-error skip leaves a shard out that cannot be read, names it, exports the others, and
    ends with status 1.
    """
    pcr = tmp_path / "pcr"
    shutil.copytree(dataset, pcr)
    path = pcr / "data-000001.tar"
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-3000], "head": data[:700]}.get(damage, b""))
    if damage == "gone":
        path.unlink()
    command = ["export", str(pcr), str(tmp_path / "out"), "--format", layout]
    assert main(command) == 1
    assert "18 samples" not in capsys.readouterr().out
    assert main([*command, "--on-error", "skip", "--overwrite"]) == 1
    captured = capsys.readouterr()
    assert "18 samples at scan full" in captured.out
    assert "; 6 were left out" in captured.out
    assert captured.err.count("left out: ") == 1
    assert "data-000001.tar" in captured.err
    kept = [url for url in sorted(map(str, dataset.glob("*.tar"))) if "000001" not in url]
    if layout == "wds":
        names = sorted(file.name for file in (tmp_path / "out").iterdir())
        assert names == [os.path.basename(url) for url in kept]
    else:
        keys = {sample["__key__"] for url in kept for sample in Shard(url).samples(1)}
        files = (tmp_path / "out").rglob("*.jpg")
        assert {str(f.relative_to(tmp_path / "out").with_suffix("")) for f in files} == keys


def test_export_does_not_skip_what_all_shards_lack(dataset, tmp_path, fails):
    """A scan that is not there is a mistake of the command, not damage."""
    fails("export", dataset, tmp_path / "out", "--scan", "11", "--on-error", "skip", words=["11"])


def test_kept_files_are_compared_too(tmp_path, capsys):
    """What could not be rearranged is in the dataset byte for byte, and a changed byte is found."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.jpg").write_bytes(make_jpeg(1, 20, 30))
    (source / "b.jpg").write_bytes(b"\xff\xd8 no JPEG")
    encode(str(source), str(tmp_path / "pcr"), EncodeOptions(on_error="keep"), workers=1)
    command = ["verify", str(tmp_path / "pcr"), "--against", str(source), "--workers", "1"]
    assert main(command) == 0
    assert "pixels equal" in capsys.readouterr().out
    (source / "b.jpg").write_bytes(b"\xff\xd8 no JPEg")
    command = [
        "verify",
        str(tmp_path / "pcr"),
        "--against",
        str(source),
        "--json",
        "--workers",
        "1",
    ]
    assert main(command) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert "key=b" in problem


def test_a_missing_shard_is_a_problem(dataset, tmp_path, capsys):
    """The shard that is not there is named, and the others are looked at."""
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    (copy / "data-000001.tar").unlink()
    assert main(["verify", str(copy), "--workers", "1"]) == 1
    assert "data-000001.tar" in capsys.readouterr().out


def test_a_card_is_not_overwritten_by_accident(dataset, tmp_path, capsys, fails):
    """Edits of README.md stay, until --overwrite."""
    folder = shutil.copytree(dataset, tmp_path / "pets")
    assert main(["card", str(folder), "--url", "hf://datasets/me/pets"]) == 0
    assert "README.md; edit it to say" in capsys.readouterr().out
    card = (folder / "README.md").read_text()
    assert "# pets\n" in card
    assert "load_dataset('hf://datasets/me/pets', scan=5, streaming=True)" in card
    (folder / "README.md").write_text("mine")
    fails("card", folder, words=["--overwrite"])
    assert (folder / "README.md").read_text() == "mine"
    assert main(["card", str(folder), "--overwrite", "--name", "other"]) == 0
    assert "# other\n" in (folder / "README.md").read_text()


def test_a_card_needs_a_dataset(tmp_path, fails):
    """A URL, a file and an empty folder are refused in a sentence."""
    fails("card", "s3://bucket/pets", words=["local folder"])
    fails("card", tmp_path, words=["no pcr.json there", "pcrshard encode"])
