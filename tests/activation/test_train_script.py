"""``codec=`` of scripts/train.py."""

import json
import subprocess
import sys

import pytest
from support import ROOT


@pytest.mark.changed("scripts/train.py", "scripts/training", "conf/train")
def test_a_run_is_compressed_by_one_setting(dataset, tmp_path):
    """Nearly the same losses as without."""
    losses = []
    for name, settings in (("plain", []), ("small", ["codec=int8"])):
        command = [
            sys.executable, str(ROOT / "scripts" / "train.py"), f"data.train={dataset}",
            f"out={tmp_path / name}", "epochs=1", "size=64", "batch_size=4", "workers=0",
            "threads=1", *settings,
        ]  # fmt: skip
        subprocess.run(command, check=True)
        rows = (tmp_path / name / "log.jsonl").read_text().splitlines()
        losses.append(json.loads(rows[-1])["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
