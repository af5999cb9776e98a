"""A whole dataset to shards: the same bytes however it runs, in parts or at once."""

import contextlib
import re
import shutil
import subprocess

import numpy as np
import pytest
from encode_support import CLI, encode_parts, make_tar
from support import read_all, read_samples, run_encode, write_files

from pcrshard import EncodeOptions, encode, open_dataset
from pcrshard.cli.main import main
from pcrshard.encoding.resume_journal import JOURNAL
from pcrshard.errors import EncodeError
from pcrshard.jpeg import pixels
from pcrshard.testing import make_jpeg


def test_workers_do_not_change_bytes(synthetic_folder, dataset, tmp_path):
    """One process or two, the files are the same to the byte."""
    run_encode(synthetic_folder, tmp_path, num_shards=4, workers=2)
    assert read_all(tmp_path) == read_all(dataset)


def test_a_dataset_is_its_source(synthetic_folder, dataset):
    """Every image is there once, with its class, its pixels and nothing but shards and indexes
    beside it.
    """
    index, _ = open_dataset(dataset)
    samples = read_samples(dataset)
    paths = {
        str(p.relative_to(synthetic_folder).with_suffix("")): p
        for p in synthetic_folder.rglob("*.jpg")
    }
    assert (index.classes, index.num_samples, samples.keys()) == (("cat", "dog"), 24, paths.keys())
    for key, path in paths.items():
        assert index.classes[int(samples[key]["cls"])] == path.parent.name
        mode = "cmyk" if key.endswith("006") else "rgb"
        assert np.array_equal(
            pixels.decode(samples[key]["jpg"], mode), pixels.decode(path.read_bytes(), mode)
        )
    names = {entry.name for entry in index.shards} | {"pcr.columns", "pcr.json", JOURNAL}
    assert {p.name for p in dataset.iterdir()} == names


def test_progress_reaches_the_end(synthetic_folder, tmp_path):
    """Progress counts the sample that is read first, then samples, and rises to the total."""
    calls = []
    run_encode(synthetic_folder, tmp_path, num_shards=4, progress=lambda *call: calls.append(call))
    assert calls == [(done, 24) for done in (0, 6, 12, 18, 24)]


def test_several_streams_and_missing_fields(tmp_path):
    """Samples may have several images, and not all the same fields; each gets back what it had."""
    one, two = make_jpeg(1), make_jpeg(2, mode="L")
    members = [
        ("a.left.jpg", one),
        ("a.right.jpg", two),
        ("a.cls", b"1"),
        ("b.left.jpg", two),
        ("b.txt", b""),
        ("c.txt", b"no image"),
    ]
    run_encode(make_tar(tmp_path / "a.tar", members), tmp_path / "dst", num_shards=3)
    for scan in (1, "full"):
        samples = read_samples(tmp_path / "dst", scan)
        assert {k: set(v) - {"__key__"} for k, v in samples.items()} == {
            "a": {"left.jpg", "right.jpg", "cls"},
            "b": {"left.jpg", "txt"},
            "c": {"txt"},
        }
    assert np.array_equal(pixels.decode(samples["a"]["right.jpg"]), pixels.decode(two))
    assert (samples["b"]["txt"], samples["c"]["txt"]) == (b"", b"no image")


def test_a_store_in_memory_needs_one_worker(synthetic_folder):
    """Other processes would write to a memory of their own."""
    with pytest.raises(EncodeError, match=r"memory://, which needs workers=1"):
        encode(synthetic_folder, "memory://encode-test/other", workers=2)


def test_shards_do_not_go_into_their_source(synthetic_folder, tmp_path):
    """Shards below the images would be taken for sources by the next run."""
    shutil.copytree(synthetic_folder, tmp_path / "photos")
    with pytest.raises(EncodeError, match="outside the source"):
        run_encode(tmp_path / "photos", tmp_path / "photos" / "shards")
    run_encode(tmp_path / "photos", tmp_path / "photos-pcr")


@pytest.mark.parametrize(
    ("count", "order"), [(2, (0, 1)), (3, (2, 0, 1)), (4, (3, 1, 2, 0)), (6, (5, 4, 3, 2, 1, 0))]
)
def test_parts_make_the_same_dataset(synthetic_folder, dataset, tmp_path, count, order):
    """Parts in any order, even more than shards, give the files of one run; the index appears with
    the last.
    """
    found = encode_parts(synthetic_folder, tmp_path, count, order)
    complete = [index is not None for index in found]
    assert complete == sorted(complete)
    assert found[-1].num_samples == 24
    assert read_all(tmp_path) == read_all(dataset)
    assert (tmp_path / JOURNAL).exists()


def test_skipped_images_of_all_parts_are_listed(tmp_path):
    """The report of skipped images is that of one run."""
    files = {f"{i}.jpg": make_jpeg(i) if i % 3 else b"bad" for i in range(8)}
    src = write_files(tmp_path / "src", files)
    options = EncodeOptions(num_shards=4, on_error="skip")
    for part, folder in (((1, 2), "a"), ((0, 2), "a"), (None, "b")):
        encode(src, tmp_path / folder, options, part=part, workers=1)
    assert read_all(tmp_path / "a") == read_all(tmp_path / "b")


def test_parts_at_the_same_time(larger_folder, larger_dataset, tmp_path):
    """Processes that write parts of one folder at once make one whole dataset, whoever ends
    last.
    """
    command = [*CLI, "encode", str(larger_folder), str(tmp_path), "--num-shards=12", "--workers=1"]
    running = [
        subprocess.Popen([*command, "--part", f"{i}/3"], stdout=subprocess.PIPE, text=True)
        for i in range(3)
    ]
    said = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0] * 3
    assert any("samples: 48\nshards: 12\n" in text for text in said)
    assert read_all(tmp_path) == read_all(larger_dataset)


@pytest.mark.parametrize("text", ["3", "2/2", "-1/2", "a/b", "1/0"])
def test_wrong_encode_parts(synthetic_folder, tmp_path, text, capsys):
    """A part number outside the range of parts is refused."""
    with contextlib.suppress(SystemExit):
        assert main(["encode", str(synthetic_folder), str(tmp_path), f"--part={text}"]) == 1
    assert re.search("argument --part: expected|expected a part I/N", capsys.readouterr().err)
