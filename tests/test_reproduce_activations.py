"""scripts/reproduce.py activations --quick trains, measures, draws and writes its page."""

import json

import pytest
from support import reproduce

pytestmark = pytest.mark.long

for package in ("torch", "matplotlib", "hydra", "cv2"):
    pytest.importorskip(package)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """What a first run has written."""
    folder = tmp_path_factory.mktemp("reproduce") / "evidence"
    reproduce(folder, "activations")
    return folder


def test_the_page_has_every_part(out):
    """Targets, paired gaps, ratios, noise and memory, with pictures of 800 pixels."""
    image = pytest.importorskip("PIL.Image")
    page = (out / "activations.md").read_text()
    for heading in ("The targets", "Accuracy", "Table 1", "3-D U-Net", "Errors", "Memory"):
        assert f"## {heading}" in page
    for picture in ("accuracy", "errors", "sigma", "timeline", "batches"):
        assert f"(activations-{picture}.png)" in page
        with image.open(out / f"activations-{picture}.png") as drawn:
            assert drawn.width == 800
    assert "No GPU was at hand" in page
    assert max(map(len, [line for line in page.split("\n") if not line.startswith("|")])) <= 100


def test_pairs_share_everything_but_compression(out):
    """Plain runs and others of one seed, all arms; losses differ, and not by much."""
    lines = (out / "activations-runs.jsonl").read_text().splitlines()
    runs = {(run["spec"]["arm"], run["spec"]["seed"]): run for run in map(json.loads, lines)}
    for seed in (0, 1):
        plain = runs["plain", seed]["rows"][-1][0]
        close = runs["0.05 std", seed]["rows"][-1][0]
        assert plain != close
        assert plain == pytest.approx(close, rel=0.2)
    assert runs["plain", 0]["ratio"] == 1
    assert runs["0.1 std, images too", 0]["ratio"] > runs["0.05 std", 0]["ratio"] > 1.5


def test_what_is_measured_leaves_nothing_alive(out):
    """Every saved byte is counted, and none is left; prediction and measurement agree."""
    ratios = json.loads((out / "activations-ratios.json").read_text())["results"]
    for network in ratios["networks"].values():
        for case in network["cases"].values():
            assert case["live_bytes_after"] == 0
            assert sum(raw for raw, _ in case["kinds"].values()) == case["raw_bytes"]
    noise = json.loads((out / "activations-noise.json").read_text())["results"]
    assert noise["errors"]["largest_at_zeros"] == 0
    assert noise["errors"]["largest"] <= 1


def test_a_second_run_keeps_what_is_there(out):
    """Trainings and measurements are made once; the page is written again."""
    kept = ("activations-runs.jsonl", "activations-ratios.json", "activations-memory.json")
    before = [(out / name).read_bytes() for name in kept]
    (out / "activations.md").unlink()
    reproduce(out, "activations")
    assert [(out / name).read_bytes() for name in kept] == before
    assert (out / "activations.md").exists()
