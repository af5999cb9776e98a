"""scripts/reproduce.py --quick writes every figure and table, and a second run keeps them."""

import json
import subprocess
import sys

import pytest
from support import ROOT, reproduce

NAMES = [
    "sizes",
    "decode",
    "bandwidth",
    "gradients",
    "time",
    "coarse",
    "epochs",
    "msssim",
    "correlation",
    "autotune",
    "rates",
    "sweep",
    "smoothing",
    "scripts",
    "wait",
]


def check(out, names):
    """A figure of 800 pixels, numbers and a table of each experiment."""
    image = pytest.importorskip("PIL.Image")
    readme = (out / "README.md").read_text()
    for name in names:
        with image.open(out / f"{name}.png") as picture:
            assert picture.width == 800
        assert json.loads((out / f"{name}.json").read_text())["results"]
        assert f"({name}.png)" in readme
        section = readme[: readme.index(f"({name}.png)")].rpartition("\n## ")[2]
        assert "| --- |" in section
        assert "paper" in section.lower()
        assert len(section) > 200


@pytest.fixture(scope="module", autouse=True)
def needed():
    """What the experiments are drawn and measured with."""
    for package in ("hydra", "torch", "matplotlib", "cv2"):
        pytest.importorskip(package)


def test_some_experiments_write_figures_and_tables(tmp_path):
    """Training runs are made once, figures are drawn again, and what is missing is said to be."""
    out = tmp_path / "evidence"
    reproduce(out, "sizes", "decode", "epochs")
    check(out, ["sizes", "decode", "epochs"])
    assert "Not run yet: `python scripts/reproduce.py autotune`" in (out / "README.md").read_text()
    lines = (out / "runs.jsonl").read_text()
    printed = reproduce(out, "--existing", "time", "sweep", "rates")
    assert "seed" not in printed
    assert (out / "runs.jsonl").read_text() == lines
    check(out, ["sizes", "time", "sweep"])
    assert not (out / "rates.json").exists()


def test_quick_runs_stay_out_of_the_evidence(tmp_path):
    """--quick without --out is refused."""
    command = [sys.executable, str(ROOT / "scripts" / "reproduce.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--quick needs --out" in done.stderr


@pytest.mark.long
def test_all_experiments_write_figures_and_tables(tmp_path):
    """The whole of it, in about half a minute of processor time."""
    out = tmp_path / "evidence"
    reproduce(out)
    check(out, NAMES)
