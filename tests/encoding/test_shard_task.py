"""One shard as a task: bad images are named or skipped, others converted, memory bounded."""

import io
import json
import pathlib
import tarfile

import numpy as np
import pytest
from encode_support import image_bytes, make_tar
from PIL import Image
from support import read_samples, run_encode, run_python, write_files

from pcrshard import EncodeOptions, encode
from pcrshard.cli.main import main
from pcrshard.encoding.resume_journal import JOURNAL, KEPT, SKIPPED
from pcrshard.errors import EncodeError, FormatError, PCRError
from pcrshard.jpeg import pixels
from pcrshard.jpeg.markers import map_jpeg
from pcrshard.jpeg.orientation import with_orientation
from pcrshard.testing import make_jpeg


def read_report(folder, name):
    """The rows of a report by key; none without it."""
    path = folder / name
    rows = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return {row["key"]: row for row in rows}


# A PNG that calls itself JPEG, and a JPEG that ends early.
ODD = {
    "good.jpg": make_jpeg(1, 20, 30),
    "broken.jpg": make_jpeg(2, 20, 30)[:200],
    "liar.jpg": image_bytes("png"),
}


@pytest.mark.parametrize(
    ("on_error", "outcomes"),
    [
        ("skip", {"broken": "skipped", "liar": "skipped"}),
        ("keep", {"broken": "undecodable", "liar": "kept"}),
        ("reencode", {"broken": "skipped", "liar": "reencoded"}),
    ],
)
def test_what_becomes_of_files_that_cannot_be_rearranged(tmp_path, on_error, outcomes):
    """They are left out, stored byte for byte, or encoded again if they can be decoded; reports
    list them by file and reason. What is kept is there from scan 1 on.
    """
    dst = tmp_path / "dst"
    run_encode(write_files(tmp_path / "src", ODD), dst, on_error=on_error, num_shards=1)
    reports = read_report(dst, SKIPPED), read_report(dst, KEPT)
    rows = reports[0] | reports[1]
    assert {key: row["outcome"] for key, row in rows.items()} == outcomes
    assert all(row["outcome"] == "skipped" for row in reports[0].values())
    assert all(row["source"] == str(tmp_path / "src" / f"{key}.jpg") for key, row in rows.items())
    assert "got PNG" in rows["liar"]["reason"]
    assert (dst / SKIPPED).exists() == ("skipped" in outcomes.values())
    for scan in (1, "full"):
        images = {key: sample["jpg"] for key, sample in read_samples(dst, scan).items()}
        left_out = {key for key, outcome in outcomes.items() if outcome == "skipped"}
        assert images.keys() == {"good", "broken", "liar"} - left_out
        for key, outcome in outcomes.items():
            assert outcome not in ("kept", "undecodable") or images[key] == ODD[f"{key}.jpg"]
    if on_error == "reencode":
        assert Image.open(io.BytesIO(images["liar"])).size == (30, 20)


@pytest.mark.parametrize("workers", [1, 2])
def test_raise_names_the_file_in_one_line(mixed_folder, tmp_path, workers):
    """By default a bad image stops the run with one line: the file, the reason, the option that
    would go on.
    """
    for name in ("empty.jpg", "png.png"):
        (mixed_folder / name).unlink()
    with pytest.raises(FormatError, match=r"no EOI.*--on-error skip") as caught:
        run_encode(mixed_folder, tmp_path / "dst", num_shards=2, workers=workers)
    assert str(mixed_folder / "cut.jpg") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "dst" / "pcr.json").exists()


def test_nothing_is_left_of_a_dataset_of_bad_images(tmp_path):
    """When every image is bad the error says so and names the report; there is no dataset."""
    src = write_files(tmp_path / "src", {f"{i}.jpg": b"bad" for i in range(3)})
    with pytest.raises(EncodeError, match=rf"every image was skipped.*{SKIPPED}"):
        run_encode(src, tmp_path / "dst", on_error="skip", num_shards=2)
    assert {p.name for p in (tmp_path / "dst").iterdir()} == {JOURNAL, SKIPPED}
    assert len(read_report(tmp_path / "dst", SKIPPED)) == 3


def test_a_listed_file_that_is_not_there_is_named(tmp_path):
    """A list may name a file that does not exist; the error says how to leave it out."""
    src = write_files(tmp_path / "src", {"a.tsv": b"none.jpg\t1\n"})
    with pytest.raises(PCRError, match=r"if they can be read, or --on-error skip.*none\.jpg"):
        run_encode(src / "a.tsv", tmp_path / "dst")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
def test_reencode_quality_converts(tmp_path, mode):
    """With the option, PNGs of any kind become JPEGs that look the same."""
    src = write_files(tmp_path / "src", {"a.png": image_bytes("png", mode)})
    run_encode(src, tmp_path / "dst", reencode_quality=95)
    decoded = pixels.decode(read_samples(tmp_path / "dst")["a"]["jpg"])
    expected = 255 if mode == "1" else 128
    assert decoded.shape == (20, 30, 3)
    assert abs(decoded.astype(int) - expected).max() <= 6


def test_reencode_leaves_jpegs_alone(synthetic_folder, dataset, tmp_path):
    """The option touches only what is not a JPEG."""
    run_encode(synthetic_folder, tmp_path, num_shards=4, reencode_quality=50)
    assert read_samples(tmp_path) == read_samples(dataset)


