"""Colors are the same at every scan, and right where an ICC profile is applied."""

import io
import struct

import numpy as np
import pytest
import webdataset as wds
from PIL import Image, ImageCms
from support import run_encode, write_files

from pcrshard import (
    ImageDecoder,
    JpegHandler,
    PCRDataset,
    PCRLoader,
    Shard,
    ShardWriter,
    View,
    decode_image,
    open_dataset,
)
from pcrshard.cli.main import main
from pcrshard.errors import FormatError
from pcrshard.testing import make_jpeg

SCANS = (1, 2, 5, 10, "full")
# Chromaticities of red, green and blue adapted to D50, as XYZ, and the gamma.
SRGB = ((0.4361, 0.2225, 0.0139), (0.3851, 0.7169, 0.0971), (0.1431, 0.0606, 0.7141))
ADOBE = ((0.6097, 0.3111, 0.0195), (0.2053, 0.6257, 0.0609), (0.1492, 0.0632, 0.7446))
P3 = ((0.5151, 0.2412, -0.0011), (0.2920, 0.6922, 0.0419), (0.1571, 0.0666, 0.7841))


def fixed(*values):
    return b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def profile(primaries, gamma, note="made"):
    """An ICC profile of version 2 by a matrix and a curve (ICC.1 8.3.2), by hand."""
    curve = b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256)) + bytes(2)
    text = note.encode() + b"\0"
    tags = {
        b"desc": b"desc" + bytes(4) + struct.pack(">I", len(text)) + text + bytes(78),
        b"cprt": b"text" + bytes(4) + text,
        b"wtpt": b"XYZ " + bytes(4) + fixed(0.9642, 1, 0.8249),
        **{
            name: b"XYZ " + bytes(4) + fixed(*xyz)
            for name, xyz in zip((b"rXYZ", b"gXYZ", b"bXYZ"), primaries, strict=True)
        },
        **dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve),
    }
    start = 128 + 4 + 12 * len(tags)
    table, data = struct.pack(">I", len(tags)), b""
    for name, value in tags.items():
        table += name + struct.pack(">II", start + len(data), len(value))
        data += value + bytes(-len(value) % 4)
    body = table + data
    head = struct.pack(
        ">I4sI4s4s4s", 128 + len(body), b"test", 0x02400000, b"mntr", b"RGB ", b"XYZ "
    )
    head += bytes(12) + b"acsp" + bytes(28) + fixed(0.9642, 1, 0.8249)
    return head.ljust(128, b"\0") + body


PROFILES = [
    profile(primaries, gamma, f"made {number}" * (1 + number))
    for number, (primaries, gamma) in enumerate(
        (primaries, gamma) for primaries in (SRGB, ADOBE, P3) for gamma in (1.0, 1.8, 2.2)
    )
]


def by_pillow(jpeg):
    """Upright pixels in sRGB by Pillow's ImageCms, (H, W, 3)."""
    picture = Image.open(io.BytesIO(jpeg))
    source = ImageCms.ImageCmsProfile(io.BytesIO(picture.info["icc_profile"]))
    target = ImageCms.createProfile("sRGB")
    return np.asarray(ImageCms.profileToProfile(picture, source, target, outputMode="RGB"))


def profile_of(jpeg):
    return Image.open(io.BytesIO(jpeg)).info.get("icc_profile")


