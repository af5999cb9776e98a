"""Photographs are the right way up, through every integration and at every scan."""

import functools
import io
import pathlib
import struct
import tempfile
from functools import partial

import numpy as np
import pytest
import webdataset as wds
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from imported_later import Later
from PIL import Image, ImageOps
from support import saved

from pcrshard import (
    Buckets,
    ImageDecoder,
    JpegHandler,
    PCRDataset,
    PCRError,
    PCRLoader,
    Shard,
    ShardFormat,
    ShardWriter,
    View,
    decode_image,
    open_dataset,
)
from pcrshard.cli.main import main
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.integrations.dali import DaliSource
from pcrshard.integrations.grain import PCRSource
from pcrshard.jpeg.markers import map_jpeg
from pcrshard.jpeg.orientation import with_orientation
from pcrshard.testing import make_jpeg, make_pixels

datasets, hf = Later("datasets"), Later("pcrshard.hf")

ORIENTATIONS = range(1, 9)
SCANS = (1, 5, "full")
# Neither side is a number of blocks, or of bands of rows that are put as columns together.
SHAPE = (45, 71)


def exif(orientation):
    found = Image.Exif()
    found[0x0112] = orientation
    found[0x010F] = "camera"
    return found.tobytes()


@functools.cache
def turned(orientation, mode="RGB", **options):
    options = {"quality": 90} | options
    return make_jpeg(orientation, *SHAPE, mode, exif=exif(orientation), **options)


def by_pillow(jpeg, mode="RGB"):
    """Upright pixels of an image, (H, W, C); the gray of a JPEG in color is its luma."""
    picture = Image.open(io.BytesIO(jpeg))
    if (picture.mode, mode) == ("RGB", "L"):
        picture.draft("L", picture.size)
    pixels = np.asarray(ImageOps.exif_transpose(picture).convert(mode))
    return pixels[..., None] if pixels.ndim == 2 else pixels


def number_by_pillow(jpeg):
    """The orientation that ``exif_transpose`` undoes; it fails itself on other tags that it cannot
    write again.
    """
    number = Image.open(io.BytesIO(jpeg)).getexif().get(0x0112, 1)
    return next((way for way in range(2, 9) if way == number), 1)


@pytest.fixture(scope="module", params=["compact", "preview"])
def folder(request, tmp_path_factory):
    """A dataset of eight orientations and of one picture without EXIF."""
    path = tmp_path_factory.mktemp("turned")
    fmt = ShardFormat("standard", layout=request.param, base=2)
    with ShardWriter(path, samples_per_shard=5, fmt=fmt) as writer:
        for orientation in ORIENTATIONS:
            jpeg = turned(orientation)
            writer.write({"__key__": f"k{orientation}", "jpg": jpeg, "cls": orientation})
        writer.write({"__key__": "k9", "jpg": make_jpeg(9, *SHAPE, quality=90), "cls": 9})
    return str(path)


@functools.cache
def expected(folder, scan):
    """Upright pixels of each sample at a scan, by its key: of libjpeg-turbo's smoothed ones."""
    found = {}
    for url in open_dataset(folder)[1]:
        prefix = Shard(url).load(scan)
        for sample, orientation in zip(prefix.samples(), prefix.index.orientation, strict=True):
            stored = decode_image(sample["jpg"], upright=False)
            picture = Image.fromarray(stored)
            picture.getexif()[0x0112] = max(int(orientation), 1)
            found[sample["__key__"]] = np.asarray(ImageOps.exif_transpose(picture))
    return found


