"""The picture of some images at the scans that people talk about."""

import numpy as np
import pytest

import pcrshard
from pcrshard.fidelity.contact_sheet import contact_sheet

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("cv2")
pytest.importorskip("matplotlib")


def test_a_contact_sheet_is_drawn(large_dataset, tmp_path):
    """One image a row, scans 1, 2, 5 and full, and the differences."""
    path = tmp_path / "sheet.png"
    contact_sheet(large_dataset, str(path), num_images=2, side=96)
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert pixels.shape[1] == pytest.approx(4 * 230, abs=10)
    assert pixels.std() > 10
    plain = path.read_bytes()
    contact_sheet(large_dataset, str(path), num_images=2, side=96, smoothing=True)
    assert path.read_bytes() != plain
    contact_sheet(large_dataset, str(path), [2], num_images=1)


def test_the_sheet_of_a_staged_copy_ends_at_its_highest_scan(large_dataset, tmp_path):
    """Scans 1, 2 and 5, of which the last one is the reference."""
    copy = str(tmp_path / "copy")
    path = tmp_path / "sheet.png"
    pcrshard.stage(large_dataset, copy, 5)
    contact_sheet(copy, str(path), num_images=1, side=96)
    with Image.open(path) as picture:
        assert picture.width == pytest.approx(3 * 230, abs=10)
