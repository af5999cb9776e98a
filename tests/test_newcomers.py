"""What the first users bring: a folder as it is found, by commands alone.

From files as a user has them to the samples that a training gets, with no traceback and the right
classes.
"""

import os
import re

import pytest
from support import read_samples, write_files

from pcrshard import open_dataset
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


def test_a_crawl(run, tmp_path):
    """A folder from the web: what is no JPEG is named and left out, the rest is kept to the
    pixel.
    """
    images = ["a/1.jpg", "a/IMG 2 (1).JPEG", "b/ü.jpg", "b/x.y.z.jpg"]
    files = {name: make_jpeg(number) for number, name in enumerate(images)}
    files |= {"a/gray.jpg": make_jpeg(7, mode="L"), "a/cmyk.jpg": make_jpeg(8, mode="CMYK")}
    files["b/page.jpg"] = b"<!DOCTYPE html><title>404</title>"
    files |= {"b/empty.jpg": b"", "b/cut.jpg": make_jpeg(9)[:-40]}
    files |= {"b/index.html": b"not an image", ".DS_Store": b"\0"}
    crawl = write_files(tmp_path / "crawl", files)
    os.symlink("nowhere.jpg", crawl / "b" / "broken-link.jpg")
    said = run("encode", "crawl", "pcr", status=1)
    assert "--resume --on-error keep" in said
    said = run("encode", "crawl", "pcr", "--resume", "--on-error", "skip")
    assert re.search(r"first skipped: \S*\.jpg: .*\n.*skipped\.jsonl\nskipped: 4\n", said)
    assert "index.html" in said
    samples = read_samples(tmp_path / "pcr")
    kept = {"a/1", "a/IMG 2 (1)", "a/gray", "a/cmyk", "b/ü", "b/x_y_z"}
    assert samples.keys() == kept
    assert open_dataset(tmp_path / "pcr")[0].classes == ("a", "b")
    source = pixels.decode((crawl / "b" / "x.y.z.jpg").read_bytes())
    assert (pixels.decode(samples["b/x_y_z"]["jpg"]) == source).all()
    assert "against: crawl\nproblems: 0" in run("verify", "pcr", "--against", "crawl")
