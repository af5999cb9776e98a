"""One shard as a task: bad images are named or skipped, others converted, memory bounded."""

import io
import json
import pathlib
import subprocess
import sys
import tarfile

import numpy as np
import pytest
from encode_support import (
    make_tar,
    read_samples,
    save_image,
)
from PIL import Image
from support import run_encode

from pcrshard import Shard, open_dataset
from pcrshard.cli.main import main
from pcrshard.encoding.resume_journal import JOURNAL, KEPT, SKIPPED
from pcrshard.errors import (
    CorruptJpeg,
    EncodeError,
    FormatError,
    PCRError,
)
from pcrshard.jpeg import pixels
from pcrshard.testing import make_jpeg


def test_skip_lists_what_it_skips(mixed_folder, tmp_path):
    """--on-error skip encodes the good images and lists each bad one with its file and the
    reason.
    """
    index = run_encode(mixed_folder, tmp_path / "dst", on_error="skip", num_shards=2)
    rows = [json.loads(line) for line in (tmp_path / "dst" / SKIPPED).read_text().splitlines()]
    assert index.num_samples == 4
    assert {pathlib.Path(row["source"]).name for row in rows} == {"cut.jpg", "empty.jpg", "png.png"}
    assert all(row["key"] and row["reason"] and "\n" not in row["reason"] for row in rows)
    assert read_samples(tmp_path / "dst").keys() == {f"good{i}" for i in range(4)}


@pytest.mark.parametrize("workers", [1, 2])
def test_raise_names_the_file_in_one_line(mixed_folder, tmp_path, workers):
    """By default a bad image stops the run with one line: the file, the reason, the option that
    would go on.
    """
    for name in ("empty.jpg", "png.png"):
        (mixed_folder / name).unlink()
    with pytest.raises(FormatError) as caught:
        run_encode(mixed_folder, tmp_path / "dst", num_shards=2, workers=workers)
    message = str(caught.value)
    assert all(
        word in message for word in (str(mixed_folder / "cut.jpg"), "no EOI", "--on-error skip")
    )
    assert "\n" not in message
    assert not (tmp_path / "dst" / "pcr.json").exists()


def test_nothing_is_left_of_a_dataset_of_bad_images(tmp_path):
    """When every image is bad the error says so and names the report; there is no dataset."""
    (tmp_path / "src").mkdir()
    for i in range(3):
        (tmp_path / "src" / f"{i}.jpg").write_bytes(b"bad")
    with pytest.raises(EncodeError, match=rf"every image was skipped.*{SKIPPED}"):
        run_encode(tmp_path / "src", tmp_path / "dst", on_error="skip", num_shards=2)
    assert {p.name for p in (tmp_path / "dst").iterdir()} == {JOURNAL, SKIPPED}
    assert len((tmp_path / "dst" / SKIPPED).read_text().splitlines()) == 3


def test_a_png_is_refused_with_the_option_named(tmp_path):
    """A PNG is not converted unasked."""
    save_image(tmp_path / "src" / "a.png")
    with pytest.raises(CorruptJpeg, match=r"PNG.*--reencode-quality.*a\.png"):
        run_encode(tmp_path / "src", tmp_path / "dst")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
def test_reencode_quality_converts(tmp_path, mode):
    """With the option, PNGs of any kind become JPEGs that look the same."""
    save_image(tmp_path / "src" / "a.png", mode)
    run_encode(tmp_path / "src", tmp_path / "dst", reencode_quality=95)
    decoded = pixels.decode(read_samples(tmp_path / "dst")["a"]["jpg"])
    expected = 255 if mode == "1" else 128
    assert decoded.shape == (20, 30, 3)
    assert abs(decoded.astype(int) - expected).max() <= 6


def test_reencode_leaves_jpegs_alone(synthetic_folder, dataset, tmp_path):
    """The option touches only what is not a JPEG."""
    run_encode(synthetic_folder, tmp_path, num_shards=4, reencode_quality=50)
    assert read_samples(tmp_path) == read_samples(dataset)


