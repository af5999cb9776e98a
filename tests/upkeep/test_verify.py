"""Verify finds every byte that is not what was written, and says where."""

import dataclasses
import shutil

import fsspec
import numpy as np
import pytest
from support import CountingFS, damage, pieces, shard_entry, within, write_files

from pcrshard import DatasetIndex, EncodeOptions, Shard, ShardFormat, encode, open_dataset
from pcrshard.cli.main import main
from pcrshard.encoding.samples import SampleRef, Source
from pcrshard.errors import EncodeError
from pcrshard.format.dataset_index import ShardTable
from pcrshard.format.schema import Schema
from pcrshard.native import rescan
from pcrshard.testing import make_jpeg
from pcrshard.upkeep.verify import VerifyResult, VerifyTask, verify, verify_shard

SCANS = [*range(1, 11), "tail"]


@pytest.fixture(scope="module", params=["compact", "preview"])
def whole(request, tmp_path_factory):
    """A folder of JPEGs with metadata, and its dataset of two shards: (source, dataset, layout)."""
    comment = b"a comment for the tail"
    files = {f"{'ab'[i % 2]}/{i}.jpg": make_jpeg(i, 40, 50, comment=comment) for i in range(6)}
    source = write_files(tmp_path_factory.mktemp("source"), files)
    target = tmp_path_factory.mktemp("target")
    fmt = ShardFormat(
        layout=request.param, preview_fields=("cls",) if request.param == "preview" else ()
    )
    encode(source, target, EncodeOptions(num_shards=2, fmt=fmt), workers=1)
    return source, target, request.param


def problems_of(folder, number=0, **options):
    index, urls = open_dataset(folder)
    return verify_shard(VerifyTask(urls[number], index.shards[number], **options)).problems


def compare(folder, source):
    return verify(str(folder), against=str(source), workers=1)


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of the dataset that may be damaged, and its whole first shard's index."""
    shutil.copytree(whole[1], tmp_path, dirs_exist_ok=True)
    return tmp_path, Shard(whole[1] / "data-000000.tar").index


def test_a_clean_dataset(whole):
    """What was just written has no problems, alone and against its source."""
    source, target, _ = whole
    assert problems_of(target) == problems_of(target, 1) == ()
    assert compare(target, source) == []


@pytest.mark.parametrize("scan", SCANS)
def test_a_damaged_piece_is_named(copy, scan):
    """A flipped bit in any scan group is reported with the sample's key and the scan."""
    folder, index = copy
    row = SCANS.index(scan)
    starts, sizes = pieces(Shard(next(folder.glob("*.tar"))))
    for s, key in enumerate(index.keys):
        if not sizes[row, s, 0]:
            continue
        for at in (0, int(sizes[row, s, 0]) - 1):
            damage(folder / "data-000000.tar", int(starts[row, s, 0]) + at)
            (problem,) = problems_of(folder)
            assert f"key={key}, scan={scan}" in problem
            assert "data-000000.tar" in problem
            damage(folder / "data-000000.tar", int(starts[row, s, 0]) + at)


@pytest.mark.parametrize("change", ["cut", "longer", "missing", "other shard", "empty"])
def test_a_shard_of_another_size(copy, change):
    """A shard that is cut, has bytes after its end, is gone, or is another one is a problem."""
    folder, _ = copy
    path = folder / "data-000000.tar"
    data = path.read_bytes()
    if change == "missing":
        path.unlink()
    else:
        other = (folder / "data-000001.tar").read_bytes()
        path.write_bytes(
            {"cut": data[:-1], "longer": data + b"hidden", "other shard": other, "empty": b""}[
                change
            ]
        )
    assert len(problems_of(folder)) >= 1


def test_a_renamed_shard(whole, copy):
    """A renamed shard is one problem, which has the name that its first member should have."""
    if whole[2] == "preview":
        pytest.skip("the preview layout does not have the shard's name in it")
    folder, _ = copy
    (folder / "data-000000.tar").rename(folder / "new-000000.tar")
    problems = verify_shard(VerifyTask(str(folder / "new-000000.tar"), None)).problems
    assert len(problems) == 1
    assert "header of new-000000.pcr" in problems[0]


@pytest.mark.parametrize("column", ["samples", "head_crc32c", "index_stop", "prefix_stop", "full"])
def test_a_dataset_index_that_does_not_fit(copy, column):
    """pcr.json is checked against the shards, each number of it."""
    folder, _ = copy
    index = DatasetIndex.decode((folder / "pcr.json").read_bytes())
    rows = index.shards.rows.astype(np.int64)
    place = {"samples": 0, "head_crc32c": 1, "index_stop": 3, "prefix_stop": 4, "full": -1}[column]
    rows[0, place] += -1 if column == "samples" else 1
    rows[0, place + 1 :] += column in ("index_stop", "prefix_stop")
    changed = dataclasses.replace(index, shards=ShardTable(index.shards.names, rows.astype("<u4")))
    (folder / "pcr.json").write_bytes(changed.encode())
    assert len(problems_of(folder)) >= 1


def test_a_kept_file_is_compared_byte_for_byte(tmp_path):
    """A file that is no image is equal to its source, and a changed byte of it is found."""
    write_files(tmp_path / "src", {"a.jpg": make_jpeg(), "b.jpg": b"\xff\xd8 no JPEG"})
    encode(tmp_path / "src", tmp_path / "dst", EncodeOptions(on_error="keep"), workers=1)
    assert compare(tmp_path / "dst", tmp_path / "src") == []
    (tmp_path / "src" / "b.jpg").write_bytes(b"\xff\xd8 no JPEg")
    (problem,) = compare(tmp_path / "dst", tmp_path / "src")
    assert "key=b" in problem


