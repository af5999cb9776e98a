"""Pictures are written, have the right size, and show the points and images asked for."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import pcrshard
from pcrshard.fidelity import plots
from pcrshard.fidelity.contact_sheet import contact_sheet
from pcrshard.fidelity.measure import measure

pytest.importorskip("cv2")


def pixels_of(path):
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB")).astype(int)


def test_there_is_a_point_for_each_scan(large_dataset, tmp_path):
    """The points rise with the bytes."""
    rows = measure(large_dataset, num_images=1, rounds=1)
    path = tmp_path / "fidelity.png"
    plots.plot_fidelity(rows, str(path), title="one image")
    pixels = pixels_of(path)
    assert pixels.shape == (400, 800, 3)
    blue = np.argwhere(abs(pixels - (0x2B, 0x6C, 0xB0)).max(axis=2) < 8)
    lowest, highest = blue[blue[:, 1].argmin()], blue[blue[:, 1].argmax()]
    assert lowest[0] > highest[0] + 200


def test_a_contact_sheet_has_a_row_for_each_image(large_dataset, tmp_path):
    """Scans 1, 2, 5 and 10, and the differences from 10, which are plain gray for itself."""
    path = tmp_path / "sheet.png"
    contact_sheet(large_dataset, str(path), num_images=2, side=96)
    pixels = pixels_of(path)
    assert pixels.shape == (2 * 490, 4 * 230, 3)
    gray = (pixels == 128).all(axis=2)
    assert gray[:, 690:].sum() > 2 * 5000
    assert gray[:, 690:].sum() > 10 * gray[:, :230].sum()
    contact_sheet(large_dataset, str(path), [2], num_images=1)
    assert pixels_of(path).shape == (490, 2 * 230, 3)


def test_the_sheet_of_a_staged_copy_ends_at_its_highest_scan(large_dataset, tmp_path):
    """Scans 1, 2 and 5, of which the last one is the reference."""
    copy, path = str(tmp_path / "copy"), tmp_path / "sheet.png"
    pcrshard.stage(large_dataset, copy, 5)
    contact_sheet(copy, str(path), num_images=1, side=96)
    assert pixels_of(path).shape[1] == 3 * 230


def test_points_far_apart_have_labels_of_their_own():
    """Only names that would lie on each other are joined: in a steep curve, each point has one."""
    figures = [(5, 0.80), (7, 0.89), (10, 0.93), (62, 0.99), (62.8, 0.992), (100, 1.0)]
    rows = [
        SimpleNamespace(scan=scan, bytes_per_image=size * 1000, msssim=value)
        for scan, (size, value) in enumerate(figures, 1)
    ]
    labels = plots._labels(rows, figures)
    assert [text for text, _ in labels] == ["1", "2", "3", "4-5", "6"]