def test_of_two_convertible_fields_the_first_becomes_the_image(tmp_path):
    """The other one is stored unchanged."""
    png, bmp = (save_image(tmp_path / name).read_bytes() for name in ("a.png", "a.bmp"))
    url = make_tar(tmp_path / "a.tar", [("k.png", png), ("k.bmp", bmp)])
    run_encode(url, tmp_path / "dst", reencode_quality=90)
    sample = read_samples(tmp_path / "dst")["k"]
    assert (sample.keys(), sample["bmp"]) == ({"__key__", "jpg", "bmp"}, bmp)


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [(80, 120, (40, 60)), (120, 80, (60, 40)), (30, 90, (30, 90)), (40, 40, (40, 40))],
)
def test_resize_short(tmp_path, height, width, expected):
    """Larger images get the shorter side asked for; smaller ones stay as they are, lossless."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.jpg").write_bytes(jpeg := make_jpeg(1, height, width, quality=95))
    run_encode(tmp_path / "src", tmp_path / "dst", resize_short=40)
    decoded = pixels.decode(read_samples(tmp_path / "dst")["a"]["jpg"])
    assert decoded.shape[:2] == expected
    if expected == (height, width):
        assert np.array_equal(decoded, pixels.decode(jpeg))


def test_a_missing_file_of_a_list(tmp_path):
    """A list that names a file that is not there stops with that file's name."""
    (tmp_path / "a.tsv").write_text("none.jpg\t1\n")
    with pytest.raises(PCRError, match=r"none\.jpg"):
        run_encode(tmp_path / "a.tsv", tmp_path / "dst")


MEMORY = """
import resource, sys
from pcrshard import EncodeOptions, encode
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.testing import make_jpeg
encode_jpeg(make_jpeg())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
index = encode(sys.argv[1], sys.argv[2], EncodeOptions(num_shards=1), workers=1)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024 / index.shards[0].shard_bytes, index.shards[0].shard_bytes)
"""


def test_a_worker_holds_less_than_three_shards(photos, tmp_path):
    """Encoding a shard of 30 MB of photographs takes at most three times its size in memory."""
    paths = [path for path in sorted((photos / "imagenet").rglob("*")) if path.is_file()]
    size = 0
    (tmp_path / "src").mkdir()
    for i, path in enumerate(paths):
        if size > 30e6:
            break
        size += path.stat().st_size
        (tmp_path / "src" / f"{i}.jpg").symlink_to(path)
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, tmp_path / "src", tmp_path / "dst"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    shards, shard_bytes = map(float, result.stdout.split())
    assert size > 25e6
    assert shard_bytes > 20e6
    assert shards < 3, f"{shards:.2f} shards of {shard_bytes / 1e6:.0f} MB"


