"""Decode, crop and resize in one go; several pictures of an image, and where they are from."""

import pathlib
import random

import numpy as np
import pytest
from PIL import Image
from support import saved

from pcrshard import ImageDecoder, Shard, View, decode_image
from pcrshard.errors import CorruptJpeg
from pcrshard.jpeg.other_formats import decode
from pcrshard.jpeg.split import join_scans, split_scans
from pcrshard.testing import make_jpeg, make_pixels

JPEG = make_jpeg(4, 150, 200, quality=90, progressive=True)
LARGE = View(48, 2, scale=(0.25, 1))
SMALL = View((16, 20), 8, scale=(0.05, 0.25))


@pytest.mark.parametrize("color", ["rgb", "gray"])
@pytest.mark.parametrize("layout", ["hwc", "chw"])
def test_a_whole_image_is_libjpegs(color, layout):
    """Without crop and size the pixels are the reference decoder's."""
    expected = decode(JPEG, color)
    expected = expected if layout == "hwc" else expected.transpose(2, 0, 1)
    assert np.array_equal(decode_image(JPEG, color=color, layout=layout), expected)
    pieces = [JPEG[:100], memoryview(JPEG)[100:]]
    assert np.array_equal(decode_image(pieces, color=color, layout=layout), expected)


def test_the_same_seed_gives_the_same_crops():
    """A seed decides crops; a number is a seed, too."""
    decoder = ImageDecoder(32, "random")
    first, again = ([decoder(JPEG, rng) for _ in range(2)] for rng in map(random.Random, (3, 3)))
    assert np.array_equal(first, again)
    assert not np.array_equal(*first)
    assert np.array_equal(decoder(JPEG, 7), decoder(JPEG, 7))


def test_an_evaluation_needs_no_seed():
    """Where nothing is drawn no random number is taken; else they are Python's own."""
    state = random.getstate()
    assert ImageDecoder(224, "center")(JPEG).shape == (3, 224, 224)
    assert random.getstate() == state
    first = ImageDecoder(32, "random")(JPEG)
    random.setstate(state)
    assert np.array_equal(ImageDecoder(32, "random")(JPEG), first)


@pytest.mark.parametrize("size", [24, np.int64(24), (24, 24), [24, np.int32(24)]])
def test_a_size_is_one_or_two_whole_numbers(size):
    """Of Python, NumPy or a configuration file."""
    assert ImageDecoder(size)(JPEG).shape == (3, 24, 24)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"color": "cmyk"}, ValueError, "color"),
        ({"size": 0}, ValueError, "size such as 224"),
        *(({"size": size}, TypeError, "size such as 224") for size in ("224", 2.5, (5,))),
        ({"views": [LARGE], "size": 224}, ValueError, "size, .* in each View"),
        ({"views": [LARGE], "scale": (0.5, 1)}, ValueError, "scale .* in each View"),
        ({"views": [View(None)]}, ValueError, "size of each View"),
        ({"views": [View(8, 65)]}, ValueError, "at most 64 views, got 65"),
    ],
)
def test_wrong_options_are_refused(options, error, match):
    """A typing error is refused before the first image, with what was expected."""
    with pytest.raises(error, match=f"expected .*{match}"):
        ImageDecoder(**options)


@pytest.mark.parametrize(
    ("options", "match"), [((224, 0), "count to be .* at least 1, got 0"), ((0,), "size"),
                           ((16, 1, (0.5, 1), (1, 1), "left"), "crop")],
)  # fmt: skip
def test_wrong_views_are_refused(options, match):
    """A view is checked as the decoder is."""
    with pytest.raises(ValueError, match=match):
        View(*options)


def test_pieces_are_decoded_as_they_are(shard_urls):
    """The pieces of an image give the pixels of the joined JPEG."""
    prefix = Shard(shard_urls[0]).load(5)
    decoder = ImageDecoder(24, "center")
    for unit, sample in enumerate(prefix.samples()):
        assert np.array_equal(decoder(prefix.pieces(unit)), decoder(sample["jpg"]))


