"""Several pictures of one image, and where they are from."""

import io
import pickle
import random

import numpy as np
import pytest
from PIL import Image

from pcrshard import ImageDecoder, View, native
from pcrshard.errors import CorruptJpeg
from pcrshard.jpeg.crops import Draws
from pcrshard.jpeg.split import join_scans, split_scans
from pcrshard.jpeg.views import Geometry
from pcrshard.native import pictures
from pcrshard.testing import make_jpeg

JPEG = make_jpeg(4, 150, 200, quality=90, progressive=True)
LARGE = View(48, 2, scale=(0.25, 1))
SMALL = View((16, 20), 8, scale=(0.05, 0.25))


@pytest.fixture(params=["native", "libjpeg-turbo"])
def backend(request, monkeypatch):
    """Run with the native core, and as if it had not been built."""
    if request.param == "native" and not native.available:
        pytest.skip("THE NATIVE CORE IS NOT BUILT: install a C compiler and run scripts/setup")
    monkeypatch.setattr(native, "available", request.param == "native")
    monkeypatch.setattr(pictures, "available", request.param == "native")
    return request.param


def cut(scan):
    """The image at a scan."""
    header, scans, _ = split_scans(JPEG)
    return join_scans(header, scans[:scan])


@pytest.mark.parametrize("scan", [1, 3, 10])
@pytest.mark.parametrize(
    "options", [{}, {"flip": 0.5}, {"layout": "hwc", "color": "gray"}, {"smoothing": True}]
)
def test_views_are_as_many_single_calls(backend, scan, options):
    """Ten views have the pixels of ten decoders that draw one after the other."""
    jpeg = cut(scan)
    views = ImageDecoder(views=[LARGE, SMALL], **options)(jpeg, Draws(3, 1))
    rng = Draws(3, 1)
    for view, pixels in zip((LARGE, SMALL), views, strict=True):
        single = ImageDecoder(view.size, "random", scale=view.scale, **options)
        assert len(pixels) == view.count
        for picture in pixels:
            assert np.array_equal(picture, single(jpeg, rng))


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
    (views,) = ImageDecoder(views=[View(24, 3)])(jpeg, Draws(5))
    rng = Draws(5)
    for picture in views:
        assert np.array_equal(picture, ImageDecoder(24, "random")(jpeg, rng))


def test_views_go_where_they_are_wanted():
    """Rows of batches are decoded into, and a batch is an array for each view."""
    decoder = ImageDecoder(views=[LARGE, SMALL], flip=0.5)
    large, small = decoder.batch([JPEG] * 3, random.Random(7))
    assert (large.shape, small.shape) == ((3, 2, 3, 48, 48), (3, 8, 3, 16, 20))
    rng = random.Random(7)
    for image in range(3):
        for got, expected in zip((large, small), decoder(JPEG, rng), strict=True):
            assert np.array_equal(got[image], expected)


def test_damage_is_named(backend):
    """A damaged image is CorruptJpeg, not views of something."""
    with pytest.raises(CorruptJpeg):
        ImageDecoder(views=[LARGE])(JPEG[:200] + b"\xff\xd9 garbage", Draws(0))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"views": [LARGE], "size": 224}, ValueError, "size in each View"),
        ({"views": [LARGE], "scale": (0.5, 1)}, ValueError, "scale in each View"),
        ({"views": [224, 96]}, TypeError, "pcrshard.View"),
        ({"views": [View(0)]}, ValueError, "size above 0"),
        ({"views": [View(16, crop="left")]}, ValueError, "crop"),
    ],
)
def test_wrong_views_are_refused(options, error, match):
    """A typing error is refused before the first image."""
    with pytest.raises(error, match=match):
        ImageDecoder(**options)
    with pytest.raises(ValueError, match="count=0"):
        View(224, 0)


def test_geometry_says_where_pixels_are_from():
    """Crop, flip and size are those that the pixels were made by."""
    decoder = ImageDecoder(32, "random", flip=0.5, return_geometry=True)
    flips = set()
    for number in range(8):
        pixels, (crop, flipped, size) = decoder(JPEG, Draws(number))
        assert np.array_equal(pixels, ImageDecoder(32, "random", flip=0.5)(JPEG, Draws(number)))
        part = native.decode([JPEG], crop=tuple(crop.tolist()), size=(32, 32), layout="chw")
        assert np.array_equal(pixels, part[:, :, ::-1] if flipped else part)
        assert size.tolist() == [150, 200]
        flips.add(bool(flipped))
    assert flips == {False, True}


def test_the_whole_image_has_a_geometry():
    """Without a crop the geometry is that of the whole image."""
    _, where = ImageDecoder(32, return_geometry=True)(JPEG, Draws(0))
    assert where.crop.tolist() == [0, 0, 150, 200]
    assert where.flipped.tolist() is False


def test_views_have_their_geometry():
    """Each picture of each view says where it is from, in a batch of images, too."""
    decoder = ImageDecoder(views=[LARGE, SMALL], flip=0.5, return_geometry=True)
    decoder = pickle.loads(pickle.dumps(decoder))
    pixels, geometry = decoder.batch([JPEG] * 2, random.Random(1))
    for arrays, where in zip(pixels, geometry, strict=True):
        assert isinstance(where, Geometry)
        assert [part.shape for part in where] == [
            (*arrays.shape[:2], 4),
            arrays.shape[:2],
            (*arrays.shape[:2], 2),
        ]
        for place in np.ndindex(*arrays.shape[:2]):
            part = native.decode(
                [JPEG],
                crop=tuple(where.crop[place].tolist()),
                size=arrays.shape[-2:],
                layout="chw",
            )
            assert np.array_equal(arrays[place], part[:, :, ::-1] if where.flipped[place] else part)
