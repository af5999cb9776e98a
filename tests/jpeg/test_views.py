"""Several pictures of one image, and where they are from."""

import io

import numpy as np
import pytest
from PIL import Image

from pcrshard import ImageDecoder, View, decode_image, native
from pcrshard.errors import CorruptJpeg
from pcrshard.jpeg.split import join_scans, split_scans
from pcrshard.testing import make_jpeg

JPEG = make_jpeg(4, 150, 200, quality=90, progressive=True)
LARGE = View(48, 2, scale=(0.25, 1))
SMALL = View((16, 20), 8, scale=(0.05, 0.25))


def cut(scan):
    """The image at a scan."""
    header, scans, _ = split_scans(JPEG)
    return join_scans(header, scans[:scan])


@pytest.mark.parametrize("scan", [1, 3, 10])
@pytest.mark.parametrize(
    "options", [{}, {"flip": 0.5}, {"layout": "hwc", "color": "gray"}, {"smoothing": True}]
)
def test_views_are_as_many_single_calls(scan, options):
    """Ten views have the pixels of ten decodes of the crops that they say they drew."""
    decoder = ImageDecoder(views=[LARGE, SMALL], return_geometry=True, **options)
    check_views(cut(scan), *decoder(cut(scan), 3), options)


def check_views(jpeg, pixels, geometry, options=None):
    how = {"layout": "chw"} | (options or {})
    how.pop("flip", None)
    seen = set()
    for views, where in zip(pixels, geometry, strict=True):
        for picture, crop, flipped in zip(views, where.crop, where.flipped, strict=True):
            size = picture.shape[1:] if how["layout"] == "chw" else picture.shape[:2]
            alone = decode_image(jpeg, crop=tuple(crop.tolist()), size=size, **how)
            axis = 2 if how["layout"] == "chw" else 1
            assert np.array_equal(picture, np.flip(alone, axis) if flipped else alone)
            seen.add((*crop.tolist(), bool(flipped)))
    assert len(seen) == sum(map(len, pixels))


@pytest.mark.parametrize(
    "jpeg",
    [
        make_jpeg(1, 60, 70, "CMYK"),
        make_jpeg(2, 60, 70, "L"),
        make_jpeg(3, 60, 70),
        pytest.param(b"", id="png"),
    ],
)
def test_every_kind_of_image_has_views(jpeg):
    """Baseline, gray, CMYK and PNG images give views, too."""
    if not jpeg:
        file = io.BytesIO()
        Image.fromarray(np.arange(60 * 70 * 3, dtype=np.uint8).reshape(60, 70, 3)).save(file, "PNG")
        jpeg = file.getvalue()
    check_views(jpeg, *ImageDecoder(views=[View(24, 3)], return_geometry=True)(jpeg, 5))


def test_damage_is_named():
    """A damaged image is CorruptJpeg, not views of something."""
    with pytest.raises(CorruptJpeg):
        ImageDecoder(views=[LARGE])(JPEG[:200] + b"\xff\xd9 garbage", 0)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"views": [LARGE], "size": 224}, ValueError, "size in each View"),
        ({"views": [LARGE], "scale": (0.5, 1)}, ValueError, "scale in each View"),
        ({"views": [224, 96]}, TypeError, "list of pcrshard.View"),
        ({"views": [View(None)]}, ValueError, "size of each View"),
    ],
)
def test_wrong_views_are_refused(options, error, match):
    """A typing error is refused before the first image."""
    with pytest.raises(error, match=match):
        ImageDecoder(**options)
    with pytest.raises(ValueError, match="count to be a whole number of at least 1, got 0"):
        View(224, 0)
    with pytest.raises(ValueError, match="size such as 224"):
        View(0)
    with pytest.raises(ValueError, match="crop"):
        View(16, crop="left")


def test_geometry_says_where_pixels_are_from():
    """The returned crop, flip, and size are the ones that produced the pixels."""
    decoder = ImageDecoder(32, "random", flip=0.5, return_geometry=True)
    flips = set()
    for number in range(8):
        pixels, (crop, flipped, size) = decoder(JPEG, number)
        assert np.array_equal(pixels, ImageDecoder(32, "random", flip=0.5)(JPEG, number))
        part = native.decode([JPEG], crop=tuple(crop.tolist()), size=(32, 32), layout="chw")
        assert np.array_equal(pixels, part[:, :, ::-1] if flipped else part)
        assert size.tolist() == [150, 200]
        flips.add(bool(flipped))
    assert flips == {False, True}


def test_the_whole_image_has_a_geometry():
    """Without a crop the geometry is that of the whole image."""
    _, where = ImageDecoder(32, return_geometry=True)(JPEG, 0)
    assert where.crop.tolist() == [0, 0, 150, 200]
    assert where.flipped.tolist() is False
