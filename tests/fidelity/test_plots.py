"""Pictures are written, have the right size, and show the bars, points and images asked for."""

import sys

import numpy as np
import pytest
from PIL import Image

from pcrshard.errors import MissingDependency, StorageError
from pcrshard.fidelity import plots
from pcrshard.fidelity.costs import ScanCost
from pcrshard.testing import make_pixels

COSTS = [
    ScanCost(1, 2000, 200.0, 4.0),
    ScanCost(2, 4000, 400.0, 2.0),
    ScanCost("full", 8000, 800.0, 1.0),
]
BLUE = (0x2B, 0x6C, 0xB0)


def pixels_of(path):
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB")).astype(int)


def blue_heights(pixels):
    """Heights in pixels of the runs of columns that have the bars' color."""
    blue = (abs(pixels - BLUE).max(axis=2) < 8).sum(axis=0)
    edges = np.flatnonzero(np.diff((blue > 3).astype(int), prepend=0, append=0))
    return [int(blue[a:b].max()) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def test_there_is_a_bar_for_each_scan(tmp_path, monkeypatch):
    """The bars are as high as the bytes, also in a program that draws grids over its own plots."""
    monkeypatch.setitem(plots.pyplot_module().rcParams, "axes.grid", True)
    path = tmp_path / "costs.png"
    plots.plot_scan_costs(COSTS, str(path), title="24 samples")
    pixels = pixels_of(path)
    assert pixels.shape == (450, 800, 3)
    heights = blue_heights(pixels)
    assert len(heights) == 3
    assert heights[0] / heights[2] == pytest.approx(1 / 4, abs=0.02)
    assert heights[1] / heights[2] == pytest.approx(1 / 2, abs=0.02)


def test_the_ladder_has_its_images_above_the_bars(tmp_path):
    """The images are in the upper part, from left to right."""
    colors = {"scan 1": (255, 0, 0), "scan 5": (0, 255, 0)}
    images = [(name, 1000, np.full((40, 60, 3), rgb, np.uint8)) for name, rgb in colors.items()]
    path = tmp_path / "ladder.png"
    plots.plot_ladder(images, COSTS, str(path), title="one image")
    pixels = pixels_of(path)
    assert len(blue_heights(pixels)) == 3
    red, green = (np.argwhere((pixels == rgb).all(axis=2)) for rgb in colors.values())
    assert min(len(red), len(green)) > 1000
    assert red[:, 1].max() < green[:, 1].min()
    assert red[:, 0].max() < 350


@pytest.mark.parametrize("count", [1, 2])
def test_a_contact_sheet_has_a_picture_for_each_scan(tmp_path, count):
    """The differences of full fidelity to itself are plain gray."""
    images = []
    for seed in range(count):
        reference = make_pixels(seed, 50, 50)
        low = plots.Picture(2, 900, 0.9, (reference // 2).astype(np.uint8))
        images.append([low, plots.Picture("full", 3000, 1.0, reference)])
    path = tmp_path / "sheet.png"
    plots.plot_contact_sheet(images, str(path), title="sheet")
    pixels = pixels_of(path)
    assert pixels.shape == (490 * count, 460, 3)
    gray = (pixels == 128).all(axis=2)
    assert gray[:, 230:].sum() > 5000 * count
    assert gray[:, 230:].sum() > 10 * gray[:, :230].sum()


def test_a_picture_that_cannot_be_saved_is_an_error_of_ours(tmp_path):
    """It names the file."""
    with pytest.raises(StorageError, match=r"cannot save the picture.*none/x\.png"):
        plots.plot_scan_costs(COSTS, str(tmp_path / "none" / "x.png"), title="t")
    with pytest.raises(StorageError, match=r"x\.nonsense"):
        plots.plot_scan_costs(COSTS, str(tmp_path / "x.nonsense"), title="t")


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    """The message says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependency, match=r"pcrshard\[fidelity\]"):
        plots.pyplot_module()
