"""Crops, DCT-domain scaling and the resize."""

import random

import numpy as np
import pytest

from pcrshard import native


def random_box(rng, height, width):
    h, w = rng.randint(1, height), rng.randint(1, width)
    return rng.randint(0, height - h), rng.randint(0, width - w), h, w


def test_crop_is_a_part_of_the_whole(photos, oracle):
    """A cropped decode has exactly the pixels of the whole image, also at the crop's edges."""
    rng = random.Random(1)
    for name, source in photos:
        whole = oracle(source)
        assert whole is not None
        for backend in ("auto", "portable"):
            y, x, h, w = random_box(rng, *whole.shape[:2])
            got = native.decode([source], crop=(y, x, h, w), backend=backend)
            assert np.array_equal(got, whole[y : y + h, x : x + w]), (name, y, x, h, w)


def test_dct_scaling_matches_libjpeg(photos, oracle):
    """Forced scaling by 1/2, 1/4 and 1/8 gives libjpeg's scaled pixels."""
    for name, source in photos[::2]:
        for scale in (2, 4, 8):
            for backend in ("auto", "portable"):
                got = native.decode([source], scale=scale, backend=backend)
                assert np.array_equal(got, oracle(source, 0, scale)), (name, scale, backend)


def test_resize_is_close_to_pillow(photos, oracle):
    """No pixel is more than 1 from Pillow's BILINEAR with a box; with DCT scaling, in the mean."""
    image = pytest.importorskip("PIL.Image")
    rng = random.Random(2)
    scaled = []
    for name, source in photos:
        whole = oracle(source)
        assert whole is not None
        y, x, h, w = random_box(rng, *whole.shape[:2])
        size = rng.randint(1, 300), rng.randint(1, 300)
        expected = image.fromarray(whole).resize(
            size[::-1], image.Resampling.BILINEAR, box=(x, y, x + w, y + h)
        )
        expected = np.asarray(expected).astype(int)
        got = native.decode([source], crop=(y, x, h, w), size=size, scale=1)
        assert np.abs(expected - got).max() <= 1, name
        scaled.append(
            np.abs(expected - native.decode([source], crop=(y, x, h, w), size=size)).mean()
        )
    assert np.mean(scaled) < 1
    assert max(scaled) < 8


def test_backends_and_layouts_agree(photos):
    """The vector kernels give what the plain ones give, and chw is hwc transposed."""
    rng = random.Random(3)
    for name, source in photos[::2]:
        crop = random_box(rng, *native.decode([source]).shape[:2])
        size = rng.randint(1, 300), rng.randint(1, 300)
        fast = native.decode([source], crop=crop, size=size)
        assert np.array_equal(
            fast, native.decode([source], crop=crop, size=size, backend="portable")
        ), name
        assert np.array_equal(
            fast.transpose(2, 0, 1), native.decode([source], crop=crop, size=size, layout="chw")
        ), name


def test_crop_outside_the_image_is_refused(photos):
    """A crop or size that does not fit is a ValueError that says what would."""
    _, source = photos[0]
    height, width, _ = native.decode([source]).shape
    for crop in ((0, 0, height + 1, 1), (-1, 0, 1, 1), (0, 0, 0, 5), (0, width, 1, 1)):
        with pytest.raises(ValueError, match="expected a crop"):
            native.decode([source], crop=crop)
    for size in ((0, 5), (70000, 5)):
        with pytest.raises(ValueError, match="expected a size"):
            native.decode([source], size=size)
