"""Photographs are the right way up, through every integration and at every scan."""

import functools
import io

import datasets
import numpy as np
import pytest
import webdataset as wds
from PIL import Image, ImageOps
from support import saved

import pcrshard.hf
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
)
from pcrshard.cli.main import main
from pcrshard.integrations.dali import DaliSource
from pcrshard.integrations.grain import PCRSource
from pcrshard.jpeg.markers import map_jpeg
from pcrshard.jpeg.orientation import with_orientation
from pcrshard.jpeg.split import join_scans, split_scans
from pcrshard.native.pool import draw_key
from pcrshard.testing import make_jpeg, make_pixels

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dataset of eight orientations, of one picture without EXIF, and of a PNG."""
    path = tmp_path_factory.mktemp("turned")
    with ShardWriter(str(path), samples_per_shard=5) as writer:
        for orientation in ORIENTATIONS:
            jpeg = turned(orientation)
            writer.write({"__key__": f"k{orientation}", "jpg": jpeg, "cls": orientation})
        writer.write({"__key__": "k9", "jpg": make_jpeg(9, *SHAPE, quality=90), "cls": 9})
    return str(path)


def urls_of(folder):
    return pcrshard.open_dataset(folder)[1]


@functools.cache
def expected(folder, scan):
    """Upright pixels of each sample at a scan, by its key: of libjpeg-turbo's smoothed ones."""
    found = {}
    for url in urls_of(folder):
        with Shard(url).load(scan) as prefix:
            for sample, orientation in zip(prefix.samples(), prefix.index.orientation, strict=True):
                stored = decode_image(sample["jpg"], upright=False)
                picture = Image.fromarray(stored)
                picture.getexif()[0x0112] = max(int(orientation), 1)
                found[sample["__key__"]] = np.asarray(ImageOps.exif_transpose(picture))
    return found


