"""Crops: parts of the image, as the usual recipes draw them, the same for the same seed."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcrshard.jpeg.crops import Draws, center_crop, random_resized_crop


@given(st.integers(0, 1 << 70), st.integers(0, 1000))
def test_a_key_decides_its_draws(seed, sample):
    """A job that resumes draws the same crop, in any process."""
    crop = random_resized_crop(Draws(seed, 3, sample), 375, 500)
    assert crop == random_resized_crop(Draws(seed, 3, sample), 375, 500)


@pytest.mark.parametrize(("height", "width"), [(10, 1000), (1000, 10)])
def test_an_extreme_shape_gives_its_middle(height, width):
    """Where no part of the asked shape and area fits, the largest middle part of a legal shape is
    taken.
    """
    y, x, h, w = random_resized_crop(random.Random(0), height, width, scale=(1.0, 1.0))
    assert min(h, w) == 10
    assert 0.7 < w / h < 1.4
    assert abs(2 * y + h - height) <= 1
    assert abs(2 * x + w - width) <= 1


def test_the_middle_crop_is_the_evaluation_recipe():
    """On an image of shorter side 256 it is the 224 of CenterCrop."""
    assert center_crop(256, 320) == (16, 48, 224, 224)


@given(st.integers(0, 99), st.integers(1, 3000), st.integers(1, 3000))
def test_random_crops_stay_inside(seed, height, width):
    """Every crop is a part of its image, of the shape and area asked for where one exists."""
    y, x, h, w = random_resized_crop(random.Random(seed), height, width)
    assert 0 <= y <= y + h <= height
    assert 0 <= x <= x + w <= width
    assert h > 0
    assert w > 0
    y, x, h, w = center_crop(height, width)
    assert 0 <= y <= y + h <= height
    assert 0 <= x <= x + w <= width
    assert h == w > 0


def test_random_crops_have_the_asked_distribution():
    """Areas and shapes spread over their ranges, as in torchvision; the largest areas fit less
    often.
    """
    rng = random.Random(1)
    boxes = np.array([random_resized_crop(rng, 1000, 1000) for _ in range(4000)], float)
    areas, shapes = boxes[:, 2] * boxes[:, 3] / 1e6, np.log(boxes[:, 3] / boxes[:, 2])
    assert 0.45 < areas.mean() < 0.53
    assert abs(shapes.mean()) < 0.02
    assert shapes.min() > np.log(0.74)
    assert shapes.max() < np.log(1.35)


def test_draws_are_uniform_and_independent():
    """Draws of neighbouring samples and epochs are as good as random ones: each bin of 20 gets its
    share, and no two keys share a stream.
    """
    streams = np.array(
        [
            [draws.random() for _ in range(3)]
            for draws in (Draws(0, e, n) for e in range(4) for n in range(5000))
        ]
    )
    assert streams.min() >= 0
    assert streams.max() < 1
    for column in streams.T:
        counts = np.histogram(column, 20, (0, 1))[0]
        assert abs(counts - 1000).max() < 5 * 1000**0.5
    assert abs(np.corrcoef(streams[:-1, 0], streams[1:, 0])[0, 1]) < 5 / 20000**0.5
    assert abs(np.corrcoef(streams.T) - np.eye(3)).max() < 5 / 20000**0.5
    assert len(np.unique(streams)) == streams.size
    assert {Draws(i).randint(-1, 2) for i in range(100)} == {-1, 0, 1, 2}
    assert all(2 <= Draws(1, i).uniform(2, 3) < 3 for i in range(100))
