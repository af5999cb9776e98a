"""scripts/reproduce.py clusters --quick: a real cluster, its simulation, a page."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from support import ROOT

pytestmark = pytest.mark.long

for package in ("torch", "matplotlib", "hydra", "cv2", "simpy", "aiohttp"):
    pytest.importorskip(package)


@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "nginx", "curl"))),
    reason="NO SHAPED LINKS: needs root and apt-get install iproute2 nginx-light curl",
)
def test_a_real_cluster_and_its_simulation(tmp_path):
    """What nginx was asked for is what the simulation asks for, byte for byte; rates are alike."""
    out = tmp_path / "evidence"
    environment = os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment["PATH"] += ":/usr/sbin:/sbin"
    command = [sys.executable, str(ROOT / "scripts" / "reproduce.py"), "clusters", "--quick"]
    done = subprocess.run(
        [*command, "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((out / "clusters-validation.json").read_text())["results"]["rows"]
    found = row["real"]
    model = row["simulated"]
    for name in ("requests", "sent_bytes"):
        assert found[name] == model[name]
    # Loosely, because tests run side by side.
    assert 0.4 < model["images_per_second"] / found["images_per_second"] < 2.5
    page = (out / "clusters.md").read_text()
    for picture in ("validation", "paper", "s3"):
        assert (out / f"clusters-{picture}.png").exists()
        assert f"(clusters-{picture}.png)" in page
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True)
    assert "pcrsim" not in left.stdout
