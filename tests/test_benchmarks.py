"""python -m benchmarks: every subject runs, and its results are right before they are timed."""

import importlib.util
import json
import os
import shutil

import pytest
from support import ROOT, run_python

pytestmark = pytest.mark.long

for package in ("torch", "cv2", "webdataset", "sklearn", "safetensors"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)

LINKS = os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc", "nginx", "curl")))
SUBJECTS = sorted(
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if "ROUNDS =" in path.read_text()
)


@pytest.mark.usefixtures("data_folder")
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_benchmark_checks_and_reports(subject, tmp_path):
    """Figures, targets and the machine are in one file, and every assertion held."""
    if subject == "remote" and not LINKS:
        pytest.skip("NO SHAPED LINKS: needs root and apt-get install iproute2 nginx-light curl")
    path = tmp_path / "figures.json"
    words = ("-m", "benchmarks", subject, "--quick", "--json", path)
    run_python(*words, cwd=ROOT, env={"OMP_NUM_THREADS": "1"}, timeout=600)
    report = json.loads(path.read_text())
    assert report["benchmark"] == subject
    assert report["results"]
    assert report["machine"]["versions"]["pcrshard"]
