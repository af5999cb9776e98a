"""``codec=`` of scripts/train.py."""

import json
import subprocess
import sys

import pytest
from support import ROOT


def train(dataset, out, *settings):
    command = [
        sys.executable, str(ROOT / "scripts" / "train.py"), f"data.train={dataset}", f"out={out}",
        "epochs=1", "size=64", "batch_size=4", "workers=0", "threads=1", *settings,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_run_is_compressed_by_one_setting(dataset, tmp_path):
    """Nearly the same losses as without."""
    losses = []
    for name, settings in (("plain", []), ("small", ["codec=int8"])):
        result = train(dataset, tmp_path / name, *settings)
        assert result.returncode == 0, result.stderr
        rows = (tmp_path / name / "log.jsonl").read_text().splitlines()
        losses.append(json.loads(rows[-1])["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
