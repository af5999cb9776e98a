"""Real photographs, and odd and broken files."""

import contextlib
import io
import itertools
import tarfile

import pytest
from PIL import Image
from support import run_tool

from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.errors import PCRError
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


@pytest.mark.parametrize("every", [555 // FEW, pytest.param(1, marks=pytest.mark.long)])
def test_photographs_are_kept_losslessly(every, data_folder, djpeg, jpegtran):
    """Photographs of every set keep their pixels, are cut at scan ends and do not grow in total."""
    sizes = [
        _check_lossless(name, jpeg, djpeg, jpegtran, range(1, 11) if every == 1 else (1, 5))
        for name, jpeg in _photographs(data_folder, every)
    ]
    assert len(sizes) >= 555 // every
    ours, source = map(sum, zip(*sizes, strict=True))
    assert ours < source


@pytest.fixture(scope="module")
def odd(data_folder):
    """The odd files, by name."""
    paths = set((data_folder / "odd").iterdir())
    return {
        path.name: path for path in sorted(paths) if path.name not in ("README.md", "index.tsv")
    }


def test_odd_files_are_lossless_or_refused_by_name(odd, djpeg):
    """An odd file is kept with its pixels and metadata or refused in one line, as broken ones."""
    refused, compared = set(), 0
    for name, path in odd.items():
        jpeg = path.read_bytes()
        try:
            *groups, tail = encode_jpeg(jpeg).pieces
        except PCRError as error:
            assert "\n" not in str(error)
            assert len(str(error)) > 10
            refused.add(name)
            continue
        joined = join_pieces(groups, tail)
        # djpeg warns of stray bytes that are passed over, and decodes all the same.
        assert djpeg(joined) == run_tool("djpeg", "-pnm", data=jpeg).stdout, name
        with contextlib.suppress(OSError):
            before, after = (Image.open(io.BytesIO(data)).info for data in (jpeg, joined))
            assert before.get("exif") == after.get("exif"), name
            # This file has two profiles, one after SOF; side by side, Pillow joins them.
            if name != "valid-icc-after-sof.jpg":
                assert before.get("icc_profile") == after.get("icc_profile"), name
            compared += 1
    assert {name for name in odd if name.startswith(("broken-", "notjpeg-"))} <= refused
    assert len([name for name in odd.keys() - refused if name.startswith("valid-")]) >= 106
    assert compared > 100
