"""What the first users bring: folders, tars and names as they are found, by commands alone.

Each test goes from files as a user has them to the samples that a training gets; there must be no
traceback, the right classes and the right splits.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile

import pytest

from pcrshard import Shard, open_dataset
from pcrshard.jpeg import pixels
from pcrshard.testing import make_jpeg

COMMAND = [
    sys.executable,
    "-c",
    "import sys; from pcrshard_command import main; sys.exit(main())",
]


def pcrshard(*args, cwd, status=0):
    """Run a command in a folder, as a user does; what it printed, without a traceback."""
    result = subprocess.run(
        [*COMMAND, *map(str, args)], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout + result.stderr


def samples_of(folder, scan="full"):
    index, urls = open_dataset(str(folder))
    shards = (Shard(url, entry=entry) for url, entry in zip(urls, index.shards, strict=True))
    return {sample["__key__"]: sample for shard in shards for sample in shard.samples(scan)}


def write_images(root, *names):
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_jpeg(number))


def write_tars(folder, samples, per_tar=4):
    """Tars as ``webdataset.ShardWriter`` makes them: one member a field."""
    folder.mkdir()
    for start in range(0, len(samples), per_tar):
        with tarfile.open(folder / f"train-{start // per_tar:06d}.tar", "w") as tar:
            for number, fields in enumerate(samples[start : start + per_tar], start):
                for field, value in fields.items():
                    info = tarfile.TarInfo(f"{number:06d}.{field}")
                    info.size = len(value)
                    tar.addfile(info, io.BytesIO(value))


def test_an_image_folder_with_splits(tmp_path):
    """ImageFolder's usual layout: the first try says what to do, and what it says works."""
    train = [f"train/{label}/{n}.jpg" for label in ("cat", "dog", "emu") for n in range(4)]
    write_images(tmp_path / "root", *train, "val/dog/0.jpg", "val/emu/1.jpg")
    said = pcrshard("encode", "root", "pcr", cwd=tmp_path, status=1)
    assert "splits train, val" in said
    assert "--split all root DST" in said
    pcrshard("encode", "--split", "all", "root", "pcr", cwd=tmp_path)
    for split, count in (("train", 12), ("val", 2)):
        index, _ = open_dataset(tmp_path / "pcr" / split)
        assert (index.classes, index.num_classes) == (("cat", "dog", "emu"), 3)
        samples = samples_of(tmp_path / "pcr" / split)
        assert len(samples) == count
        for key, sample in samples.items():
            assert index.classes[int(sample["cls"])] == key.partition("/")[0]
        said = pcrshard("verify", f"pcr/{split}", "--against", f"root/{split}", cwd=tmp_path)
        assert "pixels equal the source's" in said


def test_tars_with_integer_labels(tmp_path):
    """What most users of WebDataset have: a classifier's size is known, names can be given."""
    labels = [5, 0, 3, 3, 1, 2, 5, 4, 0]
    fields = [{"jpg": make_jpeg(n), "cls": str(label).encode()} for n, label in enumerate(labels)]
    write_tars(tmp_path / "tars", fields)
    pcrshard("encode", "tars", "plain", cwd=tmp_path)
    index, _ = open_dataset(tmp_path / "plain")
    assert (index.classes, index.num_classes) == ((), 6)
    found = {key: int(sample["cls"]) for key, sample in samples_of(tmp_path / "plain").items()}
    assert found == {f"{n:06d}": label for n, label in enumerate(labels)}

    names = ["ant", "bee", "cat", "dog", "emu", "fox"]
    (tmp_path / "names.txt").write_text("\n".join(names))
    options = ["--classes", "names.txt", "--num-shards", 4, "--stratify"]
    pcrshard("encode", "tars", "named", *options, cwd=tmp_path)
    index, _ = open_dataset(tmp_path / "named")
    assert (list(index.classes), len(index.shards)) == (names, 4)
    about = json.loads(pcrshard("info", "named", "--json", cwd=tmp_path))
    assert (about["num_classes"], about["classes"]) == (6, names)


def test_tars_with_labels_in_json(tmp_path):
    """Labels in JSON stay what they are: fields of the sample, of which no class is made."""
    rows = [{"label": n % 3, "caption": f"n° {n}"} for n in range(6)]
    fields = [{"jpg": make_jpeg(n), "json": json.dumps(row).encode()} for n, row in enumerate(rows)]
    write_tars(tmp_path / "tars", fields)
    pcrshard("encode", "tars", "pcr", cwd=tmp_path)
    index, _ = open_dataset(tmp_path / "pcr")
    assert (index.classes, index.num_classes) == ((), 0)
    samples = samples_of(tmp_path / "pcr", 2)
    assert [json.loads(samples[f"{n:06d}"]["json"]) for n in range(6)] == rows


