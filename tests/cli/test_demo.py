"""The demonstration runs and tells the truth."""

import shutil

import pytest
import torch

from pcrshard.reading.dataset_folder import open_dataset

# On a loaded machine, threads spend most of their time waiting for each other.
torch.set_num_threads(1)


def test_the_demo_touches_no_folder_of_the_user(tmp_path, fails):
    """What is in the target folder stays, and the demonstration says so."""
    (tmp_path / "mine.jpg").write_bytes(b"mine")
    fails("demo", "--out", tmp_path, words=["which contains files"])
    assert [path.name for path in tmp_path.iterdir()] == ["mine.jpg"]


def test_the_demo_runs_end_to_end(tmp_path, cli):
    """A new user sees sizes, two trainings and a picture; the bytes it claims are those it read."""
    status, figures, _ = cli("demo", "--out", tmp_path, "--epochs", 1, "--json")
    assert status == 0
    low, full = figures["trainings"]
    index, _ = open_dataset(tmp_path / "train")
    assert low["bytes_read"] == index.prefix_bytes(2)
    assert full["bytes_read"] == index.prefix_bytes("full")
    assert low["accuracy"] > 0.4
    assert (tmp_path / "scans.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("layout", ["classes", "splits"])
def test_the_demo_of_own_photographs(synthetic_folder, tmp_path, layout, cli):
    """Class folders are divided; training and validation folders stay what they are."""
    photos = synthetic_folder
    if layout == "splits":
        photos = tmp_path / "photos"
        for part in ("train", "val", "test"):
            shutil.copytree(synthetic_folder, photos / part)
    status, text, _ = cli("demo", photos, "--out", tmp_path / "out", "--epochs", 1)
    assert (status, "bytes read  accuracy" in text) == (0, True)
    parts = ("train", "val") if layout == "splits" else ("train",)
    indexes = [open_dataset(tmp_path / "out" / part)[0] for part in parts]
    assert {index.classes for index in indexes} == {("cat", "dog")}
    assert {index.num_samples for index in indexes} == {24}
