"""The commands that read shards and write something else: export, stage, cache."""

import json

import pytest

from pcrshard import PrefixCache, Shard, open_dataset
from pcrshard.cli.main import main


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
    fails("export", dataset, dataset, words=["another folder"])
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
    assert (entry["scan"], entry["url"]) == (2, shard_urls[0])
    assert main(["cache", "ls", str(tmp_path)]) == 0
    assert "1 shards" in capsys.readouterr().out
    assert main(["cache", "clear", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["freed_bytes"] == entry["num_bytes"]
    assert main(["cache", "ls", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    fails("cache", "ls", tmp_path / "none", words=["none"])
