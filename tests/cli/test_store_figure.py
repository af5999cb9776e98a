"""The figure of ``pcrshard checkpoint show``."""

import numpy as np
import pytest
from PIL import Image

from pcrshard.cli.store_figure import MAX_TENSORS, plot_tensors
from pcrshard.errors import StorageError

KINDS = ("lossless", "linear", "log")


def rows(count, **more):
    return [
        {
            "path": f"layer{i}.weight",
            "raw_bytes": 1000 * (i + 1),
            "stored_bytes": 100 * i,
            "bound_kind": KINDS[i % 3],
            **more,
        }
        for i in range(count)
    ]


@pytest.mark.parametrize("more", [{"error": 0.5}, {"bound_std": 0.01}, {"bound_std": 0.0}])
def test_bars_of_every_kind_are_drawn(tmp_path, more):
    """Each kind has its colour; a tensor without bytes of its own is no problem."""
    path = str(tmp_path / "a.png")
    plot_tensors(rows(6, **more), path, title="Version 1")
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    colours = {tuple(colour) for colour in pixels.tolist()}
    assert {(0xA0, 0xAE, 0xC0), (0x2B, 0x6C, 0xB0), (0xC0, 0x56, 0x21)} <= colours


def test_a_large_network_gives_a_picture_of_limited_height(tmp_path):
    """The largest tensors are drawn."""
    paths = [str(tmp_path / f"{count}.png") for count in (MAX_TENSORS, 400)]
    plot_tensors(rows(MAX_TENSORS, error=0.1), paths[0], title="a")
    plot_tensors(rows(400, error=0.1), paths[1], title="a")
    heights = []
    for path in paths:
        with Image.open(path) as picture:
            heights.append(picture.size[1])
    assert heights[0] == heights[1] < 1700


def test_a_picture_that_cannot_be_written_is_an_error_of_ours(tmp_path):
    """A folder that is not there."""
    with pytest.raises(StorageError, match="cannot save the picture"):
        plot_tensors(rows(2, error=0.1), str(tmp_path / "no" / "a.png"), title="a")