@pytest.mark.parametrize("path", ["photo.jpg", pathlib.Path("photo.jpg")])
@pytest.mark.parametrize("use", [decode_image, ImageDecoder(32, "center")])
def test_a_path_is_no_jpeg(path, use):
    """Passing a file name raises an error that shows how to read the file."""
    with pytest.raises(TypeError, match=r"pathlib\.Path\(name\)\.read_bytes\(\)"):
        use(path)


@pytest.mark.parametrize("wrong", [5, None, [], ["photo.jpg"], np.zeros(9, np.uint8)])
def test_what_holds_no_bytes_is_refused(wrong):
    """By its type, before any decoder sees it."""
    with pytest.raises(TypeError, match="expected the bytes of a JPEG"):
        decode_image(wrong)


# --- views and geometry


@pytest.mark.parametrize("scan", [1, 3, 10])
@pytest.mark.parametrize(
    "options", [{}, {"flip": 0.5}, {"layout": "hwc", "color": "gray"}, {"smoothing": True}]
)
def test_views_are_as_many_single_calls(scan, options):
    """Ten views have the pixels of ten decodes of the crops that they say they drew."""
    header, scans, _ = split_scans(JPEG)
    jpeg = join_scans(header, scans[:scan])
    check_views(jpeg, ImageDecoder(views=[LARGE, SMALL], return_geometry=True, **options), 3)


def check_views(jpeg, decoder, key):
    pixels, geometry = decoder(jpeg, key)
    how = {name: getattr(decoder, name) for name in ("layout", "color", "smoothing")}
    sides = slice(0, 2) if decoder.layout == "hwc" else slice(1, 3)
    seen = set()
    for views, where in zip(pixels, geometry, strict=True):
        for picture, crop, flipped in zip(views, where.crop, where.flipped, strict=True):
            size = picture.shape[sides]
            alone = decode_image(jpeg, crop=tuple(crop.tolist()), size=size, **how)
            assert np.array_equal(picture, np.flip(alone, sides.stop - 1) if flipped else alone)
            seen.add((*crop.tolist(), bool(flipped)))
    assert len(seen) == sum(map(len, pixels))


@pytest.mark.parametrize("kind", ["CMYK", "L", "RGB", "PNG"])
def test_every_kind_of_image_has_views(kind):
    """Baseline, gray, CMYK and PNG images give views, too."""
    picture = Image.fromarray(make_pixels(1, 60, 70))
    jpeg = saved(picture, "PNG") if kind == "PNG" else make_jpeg(1, 60, 70, kind)
    check_views(jpeg, ImageDecoder(views=[View(24, 3)], return_geometry=True), 5)


def test_damage_is_named():
    """A damaged image is CorruptJpeg, not views of something."""
    with pytest.raises(CorruptJpeg):
        ImageDecoder(views=[LARGE])(JPEG[:200] + b"\xff\xd9 garbage", 0)


def test_geometry_says_where_pixels_are_from():
    """The returned crop, flip, and size are the ones that produced the pixels, in one picture as in
    views; without a crop they are those of the whole image.
    """
    one = ImageDecoder(32, "random", flip=0.5, return_geometry=True)
    views = ImageDecoder(views=[View(32)], flip=0.5, return_geometry=True)
    for key in range(8):
        pixels, where = one(JPEG, key)
        ((view,),), (in_view,) = views(JPEG, key)
        assert np.array_equal(pixels, view)
        for part, other in zip(where, in_view, strict=True):
            assert np.array_equal(part, other[0])
        assert where.size.tolist() == [150, 200]
    _, where = ImageDecoder(32, return_geometry=True)(JPEG)
    assert where.crop.tolist() == [0, 0, 150, 200]
    assert where.flipped.tolist() is False