def close(found, expected):
    return np.abs(np.asarray(found).astype(int) - np.asarray(expected)).max() <= 1


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A shard of images with each of the profiles, one without, and a PNG with one."""
    folder = tmp_path_factory.mktemp("color") / "pcr"
    png = io.BytesIO()
    Image.new("RGB", (40, 30), (60, 200, 60)).save(png, "PNG", icc_profile=PROFILES[4])
    with ShardWriter(folder) as writer:
        for number, icc in enumerate([*PROFILES, None]):
            jpeg = make_jpeg(number, 30, 40, icc_profile=icc, quality=95)
            writer.write({"__key__": f"k{number:02}", "jpg": jpeg})
        writer.write({"__key__": "png", "png": png.getvalue()})
    return folder


@pytest.mark.parametrize("scan", SCANS)
def test_every_scan_has_the_profile(photos, scan):
    """Whatever manages colors finds the profile of the source in an image of any scan."""
    samples = list(Shard(photos / "data-000000.tar").samples(scan))
    assert [profile_of(sample["jpg"]) for sample in samples[:-1]] == [*PROFILES, None]
    assert profile_of(samples[-1]["png"]) == PROFILES[4]


@pytest.mark.parametrize("scan", [10, "full"])
def test_srgb_is_what_pillow_converts_to(photos, scan):
    """The colors of all integrations are those of Pillow's ImageCms, to within 1."""
    samples = list(Shard(photos / "data-000000.tar").samples(scan))
    expected = [by_pillow(sample["jpg"]) for sample in samples[:9]]
    decoder = ImageDecoder(color="srgb", layout="hwc")
    dataset = PCRDataset(photos, scan=scan, decoder=decoder)
    handler = JpegHandler("rgb8", color="srgb")
    stage = wds.WebDataset(str(photos / "data-000000.tar"), shardshuffle=False).pcr_scan(scan)
    decoded = [sample.get("jpg") for sample in stage.pcr_decode(decoder)]
    for number, pixels in enumerate(expected):
        jpeg = samples[number]["jpg"]
        assert close(decode_image(jpeg, color="srgb"), pixels)
        assert close(dataset[number]["jpg"], pixels)
        assert close(handler("jpg", jpeg), pixels)
        assert close(decoded[number], pixels)
    assert close(dataset[10]["png"], by_pillow(samples[10]["png"]))
    # Without a profile, and by default, the numbers are those of the file.
    assert np.array_equal(dataset[9]["jpg"], decode_image(samples[9]["jpg"]))
    as_stored = decode_image(samples[4]["jpg"])
    assert not close(as_stored, expected[4])
    assert np.array_equal(as_stored, np.asarray(Image.open(io.BytesIO(samples[4]["jpg"]))))


@pytest.mark.parametrize("layout", ["chw", "hwc"])
@pytest.mark.parametrize("views", [(), [View(16, 2), View(8)]])
@pytest.mark.parametrize("scan", [2, "full"])
def test_batches_have_the_colors_of_single_samples(photos, layout, views, scan):
    """A batch that threads decode is converted as each of its samples is, crops and views too."""
    options = {"views": views} if views else {"size": 16, "crop": "random"}
    decoder = ImageDecoder(color="srgb", layout=layout, flip=0.5, **options)
    dataset = PCRDataset(photos, scan=scan, decoder=decoder).subset(range(10))
    loaders = [PCRLoader(dataset, 10, shuffle=False, threads=threads, seed=1) for threads in (0, 2)]
    first, second = (next(iter(loader))["jpg"] for loader in loaders)
    for one, other in zip(first, second, strict=True) if views else [(first, second)]:
        assert np.array_equal(one, other)
    stored = PCRDataset(photos, scan=scan, decoder=16).subset([3])
    converted = PCRDataset(photos, scan=scan, decoder=ImageDecoder(16, color="srgb")).subset([3])
    assert not close(stored[0]["jpg"], converted[0]["jpg"])


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.long)])
def test_odd_profiles(data_folder, tmp_path, every):
    """Profiles of gray and CMYK, in several chunks, out of order, broken: right or left alone, and
    the same at every scan.
    """
    found = 0
    files = sorted((data_folder / "odd").glob("valid-*"))
    profiled = [path for path in files if "icc" in path.name]
    for path in sorted({*files[::every], *profiled}):
        if path.name == "valid-icc-after-sof.jpg":
            continue  # a chunk before the frame header, and again after it, where Pillow stops
        jpeg = path.read_bytes()
        try:
            expected = by_pillow(jpeg) if profile_of(jpeg) else None
        except (ImageCms.PyCMSError, OSError):
            expected = None
        folder = tmp_path / path.stem
        try:
            with ShardWriter(folder) as writer:
                writer.write({"__key__": "k", "jpg": jpeg})
        except FormatError:
            continue
        shard = Shard(folder / "data-000000.tar")
        images = [shard.sample(0, scan)["jpg"] for scan in SCANS]
        assert {profile_of(image) for image in images} == {profile_of(jpeg)}, path.name
        for image in images[-2:]:
            pixels = decode_image(image, color="srgb", upright=False)
            if expected is not None:
                assert close(pixels, expected), path.name
        found += expected is not None
    assert found >= 5


def test_wide_colors_are_counted(tmp_path, capsys):
    """`encode` and `info` say how many images need their profile, so that a user knows."""
    icc = {"a.jpg": PROFILES[4], "b.jpg": PROFILES[8], "c.jpg": None}
    src = write_files(
        tmp_path / "src",
        {name: make_jpeg(0, icc_profile=each) for name, each in icc.items()},
    )
    run_encode(src, tmp_path / "pcr")
    assert open_dataset(tmp_path / "pcr")[0].counts.wide == 2
    assert main(["info", str(tmp_path / "pcr")]) == 0
    assert "wide color: 2" in capsys.readouterr().out