# --- one image


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("layout", ["hwc", "chw"])
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("RGB", {}),
        ("RGB", {"progressive": True, "subsampling": 0}),
        ("L", {}),
        ("CMYK", {}),
    ],
)
def test_whole_images_are_pillows(orientation, layout, mode, options):
    """Pixels are bit for bit those of ``exif_transpose``, in both layouts, in color and gray."""
    jpeg = turned(orientation, mode, **options)
    for color, kind in (("rgb", "RGB"), ("gray", "L")):
        pixels = by_pillow(jpeg, kind)
        upright = pixels if layout == "hwc" else pixels.transpose(2, 0, 1)
        assert np.array_equal(decode_image(jpeg, color=color, layout=layout), upright)
        got = ImageDecoder(layout=layout, color=color)(jpeg)
        assert np.array_equal(got, upright)
    assert decode_image(jpeg, upright=False).shape == (*SHAPE, 3)


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_what_the_core_does_not_read_is_turned_too(orientation, jpegtran):
    """Arithmetic coding and other formats have the same way up and the same crops."""
    jpeg = turned(orientation)
    arithmetic = jpegtran(jpeg, "-arithmetic", "-copy", "all")
    for how in ({}, {"crop": (3, 8, 31, 30)}, {"layout": "chw"}):
        assert np.array_equal(decode_image(arithmetic, **how), decode_image(jpeg, **how))
    picture = Image.fromarray(make_pixels(1, *SHAPE))
    for kind in ("PNG", "TIFF"):
        data = saved(picture, kind, exif=exif(orientation))
        assert np.array_equal(decode_image(data), by_pillow(data))
        crop = ImageDecoder(None, "center", layout="hwc", return_geometry=True)(data)
        y, x, height, width = crop.geometry.crop.tolist()
        assert np.array_equal(crop.pixels, by_pillow(data)[y : y + height, x : x + width])


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_a_crop_is_a_part_of_the_upright_picture(orientation):
    """Without a resize a crop is exactly that part; boxes outside of the upright picture are
    refused.
    """
    jpeg = turned(orientation)
    upright = by_pillow(jpeg)
    height, width = upright.shape[:2]
    rng = np.random.default_rng(orientation)
    for _ in range(20):
        y, x = rng.integers(0, height), rng.integers(0, width)
        h, w = rng.integers(1, height - y + 1), rng.integers(1, width - x + 1)
        got = decode_image(jpeg, crop=(int(y), int(x), int(h), int(w)))
        assert np.array_equal(got, upright[y : y + h, x : x + w])
    assert decode_image(jpeg, crop=(height - 1, width - 1, 1, 1)).shape == (1, 1, 3)
    with pytest.raises(ValueError, match="crop"):
        decode_image(jpeg, crop=(height - 1, 0, 2, 1))


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("layout", ["hwc", "chw"])
def test_resized_crops_are_those_of_the_upright_picture(orientation, layout):
    """Crops, views and mirror images are drawn in the upright picture: they are what a JPEG gives
    whose pixels were turned before it was made.
    """
    decoder = ImageDecoder(
        views=[View(24, 2), View((17, 40), crop="center"), View((9, 30), crop=None)],
        flip=0.5,
        layout=layout,
        return_geometry=True,
    )
    jpeg = turned(orientation, quality=98, subsampling=0)
    upright = saved(Image.fromarray(by_pillow(jpeg)), "JPEG", quality=100, subsampling=0)
    for key in range(4):
        pixels, geometry = decoder(jpeg, key)
        others, other_geometry = decoder(upright, key)
        for one, other, where, other_where in zip(
            pixels, others, geometry, other_geometry, strict=True
        ):
            assert one.shape == other.shape
            mse = np.mean((one.astype(float) - other) ** 2)
            assert 10 * np.log10(255**2 / max(mse, 1e-9)) > 38
            for part, other_part in zip(where, other_where, strict=True):
                assert np.array_equal(part, other_part)


def test_stored_pixels_are_there_for_who_asks():
    """``upright=False`` ignores the orientation: pixels and geometry are as stored."""
    jpeg = turned(6)
    stored = np.asarray(Image.open(io.BytesIO(jpeg)))
    assert np.array_equal(decode_image(jpeg, upright=False), stored)
    assert np.array_equal(JpegHandler("rgb8", upright=False)(".jpg", jpeg), stored)
    found = ImageDecoder(24, "random", upright=False, return_geometry=True)(jpeg, 0)
    assert found.geometry.size.tolist() == list(SHAPE)


