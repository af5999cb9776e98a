"""scripts/reproduce.py clusters --quick: a real cluster, its simulation, a page."""

import json
import os
import shutil
import subprocess

import pytest
from support import reproduce

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
    reproduce(out, "clusters")
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
