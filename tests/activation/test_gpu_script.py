"""scripts/gpu: the table of a GPU, in its small form on a CPU."""

import json

import pytest
from support import ROOT, run_python


@pytest.mark.changed("scripts/accelerator.py", "scripts/gpu")
def test_the_small_form_checks_and_measures(tmp_path):
    """Kernels give a CPU's values, and compressed steps the loss and nearly the gradients."""
    words = ("scripts/accelerator.py", "--small", "--out", tmp_path)
    run_python(*words, cwd=ROOT, env={"OMP_NUM_THREADS": "1"}, timeout=600)
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert len(report["kernels"]) == 5
    assert all(row["pack GB/s"] > 0 for row in report["kernels"].values())
    for network in ("ResNet-18", "GPT"):
        plain, bits = (report["rows"][f"{network}, {way}"] for way in ("plain", "bits"))
        assert bits["loss"] == plain["loss"]
        assert 0 < bits["error"] < 0.05
        assert bits["kept GB"] < bits["saved GB"]
    page = (tmp_path / "gpu.md").read_text()
    assert "| ResNet-18, bits, recompute |" in page
    assert "nothing here is of a GPU" in page