@pytest.mark.parametrize(
    "damage",
    [
        lambda tag: tag.replace(b"MM\0*", b"MM\0+"),
        lambda tag: tag.replace(b"\x01\x12\x00\x03", b"\x01\x12\x00\x09"),
        lambda tag: tag.replace(b"\0\0\0\x08", b"\xff\xff\xff\xfe"),
        lambda tag: tag.replace(b"Exif", b"Exit"),
    ],
)
def test_a_broken_tag_is_none(damage):
    """A damaged or senseless orientation is as good as none, and never an error."""
    plain = make_jpeg(3, *SHAPE)
    tagged = with_orientation(plain, 6)
    start, stop = tagged.index(b"\xff\xe1"), tagged.index(b"\xff\xdb")
    assert np.array_equal(decode_image(tagged), by_pillow(tagged))
    broken = tagged[:start] + damage(tagged[start:stop]) + tagged[stop:]
    assert broken != tagged
    assert np.array_equal(decode_image(broken), decode_image(plain))
    assert [map_jpeg(jpeg).orientation for jpeg in (tagged, broken)] == [6, 0]


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_tag_of_four_bytes_turns_the_picture(order):
    """Some writers store the orientation as a LONG, which Pillow reads like the SHORT of EXIF."""
    tiff = {"<": b"II*\0", ">": b"MM\0*"}[order]
    tiff += struct.pack(f"{order}IHHHIII", 8, 1, 0x0112, 4, 1, 6, 0)
    jpeg = make_jpeg(3, *SHAPE, exif=b"Exif\0\0" + tiff)
    assert by_pillow(jpeg).shape[:2] == SHAPE[::-1]
    assert np.array_equal(decode_image(jpeg), by_pillow(jpeg))


UNITS = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}


@st.composite
def exif_headers(draw):
    """EXIF with an orientation of any type, count and place, among other entries."""
    order = draw(st.sampled_from("<>"))
    start = draw(st.integers(8, 12))
    entries, values = [], b""
    end = start + 2 + 12 * 4
    for _ in range(draw(st.integers(0, 4))):
        tag = draw(st.sampled_from([0x0112, 0x0112, 0x010F, 0x0131]))
        kind = draw(st.sampled_from([3, 3, 3, 4, *UNITS, 14]))
        count = draw(st.sampled_from([0, 1, 1, 1, 2, 3, 100]))
        number = draw(st.integers(0, 9))
        form = {1: "B", 2: "B", 3: "H", 6: "b", 7: "B", 8: "h", 11: "f", 12: "d", 16: "Q"}
        form = form.get(kind, "L")
        numbers = [number] * count if kind not in (5, 10) else [number, 1] * count
        value = struct.pack(f"{order}{len(numbers)}{form}", *numbers)
        size = UNITS.get(kind, 4) * count
        if size > 4:
            far = draw(st.sampled_from([0, 0, 0, 1 << 20]))
            value, place = b"", (end + len(values) + far, value)
            values += place[1]
            value = struct.pack(order + "L", place[0])
        entries.append(struct.pack(order + "HHL", tag, kind, count) + value.ljust(4, b"\0")[:4])
    claimed = draw(st.sampled_from([len(entries), len(entries), len(entries) + 3]))
    magic = {"<": [b"II*\0", b"II\0*"], ">": [b"MM\0*", b"MM*\0"]}[order]
    head = draw(st.sampled_from([*magic, magic[0]])) + struct.pack(order + "L", start)
    body = struct.pack(order + "H", claimed) + b"".join(entries)
    return b"Exif\0\0" + (head.ljust(start, b"\0") + body).ljust(end, b"\0") + values