def check(folder, scan, samples):
    """(key, (H, W, 3)) of each sample."""
    found = dict(samples)
    assert set(found) == {f"k{number}" for number in range(1, 10)}
    for key, pixels in expected(folder, scan).items():
        assert np.array_equal(found[key], pixels), (key, scan)


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
def test_arithmetic_coding_is_turned_too(orientation, jpegtran):
    """What the core leaves to libjpeg-turbo has the same way up, crops and sizes."""
    jpeg = turned(orientation)
    arithmetic = jpegtran(jpeg, "-arithmetic", "-copy", "all")
    box = (3, 8, 31, 30)
    for how in ({}, {"crop": box}, {"layout": "chw"}):
        assert np.array_equal(decode_image(arithmetic, **how), decode_image(jpeg, **how))
    small = ImageDecoder(20, "random", flip=0.5)
    for key in range(4):
        difference = np.abs(small(arithmetic, key).astype(int) - small(jpeg, key))
        assert difference.mean() < 1.5


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_other_formats_are_turned_too(orientation, kind):
    """A PNG or WebP with an orientation is shown as Pillow shows it."""
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(Image.fromarray(make_pixels(1, *SHAPE)), kind, exif=exif(orientation), **options)
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
    """``upright=False`` ignores the orientation: pixels, crops and geometry are as stored."""
    jpeg = turned(6)
    plain = ImageDecoder(24, "random", flip=0.5, upright=False, return_geometry=True)
    header, scans, _ = split_scans(turned(6, progressive=True))
    bare = join_scans(header, scans)
    for key in range(4):
        one, other = plain(turned(6, progressive=True), key), plain(bare, key)
        assert np.array_equal(one.pixels, other.pixels)
        assert one.geometry.size.tolist() == list(SHAPE)
    assert np.array_equal(
        decode_image(jpeg, upright=False), np.asarray(Image.open(io.BytesIO(jpeg)))
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda tag: tag.replace(b"MM\0*", b"MM\0+"),
        lambda tag: tag.replace(b"\x01\x12\x00\x03", b"\x01\x12\x00\x09"),
        lambda tag: tag[:-7] + b"\0\x09" + tag[-5:],
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


def test_photographs_of_cameras(data_folder):
    """Photographs that cameras and phones wrote with an orientation are Pillow's, bit for bit."""
    seen = set()
    for path in sorted((data_folder / "odd").iterdir()):
        jpeg = path.read_bytes()
        try:
            orientation = map_jpeg(jpeg).orientation
        except PCRError:
            continue
        if orientation > 1:
            assert np.array_equal(decode_image(jpeg), by_pillow(jpeg)), path.name
            seen.add(orientation)
    assert len(seen) > 2


# --- every integration


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("threads", [0, 2])
def test_the_loader(folder, scan, threads):
    """Batches at a size, whole images of any size, and single samples; and their sizes."""
    dataset = PCRDataset(folder, scan=scan, decoder=ImageDecoder(layout="hwc"))
    check(
        folder,
        scan,
        (
            (key, np.asarray(image))
            for batch in PCRLoader(dataset, 3, drop_last=False, threads=threads)
            for key, image in zip(batch["__key__"], batch["jpg"], strict=True)
        ),
    )
    check(folder, scan, ((dataset[i]["__key__"], np.asarray(dataset[i]["jpg"])) for i in range(9)))
    shapes = [expected(folder, scan)[key].shape[:2] for key in dataset.keys]
    assert list(map(tuple, dataset.sizes)) == shapes
    stored = PCRDataset(folder, decoder=ImageDecoder(upright=False))
    assert {tuple(size) for size in stored.sizes} == {SHAPE}
    decoder = ImageDecoder((30, 40), "random", flip=0.5)
    jpegs = PCRDataset(folder, scan=scan)
    dataset = PCRDataset(folder, scan=scan, decoder=decoder)
    for batch in PCRLoader(dataset, 3, drop_last=False, threads=threads):
        for key, image in zip(batch["__key__"], batch["jpg"], strict=True):
            draws = draw_key(0, 0, int(key[1:]) - 1)
            assert np.array_equal(image, decoder(jpegs[key]["jpg"], draws))


@pytest.mark.parametrize("scan", SCANS)
def test_samples_say_which_way_up_they_are(folder, scan):
    """A reader's JPEGs have their orientation at every scan, for any program that looks for it."""
    for url in urls_of(folder):
        shard = Shard(url)
        for sample in shard.samples(scan):
            number = int(sample["cls"])
            found = Image.open(io.BytesIO(sample["jpg"])).getexif()
            assert found.get(0x0112, 1) == (number if number < 9 else 1)
            assert ("camera" in found.values()) == (scan == "full" and number < 9)
            assert shard.sample(sample["__key__"], scan)["jpg"] == sample["jpg"]


def webdataset(folder, scan):
    return wds.WebDataset(urls_of(folder), shardshuffle=False).pcr_scan(scan)


def by_dali(folder, scan):
    dataset = PCRDataset(folder, scan=scan, fields=("__key__", "jpg"))
    for keys, jpegs in DaliSource(PCRLoader(dataset, 3, drop_last=False)):
        for key, jpeg in zip(keys, jpegs, strict=True):
            yield {"__key__": bytes(key).decode(), "jpg": jpeg.tobytes()}


WAYS = {
    "pcr_decode": lambda folder, scan: webdataset(folder, scan).pcr_decode(layout="hwc"),
    "JpegHandler": lambda folder, scan: webdataset(folder, scan).decode(JpegHandler("rgb8")),
    "samples": lambda folder, scan: (
        sample
        for url in urls_of(folder)
        for sample in Shard(url).samples(scan, decode=ImageDecoder(layout="hwc"))
    ),
    # JPEGs, for another decoder.
    "pcr_scan": webdataset,
    "Grain": lambda folder, scan: map(PCRSource(folder, scan=scan).__getitem__, range(9)),
    "DALI": by_dali,
}


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("way", WAYS)
def test_every_integration(folder, scan, way):
    """Pixels are upright, and JPEGs for other decoders say which way up they are."""
    found = {sample["__key__"]: sample["jpg"] for sample in WAYS[way](folder, scan)}
    is_encoded = way in ("pcr_scan", "Grain", "DALI")
    pixels = {key: decode_image(jpg) if is_encoded else jpg for key, jpg in found.items()}
    check(folder, scan, pixels)


def test_plain_tars(tmp_path):
    """JpegHandler and pcr_decode turn photographs of ordinary WebDatasets."""
    with wds.TarWriter(str(tmp_path / "a.tar")) as writer:
        for orientation in ORIENTATIONS:
            writer.write({"__key__": f"k{orientation}", "jpg": turned(orientation)})
    plain = wds.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False)
    for stages in (plain.pcr_decode(layout="hwc"), plain.decode(JpegHandler("rgb8"))):
        for sample in stages:
            jpeg = turned(int(sample["__key__"][1:]))
            assert np.array_equal(sample["jpg"], by_pillow(jpeg))
    stored = plain.decode(JpegHandler("rgb8", upright=False))
    assert {sample["jpg"].shape for sample in stored} == {(*SHAPE, 3)}


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("streaming", [True, False])
def test_huggingface(folder, scan, streaming, tmp_path):
    """``datasets`` turns images by what they say themselves."""
    rows = pcrshard.hf.load_dataset(
        folder, scan=scan, streaming=streaming, split="train", cache_dir=str(tmp_path)
    )
    assert isinstance(rows, datasets.IterableDataset if streaming else datasets.Dataset)
    for row in rows:
        upright = expected(folder, scan)[row["__key__"]]
        assert row["jpg"].size == upright.shape[1::-1]
        if scan == "full":  # Pillow smooths unfinished images
            assert np.array_equal(np.asarray(row["jpg"]), upright)
    encoded = rows.cast_column("jpg", datasets.Image(decode=False))
    check(folder, scan, ((row["__key__"], decode_image(row["jpg"]["bytes"])) for row in encoded))


