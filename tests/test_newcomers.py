"""What the first users bring: folders as they are found, by commands alone.

Each test goes from files as a user has them to the samples that a training gets; there must be no
traceback, the right classes and the right splits.
"""

import os

import pytest

from pcrshard import Shard, open_dataset
from pcrshard.cli.main import main
from pcrshard.jpeg import pixels
from pcrshard.testing import make_jpeg


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a command in the test's folder; return what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*args, status=0):
        assert main(list(map(str, args))) == status
        return "".join(capsys.readouterr())

    return run


def samples_of(folder, scan="full"):
    index, urls = open_dataset(str(folder))
    shards = (Shard(url, entry=entry) for url, entry in zip(urls, index.shards, strict=True))
    return {sample["__key__"]: sample for shard in shards for sample in shard.samples(scan)}


def write_images(root, *names):
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_jpeg(number))


def test_an_image_folder_with_splits(run, tmp_path):
    """ImageFolder's usual layout: the first try says what to do, and what it says works."""
    train = [f"train/{label}/{n}.jpg" for label in ("cat", "dog", "emu") for n in range(4)]
    write_images(tmp_path / "root", *train, "val/dog/0.jpg", "val/emu/1.jpg")
    said = run("encode", "root", "pcr", status=1)
    assert "splits of root (train, val)" in said
    assert "`--split all`" in said
    run("encode", "--split", "all", "root", "pcr")
    for split, count in (("train", 12), ("val", 2)):
        index, _ = open_dataset(tmp_path / "pcr" / split)
        assert (index.classes, index.num_classes) == (("cat", "dog", "emu"), 3)
        samples = samples_of(tmp_path / "pcr" / split)
        assert len(samples) == count
        for key, sample in samples.items():
            assert index.classes[int(sample["cls"])] == key.partition("/")[0]
        said = run("verify", f"pcr/{split}", "--against", f"root/{split}")
        assert "problems: 0" in said


def test_a_crawl(run, tmp_path):
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
    said = run("encode", "crawl", "pcr", status=1)
    assert "--resume --on-error keep" in said
    said = run("encode", "crawl", "pcr", "--resume", "--on-error", "skip")
    assert "skipped: 4\n" in said
    assert "index.html" in said
    samples = samples_of(tmp_path / "pcr")
    kept = {"a/1", "a/IMG 2 (1)", "a/gray", "a/cmyk", "b/ü", "b/x_y_z"}
    assert samples.keys() == kept
    assert open_dataset(tmp_path / "pcr")[0].classes == ("a", "b")
    source = pixels.decode((crawl / "b" / "x.y.z.jpg").read_bytes())
    assert (pixels.decode(samples["b/x_y_z"]["jpg"]) == source).all()
    assert "against: crawl\nproblems: 0" in run("verify", "pcr", "--against", "crawl")
