"""The commands that look and change nothing: info, verify, plan, fidelity."""

import json
import pathlib
import shutil

import pytest

from pcrshard import ShardFormat, ShardWriter, open_dataset
from pcrshard.cli.main import main
from pcrshard.testing import make_jpeg


def test_one_shard_is_a_dataset(shard_urls, capsys):
    """info and verify take a single shard, too."""
    assert main(["info", shard_urls[0], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 6
    assert main(["verify", shard_urls[0]]) == 0


def test_system(capsys):
    """info --system tells what a bug report needs."""
    assert main(["info", "--system", "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert {"pcrshard", "native core", "numpy"} <= about.keys()


def test_verify_finds_and_exits_with_1(dataset, tmp_path, capsys):
    """Problems are printed to standard output, counted, and told by the exit code."""
    shutil.copytree(dataset, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "data-000001.tar"
    path.write_bytes(path.read_bytes()[:-5000])
    assert main(["verify", str(tmp_path), "--workers", "1"]) == 1
    text = capsys.readouterr().out
    assert "data-000001.tar" in text
    assert "1 problem in 24 samples" in text


@pytest.mark.parametrize("target", ["none/plot.png", "plot.nonsense"])
def test_a_plot_that_cannot_be_saved(dataset, tmp_path, fails, target):
    """A picture that cannot be written is one line."""
    fails("fidelity", dataset, "--plot", tmp_path / target, words=["plot"])


def test_info_of_a_dataset_by_shard_writer(tmp_path, capsys):
    """Datasets written from Python are datasets for the command line."""
    with ShardWriter(str(tmp_path)) as writer:
        writer.write({"__key__": "a", "jpg": make_jpeg(), "txt": "x"})
    assert main(["info", str(tmp_path)]) == 0
    assert "fields: txt" in capsys.readouterr().out
    assert pathlib.Path(tmp_path / "pcr.json").exists()


def test_info_says_who_reads_compact_shards(dataset, tmp_path, capsys):
    """Who opens compact shards with a stock reader has been told what it gets."""
    assert main(["info", str(dataset)]) == 0
    assert "read by .pcr_scan() or PCRDataset; a stock tar" in capsys.readouterr().out
    with ShardWriter(tmp_path, fmt=ShardFormat(layout="preview", base=2)) as writer:
        writer.write({"__key__": "a", "jpg": make_jpeg()})
    assert main(["info", str(tmp_path)]) == 0
    assert "stock" not in capsys.readouterr().out


def test_a_sample_in_no_shard_is_told(dataset, synthetic_folder, tmp_path, capsys):
    """--against names the source's images that a dataset lacks."""
    source = tmp_path / "source"
    shutil.copytree(synthetic_folder, source)
    (source / "cat" / "new.jpg").write_bytes(make_jpeg())
    command = ["verify", str(dataset), "--against", str(source), "--json", "--workers", "1"]
    assert main(command) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert problems == ["the source's sample cat/new is in no shard"]


def test_the_plan_adds_up(dataset, capsys):
    """The plan's bytes are those of the dataset index, and a bandwidth gives a rate."""
    index, _ = open_dataset(dataset)
    command = ["plan", str(dataset), "--batch", "6", "--lanes-per-rank", "1", "--bandwidth", "2"]
    assert main([*command, "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)
    assert [cost["scan"] for cost in costs] == [*range(1, 11), "full"]
    assert [cost["epoch_bytes"] for cost in costs] == [
        index.prefix_bytes(cost["scan"]) for cost in costs
    ]
    full = costs[-1]
    assert full["images_per_second"] == pytest.approx(24 / (full["epoch_bytes"] / 2e6))
    assert main([*command, "--scan", "2", "--workers", "3", "--lanes-per-rank", "4"]) == 0
    text = capsys.readouterr().out
    assert "24 samples in 4 shards, 4 steps of 6" in text
    assert "try --lanes-per-rank 3" in text


def test_a_plan_for_a_small_dataset(dataset, capsys):
    """A batch larger than the dataset is planned as large as it can be, with a note."""
    assert main(["plan", str(dataset), "--ranks", "5", "--json"]) == 0
    captured = capsys.readouterr()
    assert "256 x 5" in captured.err
    assert "24 samples; planning with --batch 4" in captured.err
    assert {cost["steps"] for cost in json.loads(captured.out)} == {1}
    assert main(["plan", str(dataset), "--ranks", "5", "--batch", "4"]) == 0
    captured = capsys.readouterr()
    assert ("1 step of 20" in captured.out, captured.err) == (True, "")


def test_fidelity_recommends_and_draws(dataset, tmp_path, capsys):
    """The report is plain JSON, the last scan's pixels are those of full, pictures are drawn."""
    pictures = [tmp_path / "plot.png", tmp_path / "sheet.png"]
    command = ["fidelity", str(dataset), "--num-images", "3", "--min-msssim", "0.5"]
    drawn = ["--plot", str(pictures[0]), "--contact-sheet", str(pictures[1])]
    assert main([*command, *drawn, "--bandwidth", "10", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    last = report["scans"][-1]
    assert (last["scan"], last["psnr"], last["msssim"]) == (10, None, pytest.approx(1))
    assert all(scan["images_per_second"] > 0 for scan in report["scans"])
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    assert main([*command, "--smoothing", "--json"]) == 0
    smoothed = json.loads(capsys.readouterr().out)
    assert smoothed["scans"][0]["psnr"] != report["scans"][0]["psnr"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "3 images, against full fidelity; 3 of them small, at fewer scales" in text
    assert f"recommended: scan {report['recommended']}" in text


def test_classes_are_counted_without_reading_images(dataset, capsys):
    """The samples of each class, by name; the images may even be damaged."""
    assert main(["info", str(dataset), "--classes", "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)["samples_per_class"]
    assert list(counts) == ["cat", "dog"]
    assert sum(counts.values()) == 24
    assert main(["info", str(dataset), "--classes"]) == 0
    assert f"{counts['cat']:9d}  cat" in capsys.readouterr().out