@pytest.mark.parametrize("upright", [True, False])
def test_buckets(folder, upright):
    """Photographs on their side are in the bucket of the picture that training sees."""
    dataset = PCRDataset(folder, decoder=ImageDecoder(upright=upright))
    loader = PCRLoader(dataset, 1, buckets=Buckets(area=32 * 32, multiple=8))
    shapes = {batch["__key__"][0]: batch["jpg"].shape[2:] for batch in loader}
    for key, (height, width) in shapes.items():
        assert (height > width) == (upright and 5 <= int(key[1:]) <= 8)


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("options", [(), ("--baseline",)])
def test_export(folder, scan, options, tmp_path, capsys):
    """Exported files keep their orientation at every scan, and their pixels as stored."""
    out = tmp_path / "out"
    assert main(["export", folder, str(out), "--scan", str(scan), *options]) == 0
    capsys.readouterr()
    files = {path.stem: path.read_bytes() for path in out.rglob("*.jpg")}
    check(folder, scan, ((key, decode_image(jpeg)) for key, jpeg in files.items()))
    for number in ORIENTATIONS:
        assert max(map_jpeg(files[f"k{number}"]).orientation, 1) == number
        with Image.open(io.BytesIO(files[f"k{number}"])) as picture:
            assert picture.size == SHAPE[::-1]


def test_files_that_are_kept_and_lists(tmp_path, jpegtran):
    """A list of images, and files that cannot be layered, are turned as others are."""
    odd = jpegtran(turned(6), "-arithmetic", "-copy", "all")
    png = saved(Image.fromarray(make_pixels(1, *SHAPE)), "PNG", exif=exif(8))
    with ShardWriter(str(tmp_path / "png")) as writer:
        writer.write({"__key__": "a", "png": png})
    dataset = PCRDataset(str(tmp_path / "png"), decoder=ImageDecoder(layout="hwc"))
    (batch,) = PCRLoader(dataset, 1)
    assert np.array_equal(batch["png"][0], by_pillow(png))
    with ShardWriter(str(tmp_path / "list")) as writer:
        writer.write({"__key__": "a", "views.jpg": [turned(3), turned(8), odd]})
    for image in (ImageDecoder(16), ImageDecoder()):
        dataset = PCRDataset(str(tmp_path / "list"), scan=10, decoder=image)
        (batch,) = PCRLoader(dataset, 1, threads=1)
        for pixels, jpeg in zip(batch["views.jpg"][0], map(turned, (3, 8, 6)), strict=True):
            assert np.array_equal(np.asarray(pixels), image(jpeg))


def test_the_preview_layout(folder, tmp_path):
    """The base images of a preview have their orientation by the index, too."""
    fmt = ShardFormat(layout="preview", base=2)
    with ShardWriter(str(tmp_path), fmt=fmt) as writer:
        writer.write({"__key__": "a", "jpg": turned(6)})
    for scan in (1, 2, 10):
        sample = Shard(str(tmp_path / "data-000000.tar")).sample("a", scan)
        assert decode_image(sample["jpg"]).shape == (*SHAPE[::-1], 3)