@pytest.mark.parametrize("others", [[], [("l.jpg", make_jpeg(1, 20, 30))]], ids=["alone", "mixed"])
@pytest.mark.parametrize(
    ("on_error", "outcome", "field"),
    [("keep", None, "png"), ("reencode", "reencoded", "jpg"), ("skip", "skipped", None)],
)
def test_an_image_of_a_tar_that_is_no_jpeg(tmp_path, on_error, outcome, field, others):
    """A sample without a JPEG stops the run before anything is written, unless it is left out,
    converted, or kept in its field.
    """
    png, dst = image_bytes("png"), tmp_path / "dst"
    tar = make_tar(tmp_path / "a.tar", [("k.png", png), ("k.cls", b"1"), *others])
    with pytest.raises(EncodeError, match=r"expected a JPEG.*png.*--on-error keep"):
        run_encode(tar, tmp_path / "stopped", num_shards=1)
    assert not list((tmp_path / "stopped").glob("data-*"))
    if not (field or others):
        with pytest.raises(EncodeError, match="expected a JPEG field"):
            run_encode(tar, dst, on_error=on_error, num_shards=1)
        return
    run_encode(tar, dst, on_error=on_error, num_shards=1)
    rows = read_report(dst, SKIPPED) | read_report(dst, KEPT)
    assert [row["outcome"] for row in rows.values()] == [outcome] * bool(outcome)
    found = read_samples(dst).get("k", {})
    assert found.keys() - {"__key__", "cls"} == {field} - {None}
    assert found.get("png", png) == png


def test_of_two_convertible_fields_the_first_becomes_the_image(tmp_path):
    """The other one, and those beside a JPEG, are stored unchanged."""
    png, bmp = image_bytes("png"), image_bytes("bmp")
    members = [("k.png", png), ("k.bmp", bmp), ("l.png", png), ("l.jpg", make_jpeg())]
    run_encode(make_tar(tmp_path / "a.tar", members), tmp_path / "dst", reencode_quality=90)
    samples = read_samples(tmp_path / "dst")
    assert (samples["k"].keys(), samples["k"]["bmp"]) == ({"__key__", "jpg", "bmp"}, bmp)
    assert (samples["l"].keys(), samples["l"]["png"]) == ({"__key__", "jpg", "png"}, png)


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [(80, 120, (40, 60)), (133, 80, (66, 40)), (30, 90, (30, 90)), (40, 40, (40, 40))],
)
def test_resize_short(tmp_path, height, width, expected):
    """Larger images get the shorter side asked for; smaller ones stay as they are, lossless; the
    way up is kept.
    """
    jpeg = with_orientation(make_jpeg(1, height, width, quality=95), 6)
    src = write_files(tmp_path / "src", {"a.jpg": jpeg})
    run_encode(src, tmp_path / "dst", resize_short=40)
    stored = read_samples(tmp_path / "dst")["a"]["jpg"]
    decoded = pixels.decode(stored)
    assert (decoded.shape[:2], map_jpeg(stored).orientation) == (expected, 6)
    if expected == (height, width):
        assert np.array_equal(decoded, pixels.decode(jpeg))


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
    """Encoding a shard of more than 20 MB of photographs takes at most three times its size in
    memory.
    """
    paths = [path for path in sorted((photos / "imagenet").rglob("*")) if path.is_file()]
    size = 0
    (tmp_path / "src").mkdir()
    for i, path in enumerate(paths):
        if size > 30e6:
            break
        size += path.stat().st_size
        (tmp_path / "src" / f"{i}.jpg").symlink_to(path)
    said = run_python("-c", MEMORY, tmp_path / "src", tmp_path / "dst")
    shards, shard_bytes = map(float, said.split())
    assert shard_bytes > 20e6
    assert shards < 3, f"{shards:.2f} shards of {shard_bytes / 1e6:.0f} MB"


@pytest.mark.parametrize("parts", [(None,), ((0, 2), (1, 2))])
def test_another_treatment_makes_a_shard_again(tmp_path, parts):
    """Runs that go on with another ``on_error`` make the shards with bad files again, so that
    mended files get in; what was left out is stored or raised.
    """
    src, dst = write_files(tmp_path / "src", ODD), tmp_path / "dst"
    for on_error, samples in (("skip", 1), ("reencode", 2), ("keep", 3)):
        options = EncodeOptions(on_error=on_error, num_shards=3)
        for part in parts:
            index = encode(src, dst, options, part=part, resume=True, workers=1)
        assert index.num_samples == samples
    assert read_report(dst, SKIPPED) == {}
    with pytest.raises(FormatError):
        run_encode(src, dst, num_shards=3, resume=True)


def test_a_webdataset_of_anything_comes_back(tmp_path):
    """PNG, FLAC and other fields convert without loss: the exported tar has the same members."""
    members = {
        "a.png": image_bytes("png"),
        "a.cls": b"3",
        "b.flac": b"fLaC" + bytes(50),
        "b.jpg": b"no JPEG at all",
        "b.jpg.txt": b"",
        "c.jpg": make_jpeg(1, 10, 10),
    }
    make_tar(tmp_path / "src" / "data-000000.tar", members.items())
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
    files = {path.read_bytes() for path in odd.iterdir() if path.suffix != ".md"}
    dst, out = tmp_path / "dst", tmp_path / "out"
    run_encode(odd, dst, on_error="keep", no_labels=True)
    assert main(["verify", str(dst), "--against", str(odd)]) == 0
    assert main(["export", str(dst), str(out)]) == 0
    found = [path.read_bytes() for path in pathlib.Path(out).iterdir()]
    assert len(found) >= 214
    assert sum(data in files for data in found) >= len(read_report(dst, KEPT))
