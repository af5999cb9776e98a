"""Faults that were found in use, each by the shortest way to it."""

import concurrent.futures
import json
import multiprocessing
import shutil

import pytest
from encode_support import image_bytes, make_tar
from support import run_encode, write_files

from pcrshard.cli.main import main
from pcrshard.errors import CorruptJpeg, FormatError
from pcrshard.testing import make_jpeg


@pytest.fixture
def odd_tiff():
    """A TIFF with one wrong byte, for which Pillow raises TypeError."""
    data = bytearray(image_bytes("tiff"))
    data[72] = 11
    return bytes(data)


@pytest.mark.parametrize("on_error", ["reencode", "skip", "keep"])
def test_whatever_pillow_raises_is_about_one_file(tmp_path, odd_tiff, on_error):
    """A damaged TIFF does not end the encoding of all others, and reads as a named error."""
    src = write_files(tmp_path / "src", {"good.jpg": make_jpeg(1), "odd.tif": odd_tiff})
    options = {} if on_error == "keep" else {"reencode_quality": 90}
    index = run_encode(src, tmp_path / "dst", on_error=on_error, **options)
    assert index.num_samples == (2 if on_error == "keep" else 1)
    report = "kept.jsonl" if on_error == "keep" else "skipped.jsonl"
    (row,) = map(json.loads, (tmp_path / "dst" / report).read_text().splitlines())
    assert (row["key"], "TIFF" in row["reason"] or "Pillow" in row["reason"]) == ("odd", True)
    with pytest.raises(CorruptJpeg, match=r"Pillow: .*odd\.tif"):
        run_encode(src, tmp_path / "raised", reencode_quality=90)


@pytest.mark.parametrize("suffix", ["avif", "heic", "jxl"])
def test_no_photograph_is_left_out_silently(tmp_path, suffix):
    """A folder of a telephone has JPEGs and newer formats: these stop the run, or are kept."""
    files = {"a.jpg": make_jpeg(0), f"b.{suffix}": b"\0\0\0\x18ftypheic"}
    src = str(write_files(tmp_path / "src", files))
    with pytest.raises(FormatError, match=rf"got HEIC.*--on-error keep.*b\.{suffix}"):
        run_encode(src, tmp_path / "raised")
    assert run_encode(src, tmp_path / "kept", on_error="keep").num_samples == 2


LIST = [(f"s{i}.images.{k}.jpg", make_jpeg(i * 4 + k)) for i in range(4) for k in range(i)]
TARS_OF_SAME_KEYS = {name: [("0.jpg", make_jpeg(ord(name)))] for name in "ab"}
TAR_WITH_A_BAD_IMAGE = [("odd.images.0.jpg", make_jpeg(1)[:99])]


@pytest.mark.parametrize(
    ("tars", "images", "options"),
    [
        ({"a": LIST}, {}, []),
        ({"a": LIST}, {}, ["--keep-numbered"]),
        ({"a": LIST, "b": TAR_WITH_A_BAD_IMAGE}, {}, ["--on-error", "keep"]),
        (TARS_OF_SAME_KEYS, {}, ["--prefix-keys"]),
        ({}, {f"{i}.png": image_bytes("png") for i in range(3)}, ["--on-error", "keep"]),
    ],
)
def test_a_sound_dataset_verifies_against_its_source(tmp_path, capsys, tars, images, options):
    """The source is listed as it was encoded, without saying how once more."""
    src, dst = str(write_files(tmp_path / "src", images)), str(tmp_path / "dst")
    for name, members in tars.items():
        make_tar(tmp_path / "src" / f"{name}.tar", members)
    assert main(["encode", src, dst, "--workers", "1", *options]) == 0
    assert main(["verify", dst, "--against", src, "--workers", "1"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_nobody_writes_after_an_error(larger_folder, tmp_path, kind):
    """When encode raises, its workers have ended: what is done to the folder then lasts."""
    # The shard of the bad image is the largest, and so the first; the others take longer.
    bad = make_jpeg(1, 1500, 1500, quality=95)[:-30]
    src = write_files(tmp_path / "src", {"000.jpg": bad})
    for number, path in enumerate([*larger_folder.iterdir()] * 3):
        (src / f"{number:03d}x.jpg").symlink_to(path)
    dst = tmp_path / "dst"
    pool = concurrent.futures.ThreadPoolExecutor(3)
    how = {"executor": pool} if kind == "threads" else {"workers": 4}
    with pytest.raises(FormatError):
        run_encode(src, dst, seed=None, samples_per_shard=24, **how)
    shutil.rmtree(dst)
    dst.mkdir()
    pool.shutdown()
    for worker in multiprocessing.active_children():
        worker.join()
    assert list(dst.iterdir()) == []