def test_an_image_that_no_decoder_shows_is_compared_by_its_coefficients(tmp_path):
    """Decoders refuse sampling factors such as 3, 2 and 1, but shards keep such images whole."""
    jpeg = make_jpeg(0, 8, 8, subsampling=0)
    jpeg = rescan(jpeg, [((component,), 0, 63, 0, 0) for component in range(3)]).jpeg
    start = jpeg.index(b"\xff\xc0") + 11
    factors = {start: 0x31, start + 3: 0x21}  # of 8 x 8 pixels, each component is still one block
    odd = bytes(factors.get(i, byte) for i, byte in enumerate(jpeg))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "odd.jpg").write_bytes(odd)
    encode(tmp_path / "in", tmp_path / "out", workers=1)
    assert compare(tmp_path / "out", tmp_path / "in") == []


@pytest.mark.parametrize(
    ("key", "data", "word"),
    [
        ("a/0", make_jpeg(99, 40, 50), "pixels"),
        ("a/0", make_jpeg(0, 48, 50), "pixels"),
        ("a/0", None, "source has no such sample"),
        ("a/new", make_jpeg(0, 40, 50), "in no shard"),
        ("a/0", b"\xff\xd8 no longer a JPEG", "a/0"),
    ],
)
def test_against_a_changed_source(whole, tmp_path, key, data, word):
    """Different, missing and additional samples are each told in one line with the key."""
    source = tmp_path / "source"
    shutil.copytree(whole[0], source)
    path = source / f"{key}.jpg"
    path.write_bytes(data) if data else path.unlink()
    (problem,) = compare(whole[1], source)
    assert key in problem
    assert word in problem


def test_resized_images_are_not_compared(whole, tmp_path):
    """After --resize-short, --against says at once why no image equals its source."""
    encode(whole[0], tmp_path, EncodeOptions(resize_short=8), workers=1)
    with pytest.raises(EncodeError, match="resized to 8 pixels"):
        compare(tmp_path, whole[0])


def test_one_shard_is_verified_with_its_dataset_index_or_without(copy):
    """A single shard must fit pcr.json; without one, the shard is checked by itself."""
    folder, _ = copy
    shutil.copy(folder / "data-000001.tar", folder / "data-000000.tar")
    shard = str(folder / "data-000000.tar")
    assert verify(shard, workers=1)
    (folder / "pcr.json").unlink()
    shutil.copy(shard, folder / "data-000001.tar")
    assert verify(str(folder / "data-000001.tar"), workers=1) == []


def test_one_shard_is_compared_with_the_labels_of_its_dataset(whole, tmp_path):
    """A single shard is verified like its dataset, also where classes were numbered by a user."""
    options = EncodeOptions(num_shards=2, classes=("b", "a"))
    encode(whole[0], tmp_path, options, workers=1)
    assert compare(tmp_path / "data-000000.tar", whole[0]) == []


def test_against_other_labels(whole, tmp_path):
    """A source with a class that the dataset does not have is another source."""
    source = tmp_path / "source"
    shutil.copytree(whole[0], source)
    (source / "0").mkdir()
    # A new first class: all numbers move.
    shutil.copy(source / "a" / "0.jpg", source / "0" / "x.jpg")
    with pytest.raises(EncodeError, match="expected classes among the given names"):
        compare(whole[1], source)


def test_a_damaged_shard_does_not_hide_the_others(copy, whole):
    """One unreadable shard is one problem; its samples are not called missing one by one."""
    folder, _ = copy
    damage(folder / "data-000000.tar", 1100)
    assert len(compare(folder, whole[0])) == 1


class NoSizeFS(CountingFS):
    """A store that does not tell sizes, as an HTTP/1.0 server does."""

    protocol = "nosize"

    def size(self, path):
        return None


def test_a_store_that_does_not_tell_sizes(whole, capsys):
    """What can be checked is checked; nothing is called damaged for want of a number."""
    fsspec.register_implementation("nosize", NoSizeFS, clobber=True)
    _, dataset, _ = whole
    assert main(["verify", f"nosize://{dataset}", "--workers", "1"]) == 0
    assert main(["info", f"nosize://{dataset}/data-000000.tar"]) == 0
    assert "3 " in capsys.readouterr().out


def test_bookkeeping_grows_with_the_samples_only(tmp_path, monkeypatch):
    """What verify notes of each shard does not take longer in a dataset of many."""
    keys = [f"{i:06d}" for i in range(200_000)]
    index = DatasetIndex(Schema("standard", 10 * ("",)), [shard_entry()] * 2000)
    module = "pcrshard.upkeep.verify"
    monkeypatch.setattr(f"{module}.open_dataset", lambda *_, **__: (index, ["a/b.tar"] * 2000))
    monkeypatch.setattr(f"{module}._sources_of", lambda *_: {})
    samples = [SampleRef(key, ()) for key in keys]
    monkeypatch.setattr(f"{module}.list_samples", lambda *_, **__: Source(samples, ()))
    monkeypatch.setattr(
        f"{module}.run_tasks",
        lambda function, task, numbers, workers: (
            (n, VerifyResult((), tuple(keys[100 * n : 100 * n + 100]))) for n in numbers
        ),
    )
    with within(10):
        assert verify(str(tmp_path), against=str(tmp_path)) == []
