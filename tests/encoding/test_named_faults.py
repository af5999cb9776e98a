"""Faults that were found in use, each by the shortest way to it."""

import concurrent.futures
import io
import json
import multiprocessing
import shutil

import pytest
import webdataset as wds
from PIL import Image
from support import run_encode

from pcrshard.cli.main import main
from pcrshard.errors import CorruptJpeg, FormatError
from pcrshard.testing import make_jpeg


@pytest.fixture
def odd_tiff():
    """A TIFF with one wrong byte, for which Pillow raises TypeError."""
    file = io.BytesIO()
    Image.new("RGB", (12, 10), (9, 8, 7)).save(file, "TIFF")
    data = bytearray(file.getvalue())
    data[72] = 11
    return bytes(data)


@pytest.mark.parametrize("on_error", ["reencode", "skip", "keep"])
def test_whatever_pillow_raises_is_about_one_file(tmp_path, odd_tiff, on_error):
    """A damaged TIFF does not end the encoding of all others, and reads as a named error."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "good.jpg").write_bytes(make_jpeg(1))
    (tmp_path / "src" / "odd.tif").write_bytes(odd_tiff)
    options = {} if on_error == "keep" else {"reencode_quality": 90}
    index = run_encode(tmp_path / "src", tmp_path / "dst", on_error=on_error, **options)
    assert index.num_samples == (2 if on_error == "keep" else 1)
    report = "kept.jsonl" if on_error == "keep" else "skipped.jsonl"
    (row,) = map(json.loads, (tmp_path / "dst" / report).read_text().splitlines())
    assert (row["key"], "TIFF" in row["reason"] or "Pillow" in row["reason"]) == ("odd", True)
    with pytest.raises(CorruptJpeg, match=r"Pillow: .*odd\.tif"):
        run_encode(tmp_path / "src", tmp_path / "raised", reencode_quality=90)


def lists(folder):
    with wds.TarWriter(str(folder / "a.tar")) as writer:
        for i in range(4):
            images = {f"images.{k}.jpg": make_jpeg(i * 4 + k) for k in range(i)}
            writer.write({"__key__": f"s{i}", "cls": str(i % 2), **images})


def kept_list(folder):
    lists(folder)
    with wds.TarWriter(str(folder / "b.tar")) as writer:
        writer.write({"__key__": "odd", "images.0.jpg": make_jpeg(1)[:99]})


def pngs(folder):
    for i in range(3):
        Image.new("RGB", (9, 9), (i, 0, 0)).save(folder / f"{i}.png")


def same_keys(folder):
    for name in "ab":
        with wds.TarWriter(str(folder / f"{name}.tar")) as writer:
            writer.write({"__key__": "0", "jpg": make_jpeg(ord(name))})


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lists, []),
        (lists, ["--lists", "none"]),
        (kept_list, ["--on-error", "keep"]),
        (pngs, ["--on-error", "keep"]),
        (same_keys, ["--prefix-keys"]),
    ],
)
def test_a_sound_dataset_verifies_against_its_source(tmp_path, capsys, make, options):
    """The source is listed as it was encoded, without saying how once more."""
    (tmp_path / "src").mkdir()
    make(tmp_path / "src")
    src, dst = str(tmp_path / "src"), str(tmp_path / "dst")
    assert main(["encode", src, dst, "--workers", "1", *options]) == 0
    assert main(["verify", dst, "--against", src, "--workers", "1"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_nobody_writes_after_an_error(larger_folder, tmp_path, kind):
    """When encode raises, its workers have ended: what is done to the folder then lasts."""
    src = tmp_path / "src"
    src.mkdir()
    # The shard of the bad image is the largest, and so the first; the others take longer.
    (src / "000.jpg").write_bytes(make_jpeg(1, 1500, 1500, quality=95)[:-30])
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
