"""The notebooks run, and say what their text says."""

import os
import sys

import nbformat
import pytest
from support import ROOT, run_python

# The last needs real photographs and a pretrained network.
NAMES = [
    "01-encode-and-look",
    "02-train-from-a-prefix",
    "03-let-it-tune-itself",
    "04-accuracy-against-bytes",
]


def test_every_notebook_is_tested():
    """A notebook that nobody runs is soon wrong."""
    assert sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")) == NAMES


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_is_the_one_that_is_kept(name, tmp_path):
    """Each cell runs, there is a picture, and what readers see on the web has the same cells."""
    environment = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    environment.setdefault("PCRSHARD_DATA", str(ROOT.parent / "shared" / "data"))
    run_python(ROOT / "notebooks" / "make.py", tmp_path, name, env=environment)
    made = tmp_path / f"{name}.ipynb"
    if not made.exists():
        pytest.skip(f"{name}: NO REAL PHOTOGRAPHS OR NO PRETRAINED NETWORK; see PCRSHARD_DATA")
    ran, kept = (nbformat.read(path, 4).cells for path in (made, ROOT / "notebooks" / made.name))
    outputs = [output for cell in ran for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert [cell.source for cell in kept] == [cell.source for cell in ran]
    assert [bool(cell.get("outputs")) for cell in kept] == [bool(c.get("outputs")) for c in ran]