def test_a_crawl(tmp_path):
    """A folder from the web: what is no JPEG is named and left out, the rest is kept to the
    pixel.
    """
    crawl = tmp_path / "crawl"
    write_images(crawl, "a/1.jpg", "a/IMG 2 (1).JPEG", "b/ü.jpg", "b/x.y.z.jpg")
    (crawl / "a" / "gray.jpg").write_bytes(make_jpeg(7, mode="L"))
    (crawl / "a" / "cmyk.jpg").write_bytes(make_jpeg(8, mode="CMYK"))
    (crawl / "b" / "page.jpg").write_bytes(b"<!DOCTYPE html><title>404</title>")
    (crawl / "b" / "empty.jpg").write_bytes(b"")
    (crawl / "b" / "cut.jpg").write_bytes(make_jpeg(9)[:-40])
    (crawl / "b" / "index.html").write_text("not an image")
    (crawl / ".DS_Store").write_bytes(b"\0")
    os.symlink("nowhere.jpg", crawl / "b" / "broken-link.jpg")
    said = pcrshard("encode", "crawl", "pcr", cwd=tmp_path, status=1)
    assert "--resume --on-error keep" in said
    said = pcrshard("encode", "crawl", "pcr", "--resume", "--on-error", "skip", cwd=tmp_path)
    assert "4 images were skipped" in said
    assert "index.html" in said
    samples = samples_of(tmp_path / "pcr")
    kept = {"a/1", "a/IMG 2 (1)", "a/gray", "a/cmyk", "b/ü", "b/x_y_z"}
    assert samples.keys() == kept
    assert open_dataset(tmp_path / "pcr")[0].classes == ("a", "b")
    source = pixels.decode((crawl / "b" / "x.y.z.jpg").read_bytes())
    assert (pixels.decode(samples["b/x_y_z"]["jpg"]) == source).all()
    assert "pixels equal" in pcrshard("verify", "pcr", "--against", "crawl", cwd=tmp_path)


@pytest.mark.parametrize("source", ["photos/*/*.jpg", "list.csv"])
def test_a_pattern_and_a_table(tmp_path, source):
    """A quoted pattern and a spreadsheet's list are sources like the folder that they name."""
    write_images(tmp_path / "photos", "cat/1.jpg", "dog/2.jpg", "dog/3.jpg")
    (tmp_path / "list.csv").write_text(
        "file_name,label\r\nphotos/cat/1.jpg,cat\r\nphotos/dog/2.jpg,dog\r\nphotos/dog/3.jpg,dog\r\n"
    )
    pcrshard("encode", source, "pcr", cwd=tmp_path)
    index, _ = open_dataset(tmp_path / "pcr")
    assert (index.classes, index.num_classes, index.num_samples) == (("cat", "dog"), 2, 3)
    for key, sample in samples_of(tmp_path / "pcr").items():
        assert index.classes[int(sample["cls"])] in key


def test_the_way_back_after_damage(tmp_path):
    """A cut copy is found by verify; export saves the shards that are whole."""
    write_images(tmp_path / "photos", *(f"{'ab'[n % 2]}/{n}.jpg" for n in range(12)))
    pcrshard("encode", "photos", "pcr", "--num-shards", "3", cwd=tmp_path)
    shutil.copytree(tmp_path / "pcr", tmp_path / "copy")
    with open(tmp_path / "copy" / "data-000001.tar", "r+b") as file:
        file.truncate(2500)
    assert "data-000001.tar" in pcrshard("verify", "copy", cwd=tmp_path, status=1)
    said = pcrshard("export", "copy", "saved", "--on-error", "skip", cwd=tmp_path, status=1)
    assert "8 samples at scan full in saved; 4 were left out" in said
    assert len(list((tmp_path / "saved").rglob("*.jpg"))) == 8


def test_photographs_with_splits(photos, tmp_path):
    """Real photographs in splits are lossless in each, and numbered alike."""
    sets = sorted(path for path in photos.iterdir() if path.is_dir())
    labeled = [path for path in sets if any(child.is_dir() for child in path.iterdir())]
    classes = sorted(child for child in labeled[0].iterdir() if child.is_dir())[:2]
    for label in classes:
        for number, image in enumerate(sorted(label.glob("*"))[:6]):
            target = tmp_path / "root" / ("val" if number % 3 == 0 else "train") / label.name
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(image, target)
    pcrshard("encode", "--split", "all", "root", "pcr", "--on-error", "skip", cwd=tmp_path)
    for split in ("train", "val"):
        index, _ = open_dataset(tmp_path / "pcr" / split)
        assert index.classes == tuple(sorted(label.name for label in classes))
        pcrshard("verify", f"pcr/{split}", "--against", f"root/{split}", cwd=tmp_path)