@st.composite
def xmp_packets(draw):
    """XMP with an orientation as an attribute or an element, or one that is neither."""
    form = draw(
        st.sampled_from(['tiff:Orientation="%d"', "<tiff:Orientation>%d<", "Orientation%d"])
    )
    more = draw(st.sampled_from(["", "tiff:Orientation='1' ", 'tiff:Orientation="x"', "tiff:"]))
    text = f"<x:xmpmeta {more}{form % draw(st.integers(0, 9))}"
    return b"http://ns.adobe.com/xap/1.0/\0" + text.encode()


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    exif=st.one_of(st.none(), exif_headers()),
    xmp=st.lists(xmp_packets(), max_size=2),
    cut=st.one_of(st.none(), st.integers(7, 60)),
    first=st.booleans(),
)
@example(  # an entry that is there twice, the second time beyond the end
    exif=b"Exif\0\0II*\0\x08\0\0\0\3\0\x0f\1\3\0\1\0\0\0\0\0\0\0\x0f\1\3\0\3\0\0\0:\0\x10\0"
    b"\x12\1\3\0\1\0\0\0\2\0\0\0" + bytes(20),
    xmp=[],
    cut=None,
    first=False,
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_any_header_turns_a_picture_as_pillow_does(exif, xmp, cut, first):
    """Byte order, type, count and place of the tag, EXIF in two segments, and XMP where EXIF has
    no orientation, mean what they mean to Pillow, in the index and to every decoder.
    """
    payloads = [exif] if exif else []
    if exif and cut:
        payloads = [exif[:cut], exif[:6] + exif[cut:]]
    payloads = [*xmp, *payloads] if first else [*payloads, *xmp]
    segments = [b"\xff\xe1" + (2 + len(body)).to_bytes(2) + body for body in payloads]
    plain = make_jpeg(5, 16, 24)
    jpeg = plain[:2] + b"".join(segments) + plain[2:]
    expected = by_pillow(with_orientation(plain, number_by_pillow(jpeg)))
    assert np.array_equal(decode_image(jpeg), expected)
    assert np.array_equal(decode_image([jpeg[:40], jpeg[40:]]), expected)
    indexed = encode_jpeg(jpeg)
    prefix = with_orientation(indexed.pieces[0], max(indexed.orientation, 1))
    assert decode_image(prefix).shape == expected.shape
    assert np.array_equal(
        ImageDecoder(layout="hwc")(with_orientation(plain, max(indexed.orientation, 1))), expected
    )


def test_photographs_of_cameras(data_folder):
    """Photographs that cameras and phones wrote with an orientation are Pillow's, bit for bit."""
    seen = set()
    for path in sorted((data_folder / "odd").iterdir()):
        jpeg = path.read_bytes()
        try:
            orientation = map_jpeg(jpeg).orientation
            number = number_by_pillow(jpeg)
        except (PCRError, OSError, Image.DecompressionBombError):
            continue
        assert max(orientation, 1) == number, path.name
        if orientation > 1:
            assert np.array_equal(decode_image(jpeg), by_pillow(jpeg)), path.name
            seen.add(orientation)
    assert len(seen) > 2


# --- every integration


def by_loader(folder, scan, **options):
    dataset = PCRDataset(folder, scan=scan, decoder=ImageDecoder(layout="hwc"))
    for batch in PCRLoader(dataset, 3, drop_last=False, **options):
        yield from zip(batch["__key__"], map(np.asarray, batch["jpg"]), strict=True)


def by_webdataset(folder, scan, stage):
    urls = open_dataset(folder)[1]
    samples = stage(wds.WebDataset(urls, shardshuffle=False).pcr_scan(scan))
    return ((sample["__key__"], sample["jpg"]) for sample in samples)


def by_dali(folder, scan):
    dataset = PCRDataset(folder, scan=scan, fields=("__key__", "jpg"))
    for keys, jpegs in DaliSource(PCRLoader(dataset, 3, drop_last=False)):
        for key, jpeg in zip(keys, jpegs, strict=True):
            yield bytes(key).decode(), jpeg.tobytes()


def by_huggingface(folder, scan):
    rows = hf.load_dataset(folder, scan=scan, streaming=True)
    for row in rows.cast_column("jpg", datasets.Image(decode=False)):
        yield row["__key__"], row["jpg"]["bytes"]


def by_export(folder, scan, *options):
    with tempfile.TemporaryDirectory() as out:
        assert main(["export", folder, out, "--scan", str(scan), *options]) == 0
        for path in pathlib.Path(out).rglob("*.jpg"):
            yield path.stem, path.read_bytes()


# Each gives (key, pixels), or (key, JPEG) for another decoder.
WAYS = {
    "loader": by_loader,
    "threads": partial(by_loader, threads=2),
    "pcr_decode": partial(by_webdataset, stage=lambda found: found.pcr_decode(layout="hwc")),
    "JpegHandler": partial(by_webdataset, stage=lambda found: found.decode(JpegHandler("rgb8"))),
    "pcr_scan": partial(by_webdataset, stage=iter),
    "Grain": lambda folder, scan: (
        (sample["__key__"], sample["jpg"]) for sample in PCRSource(folder, scan=scan)
    ),
    "DALI": by_dali,
    "datasets": by_huggingface,
    "export": by_export,
    "export --baseline": lambda folder, scan: by_export(folder, scan, "--baseline"),
}


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_the_images(folder, scan, way):
    """Pixels are upright, and JPEGs for other decoders say which way up they are."""
    found = dict(WAYS[way](folder, scan))
    assert found.keys() == expected(folder, scan).keys()
    for key, upright in expected(folder, scan).items():
        image = found[key]
        if isinstance(image, bytes):
            number = int(key[1:])
            assert max(map_jpeg(image).orientation, 1) == (number if number < 9 else 1)
            assert (b"camera" in image) == (scan == "full" and number < 9)
            image = decode_image(image)
        assert np.array_equal(image, upright), key


def test_sizes_are_of_upright_images(folder):
    """A dataset says the sizes of upright pictures, and ``datasets`` turns images itself."""
    upright = expected(folder, "full")
    shapes = [pixels.shape[:2] for pixels in upright.values()]
    assert list(map(tuple, PCRDataset(folder).sizes)) == shapes
    for row in hf.load_dataset(folder, streaming=True):
        assert np.array_equal(np.asarray(row["jpg"]), upright[row["__key__"]])


def test_buckets(folder):
    """Photographs on their side are in the bucket of the picture that training sees."""
    buckets = Buckets(area=32 * 32, multiple=8)
    loader = PCRLoader(PCRDataset(folder, decoder=ImageDecoder()), 1, buckets=buckets)
    shapes = {batch["__key__"][0]: batch["jpg"].shape[2:] for batch in loader}
    for key, (height, width) in shapes.items():
        assert (height > width) == (5 <= int(key[1:]) <= 8)
    with pytest.raises(ValueError, match="upright decoder"):
        PCRLoader(PCRDataset(folder, decoder=ImageDecoder(upright=False)), 1, buckets=buckets)


def test_files_that_are_kept_and_lists(tmp_path, jpegtran):
    """A list of images, and files that cannot be layered, are turned as others are."""
    odd = jpegtran(turned(6), "-arithmetic", "-copy", "all")
    png = saved(Image.fromarray(make_pixels(1, *SHAPE)), "PNG", exif=exif(8))
    with ShardWriter(tmp_path / "png") as writer:
        writer.write({"__key__": "a", "png": png})
    dataset = PCRDataset(tmp_path / "png", decoder=ImageDecoder(layout="hwc"))
    (batch,) = PCRLoader(dataset, 1)
    assert np.array_equal(batch["png"][0], by_pillow(png))
    with ShardWriter(tmp_path / "list") as writer:
        writer.write({"__key__": "a", "views.jpg": [turned(3), turned(8), odd]})
    for image in (ImageDecoder(16), ImageDecoder()):
        dataset = PCRDataset(tmp_path / "list", scan=10, decoder=image)
        (batch,) = PCRLoader(dataset, 1, threads=1)
        for pixels, jpeg in zip(batch["views.jpg"][0], map(turned, (3, 8, 6)), strict=True):
            assert np.array_equal(np.asarray(pixels), image(jpeg))