def odd_source(folder):
    """A JPEG, one of 12 bits' worth of noise, a PNG that calls itself JPEG, a PNG, and a text."""
    folder.mkdir()
    png = io.BytesIO()
    Image.new("RGB", (20, 30), "red").save(png, "PNG")
    files = {
        "good.jpg": make_jpeg(1, 20, 30),
        "broken.jpg": make_jpeg(2, 20, 30)[:200],
        "liar.jpg": png.getvalue(),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return files


def test_files_are_kept_as_they_are(tmp_path):
    """What cannot be rearranged is stored byte for byte, listed by its reason, and there from scan
    1 on.
    """
    files = odd_source(tmp_path / "src")
    run_encode(tmp_path / "src", tmp_path / "dst", on_error="keep", num_shards=1)
    rows = [json.loads(line) for line in (tmp_path / "dst" / KEPT).read_text().splitlines()]
    assert {(row["key"], row["outcome"]) for row in rows} == {("broken", "kept"), ("liar", "kept")}
    assert "got a PNG file" in next(row["reason"] for row in rows if row["key"] == "liar")
    assert not (tmp_path / "dst" / SKIPPED).exists()
    index, (url,) = open_dataset(str(tmp_path / "dst"))
    for scan in (1, "full"):
        kept = {s["__key__"]: s["jpg"] for s in Shard(url).samples(scan)}
        assert kept["broken"] == files["broken.jpg"]
        assert kept["liar"] == files["liar.jpg"]
    assert index.num_samples == 3


def test_files_are_encoded_again(tmp_path):
    """What can be decoded becomes a JPEG; what cannot is left out, and both are listed."""
    odd_source(tmp_path / "src")
    run_encode(tmp_path / "src", tmp_path / "dst", on_error="reencode", num_shards=1)
    rows = [json.loads(line) for line in (tmp_path / "dst" / KEPT).read_text().splitlines()]
    assert [(row["key"], row["outcome"]) for row in rows] == [("liar", "reencoded")]
    rows = [json.loads(line) for line in (tmp_path / "dst" / SKIPPED).read_text().splitlines()]
    assert [row["key"] for row in rows] == ["broken"]
    samples = {s["__key__"]: s for s in Shard(str(tmp_path / "dst" / "data-000000.tar")).samples()}
    image = Image.open(io.BytesIO(samples["liar"]["jpg"]))
    assert (image.format, image.size) == ("JPEG", (20, 30))


def test_another_treatment_makes_a_shard_again(tmp_path):
    """A run that goes on with ``keep`` after ``skip`` stores what the first one left out."""
    odd_source(tmp_path / "src")
    run_encode(tmp_path / "src", tmp_path / "dst", on_error="skip", num_shards=1)
    assert open_dataset(str(tmp_path / "dst"))[0].num_samples == 1
    run_encode(tmp_path / "src", tmp_path / "dst", on_error="keep", num_shards=1, resume=True)
    assert open_dataset(str(tmp_path / "dst"))[0].num_samples == 3
    assert (tmp_path / "dst" / SKIPPED).read_text() == ""


def test_a_webdataset_of_anything_comes_back(tmp_path):
    """PNG, FLAC and other fields convert without loss: the exported tar has the same members."""
    png = io.BytesIO()
    Image.new("L", (9, 9)).save(png, "PNG")
    members = {
        "a.png": png.getvalue(),
        "a.cls": b"3",
        "b.flac": b"fLaC" + bytes(50),
        "b.jpg": b"no JPEG at all",
        "b.jpg.txt": b"",
        "c.jpg": make_jpeg(1, 10, 10),
    }
    (tmp_path / "src").mkdir()
    with tarfile.open(tmp_path / "src" / "data-000000.tar", "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    run_encode(tmp_path / "src", tmp_path / "dst", on_error="keep", num_shards=1)
    assert main(["export", str(tmp_path / "dst"), str(tmp_path / "out"), "--format", "wds"]) == 0
    with tarfile.open(tmp_path / "out" / "data-000000.tar") as tar:
        found = {info.name: tar.extractfile(info).read() for info in tar}
    assert found.keys() == members.keys()
    changed = {name for name in members if found[name] != members[name]}
    assert changed == {"c.jpg"}  # progressive now


def test_every_odd_file_is_kept(data_folder, tmp_path):
    """Of a crawl's odd files none is refused: each comes back byte for byte, or with its pixels."""
    odd = data_folder / "odd"
    files = {path.name: path.read_bytes() for path in odd.iterdir() if path.suffix != ".md"}
    run_encode(odd, tmp_path / "dst", on_error="keep")
    command = ["verify", str(tmp_path / "dst"), "--against", str(odd)]
    assert main(command) == 0
    assert main(["export", str(tmp_path / "dst"), str(tmp_path / "out")]) == 0
    out = [path.read_bytes() for path in (tmp_path / "out").iterdir()]
    kept = len((tmp_path / "dst" / KEPT).read_text().splitlines())
    assert len(out) >= 214
    assert sum(data in files.values() for data in out) >= kept
