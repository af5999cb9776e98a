"""The notebooks run, and say what their text says."""

import os
import subprocess
import sys

import nbformat
import pytest
from support import ROOT

FIRST = "01-encode-and-look"
# Trainings, of which the last needs real photographs and a pretrained network.
LONG = ["02-train-from-a-prefix", "03-let-it-tune-itself", "04-accuracy-against-bytes"]
EACH = [FIRST, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]


def execute(folder, *names):
    """Create and run notebooks; return the ones that could be created, by name."""
    environment = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    environment.setdefault("PCRSHARD_DATA", str(ROOT.parent / "shared" / "data"))
    command = [sys.executable, str(ROOT / "notebooks" / "make.py"), str(folder), *names]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return {path.stem: nbformat.read(path, 4) for path in folder.glob("*.ipynb")}


class Executed(dict):
    """The notebooks that ran, by name; each runs when it is asked for."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __missing__(self, name):
        self.update(execute(self.folder, name))
        if name not in self:
            pytest.skip(f"{name}: NO REAL PHOTOGRAPHS OR NO PRETRAINED NETWORK; see PCRSHARD_DATA")
        return self[name]


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    return Executed(tmp_path_factory.mktemp("notebooks"))


def test_every_notebook_is_tested():
    """A notebook that nobody runs is soon wrong."""
    assert sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")) == [FIRST, *LONG]


@pytest.mark.parametrize("name", EACH)
def test_a_notebook_runs(executed, name):
    """Each cell runs to its end, and there is a picture to look at."""
    outputs = [output for cell in executed[name].cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("name", EACH)
def test_the_kept_notebook_is_the_one_that_ran(executed, name):
    """What readers see on the web has these cells, each with an output where it gives one."""
    kept = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", 4)
    assert [cell.source for cell in kept.cells] == [cell.source for cell in executed[name].cells]
    for cell, ran in zip(kept.cells, executed[name].cells, strict=True):
        assert bool(cell.get("outputs")) == bool(ran.get("outputs")), cell.source
