"""The commands that look and change nothing: info, verify, plan, fidelity."""

import shutil

import pytest

from pcrshard import ShardFormat, ShardWriter, open_dataset
from pcrshard.testing import make_jpeg


def test_system(cli):
    """info --system tells what a bug report needs."""
    assert {"pcrshard", "native core", "numpy"} <= cli("info", "--system", "--json")[1].keys()


def test_verify_finds_and_exits_with_1(dataset, tmp_path, cli):
    """Problems are printed to standard output, counted, and told by the exit code."""
    shutil.copytree(dataset, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "data-000001.tar"
    path.write_bytes(path.read_bytes()[:-5000])
    status, text, _ = cli("verify", tmp_path, "--workers", "1")
    assert (status, "data-000001.tar" in text) == (1, True)
    assert text.endswith("undecodable: 0\nwide color: 0\nshards: 4\nproblems: 1\n")


def test_the_plan_adds_up(dataset, cli):
    """The plan's bytes are those of the dataset index, and a bandwidth gives a rate."""
    index, _ = open_dataset(dataset)
    command = ("plan", dataset, "--batch", 6, "--lanes-per-rank", 1, "--bandwidth", 2)
    costs = cli(*command, "--json")[1]["scans"]
    scans = [*range(1, 11), "full"]
    assert [(cost["scan"], cost["epoch_bytes"]) for cost in costs] == [
        (scan, index.prefix_bytes(scan)) for scan in scans
    ]
    full = costs[-1]
    assert full["images_per_second"] == pytest.approx(24 / (full["epoch_bytes"] / 2e6))
    assert cli(*command, "--scan", "0.5", "--json")[1]["scans"][0]["scan"] in scans


def test_a_plan_for_a_small_dataset(dataset, cli):
    """A batch larger than the dataset is planned as large as it can be."""
    text = cli("plan", dataset, "--ranks", "5")[1]
    assert text.startswith("samples: 24\nbatch: 4\n\nscans:\nscan  steps ")


def test_a_plan_for_more_samples_than_there_are(dataset, cli):
    """A small part of a dataset stands for the whole: its shards are repeated."""
    line = ("plan", dataset, "--batch", 6, "--lanes-per-rank", 1, "--scan", 2, "--json")
    [few], [many] = (cli(*line, *more)[1]["scans"] for more in ((), ("--samples", 2400)))
    assert many["steps"] == 100 * few["steps"]
    assert many["epoch_bytes"] == 100 * few["epoch_bytes"]


def test_fidelity_recommends_and_draws(dataset, tmp_path, cli):
    """The report is plain JSON, the last scan's pixels are those of full, pictures are drawn."""
    pictures = [tmp_path / "plot.png", tmp_path / "sheet.png"]
    command = ("fidelity", dataset, "--num-images", 3, "--min-msssim", 0.5)
    drawn = ("--plot", pictures[0], "--contact-sheet", pictures[1])
    _, report, _ = cli(*command, *drawn, "--bandwidth", "10", "--json")
    last = report["scans"][-1]
    assert (last["scan"], last["psnr"], last["msssim"]) == (10, None, pytest.approx(1))
    assert all(scan["images_per_second"] > 0 for scan in report["scans"])
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    _, text, _ = cli(*command)
    assert text.startswith(f"num images: 3\nrecommended: {report['recommended']}\n")


def test_fidelity_of_splits(dataset, tmp_path, cli):
    """Each split of a folder is measured, and its picture is named after it."""
    for split in ("train", "val"):
        shutil.copytree(dataset, tmp_path / split)
    plot = tmp_path / "plot.png"
    _, report, _ = cli("fidelity", tmp_path, "--num-images", 1, "--plot", plot, "--json")
    assert [each["num_images"] for each in report.values()] == [1, 1]
    assert {path.name for path in tmp_path.glob("*.png")} == {"plot-train.png", "plot-val.png"}


def test_classes_are_counted_without_reading_images(dataset, cli):
    """The samples of each class, by name; the images may even be damaged."""
    counts = cli("info", dataset, "--classes", "--json")[1]["samples_per_class"]
    assert list(counts) == ["cat", "dog"]
    assert sum(counts.values()) == 24
    assert f"samples per class:\ncat: {counts['cat']}\n" in cli("info", dataset, "--classes")[1]


def test_info_of_a_dataset_written_from_python(tmp_path, cli):
    """The layout is named, and the scan from which on a deferred field is there."""
    fmt = ShardFormat("standard", layout="preview", deferred={"txt": 5})
    with ShardWriter(tmp_path, fmt=fmt) as writer:
        writer.write({"__key__": "a", "jpg": make_jpeg(), "txt": "x"})
    status, text, _ = cli("info", tmp_path)
    assert status == 0
    fields = "fields: jpg=image, txt=text\ndeferred: txt=5\nclasses: -\n"
    assert f"layout: preview\n{fields}" in text
