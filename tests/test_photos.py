"""Real photographs, and odd and broken files."""

import io
import itertools
import pathlib
import tarfile

import pytest
from support import run_tool

from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.errors import PCRError
from pcrshard.format.scan import FULL
from pcrshard.jpeg.markers import EOI
from pcrshard.jpeg.split import join_pieces

FEW = 40


def _photographs(data_folder, every):
    with tarfile.open(data_folder / "photos.tar") as tar:
        for info in itertools.islice((i for i in tar if i.isreg()), 0, None, every):
            yield info.name, tar.extractfile(info).read()


def _check_lossless(name, jpeg, djpeg, jpegtran, scans):
    image = encode_jpeg(jpeg)
    *groups, tail = image.pieces
    assert djpeg(join_pieces(groups, tail)) == djpeg(jpeg), name
    progressive = jpegtran(jpeg, "-copy", "none", "-progressive")
    assert b"".join(groups) + EOI == progressive, name
    for k in scans:
        prefix = join_pieces(groups[:k])
        assert progressive.startswith(prefix[:-2]), name
        djpeg(prefix)
    return len(join_pieces(groups, tail)), len(jpeg)


def test_photographs_are_kept_losslessly(data_folder, djpeg, jpegtran):
    """Photographs of every set keep their pixels, are cut at scan ends and do not grow in total."""
    sizes = [
        _check_lossless(name, jpeg, djpeg, jpegtran, (1, 5))
        for name, jpeg in _photographs(data_folder, 555 // FEW)
    ]
    assert len(sizes) >= FEW
    ours, source = map(sum, zip(*sizes, strict=True))
    assert ours < source


@pytest.mark.long
def test_all_photographs_are_kept_losslessly(data_folder, djpeg, jpegtran):
    """The same for each photograph at every scan."""
    sizes = [
        _check_lossless(name, jpeg, djpeg, jpegtran, range(1, 11))
        for name, jpeg in _photographs(data_folder, 1)
    ]
    assert len(sizes) == 555


def _odd_files(data_folder):
    return sorted(
        path
        for path in (data_folder / "odd").iterdir()
        if path.name not in ("README.md", "index.tsv")
    )


def test_odd_files_are_lossless_or_refused_by_name(data_folder, djpeg):
    """An odd file is kept with its pixels or refused in one line; broken ones are refused."""
    refused = set()
    for path in _odd_files(data_folder):
        jpeg = path.read_bytes()
        try:
            image = encode_jpeg(jpeg)
        except PCRError as error:
            assert "\n" not in str(error)
            assert len(str(error)) > 10
            refused.add(path.name)
            continue
        *groups, tail = image.pieces
        # djpeg warns of stray bytes that are passed over, and decodes all the same.
        expected = run_tool("djpeg", "-pnm", data=jpeg).stdout
        assert run_tool("djpeg", "-pnm", data=join_pieces(groups, tail)).stdout == expected
        assert djpeg(join_pieces(groups, tail)) is not None, path.name
    names = {path.name for path in _odd_files(data_folder)}
    assert {name for name in names if name.startswith(("broken-", "notjpeg-"))} <= refused
    accepted = names - refused
    assert len([name for name in accepted if name.startswith("valid-")]) >= 106


def test_pillow_sees_the_same_metadata(data_folder):
    """EXIF and ICC profile are what they were, wherever Pillow reads them."""
    image_module = pytest.importorskip("PIL.Image")
    checked = 0
    for path in _odd_files(data_folder):
        jpeg = path.read_bytes()
        try:
            *groups, tail = encode_jpeg(jpeg).pieces
            before, after = (
                image_module.open(io.BytesIO(data)) for data in (jpeg, join_pieces(groups, tail))
            )
        except (PCRError, OSError):
            continue
        # This file has two profiles, one of them after SOF. Where they stand together, Pillow takes
        # them for the fragments of one.
        twice = path.name == "valid-icc-after-sof.jpg"
        for name in ("exif",) if twice else ("exif", "icc_profile"):
            assert before.info.get(name) == after.info.get(name), (path.name, name)
        checked += 1
    assert checked > 100


def test_names_of_refused_files_are_known(data_folder, tmp_path):
    """encode --on-error skip lists each refused odd file with its reason and keeps the others."""
    import json

    import pcrshard

    index = pcrshard.encode(
        str(data_folder / "odd"),
        str(tmp_path),
        pcrshard.EncodeOptions(num_shards=3, on_error="skip"),
        workers=1,
    )
    rows = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    files = [
        path
        for path in _odd_files(data_folder)
        if pathlib.Path(path.name.lower()).suffix in (".jpg", ".jpeg", ".jfif", ".jpe")
    ]
    assert index.num_samples + len(rows) == len(files)
    assert all(row["reason"] and pathlib.Path(row["source"]).exists() for row in rows)
    assert (
        sum(
            1
            for shard in index.shards
            for _ in pcrshard.Shard(str(tmp_path / shard.name)).samples(FULL)
        )
        == index.num_samples
    )
