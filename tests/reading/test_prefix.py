"""Samples of a local file are those of the same shard on an object store, and damage is named."""

import os
import shutil

import numpy as np
import pytest
from support import CountingFS, damage, pieces, write_shard

from pcrshard import Shard
from pcrshard.encoding.shard_writer import encode_sample
from pcrshard.errors import CorruptPiece, PCRError, ScanUnavailable
from pcrshard.format.scan import FULL
from pcrshard.format.shard_format import ShardFormat
from pcrshard.jpeg.orientation import with_orientation
from pcrshard.testing import make_jpeg

SCANS = [1, 2, np.int64(5), 10, FULL]
EXIF = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"


@pytest.fixture(scope="module", params=["compact", "preview"])
def url(request, tmp_path_factory):
    """Color, gray and CMYK images, a second stream that some samples lack, optional fields,
    metadata in some.
    """
    samples = []
    for i, mode in enumerate(["RGB", "L", "RGB", "CMYK", "RGB", "L"]):
        sample = {
            "__key__": f"k{i}",
            "jpg": make_jpeg(i, 30 + i, 41 - i, mode, exif=EXIF if i % 2 else b""),
            "cls": i,
        }
        if i % 3:
            sample["mask.jpg"] = make_jpeg(i + 50, 30 + i, 41 - i, "L")
        if i % 4:
            sample["txt"] = f"caption {i}"
        samples.append(sample)
    path = str(tmp_path_factory.mktemp("joined") / f"{request.param}-000000.tar")
    write_shard(
        path,
        [encode_sample(sample) for sample in samples],
        ShardFormat("standard", layout=request.param),
    )
    return path


def both(url, scan, **how):
    """The samples by a request to a store, and those by the descriptor of a local file."""
    return [list(Shard(place).samples(scan, **how)) for place in (f"counting://{url}", url)]


@pytest.mark.parametrize("scan", SCANS)
def test_samples_are_those_of_a_prefix(url, scan):
    """A local file gives the same samples as the same shard on an object store: same bytes, same
    fields, same order.
    """
    expected, got = both(url, scan)
    assert got == expected
    assert [list(sample) for sample in got] == [list(sample) for sample in expected]
    assert [sorted(sample) for sample in got[:2]] == [
        ["__key__", "cls", "jpg"],
        ["__key__", "cls", "jpg", "mask.jpg", "txt"],
    ]


def damaged(url, path, row, scan):
    """A copy in which one byte of a sample's piece is another."""
    shutil.copy(url, path)
    damage(path, int(pieces(Shard(url)).starts[-1 if scan == "tail" else scan - 1, row, 0]))
    return str(path)


@pytest.mark.parametrize(("where", "scan"), [(1, 1), (2, 5), (2, FULL), ("tail", FULL)])
def test_damage_is_named_as_in_a_prefix(url, tmp_path, where, scan):
    """The error names shard, key, scan and place; the handler may go on with the other samples, and
    they are whole.
    """
    bad = damaged(url, tmp_path / "bad.tar", 1, where)
    errors = []
    expected, got = both(bad, scan, on_error=lambda error: errors.append(str(error)) or True)
    assert got == expected
    assert [sample["__key__"] for sample in got] == ["k0", "k2", "k3", "k4", "k5"]
    assert len(errors) == 2
    assert errors[0].replace("counting://", "") == errors[1]
    assert "bad.tar" in errors[0]
    assert "k1" in errors[0]
    with pytest.raises(CorruptPiece, match=f"{where}"):
        list(Shard(bad).samples(scan))


def test_metadata_that_are_none(tmp_path):
    """Whoever writes a shard may put anything into a tail, with its right checksum: the sample is
    refused at full fidelity, the others are not.
    """
    samples = [encode_sample({"__key__": f"k{i}", "jpg": make_jpeg(i, 20, 20)}) for i in range(3)]
    image = samples[1].images["jpg"]
    samples[1].images["jpg"] = image._replace(
        pieces=(*image.pieces[:-1], b"\xff\xe1\0\1not a segment")
    )
    write_shard(str(tmp_path / "a.tar"), samples, ShardFormat("standard"))
    errors = []
    expected, got = both(
        str(tmp_path / "a.tar"), FULL, on_error=lambda error: errors.append(repr(error)) or True
    )
    assert got == expected
    assert [sample["__key__"] for sample in got] == ["k0", "k2"]
    assert errors[0].replace("counting://", "") == errors[1]
    assert all(word in errors[0] for word in ("a.tar", "k1", "tail"))
    assert len(list(Shard(tmp_path / "a.tar").samples(10))) == 3


def test_damage_elsewhere_does_not_matter(url, tmp_path):
    """A lower scan or another field does not meet the damage."""
    bad = damaged(url, tmp_path / "bad.tar", 1, 5)
    assert list(Shard(bad).samples(4)) == list(Shard(url).samples(4))
    prefix = Shard(bad).load(5)
    labels = [prefix.value(row, "cls") for row in range(6)]
    assert labels == [b"0", b"1", b"2", b"3", b"4", b"5"]


@pytest.mark.parametrize(("first", "last"), [(2, 5), (1, FULL)])
def test_growing_gives_what_loading_gives(url, first, last):
    """A prefix that grows by what is missing holds the samples of one that was read at once."""
    for place in (url, f"counting://{url}"):
        CountingFS.requests.clear()
        shard = Shard(place)
        grown = shard.change_scan(shard.load(first), last)
        asked = sorted(request[1:] for request in CountingFS.requests)
        assert list(grown.samples()) == list(Shard(url).samples(last))
        if place != url and shard.prefix_stop(first) < shard.prefix_stop(last):
            assert asked[-1] == (shard.prefix_stop(first), shard.prefix_stop(last))


def test_an_image_scan_by_scan(url):
    """Each piece is a scan group, so that a tool can look at every scan of one read; the first one
    also says which way up the image is.
    """
    prefix = Shard(url).load(5)
    sizes = prefix.tables.sizes[:5, :: len(prefix.streams)]
    rows = range(prefix.index.num_samples)
    seen = [prefix.pieces(unit) for row in rows for unit in prefix.units_of(row, "jpg")]
    turned = prefix.index.orientation[:: len(prefix.streams)] > 1
    tag = len(with_orientation(b"\xff\xd8", 6)) - 2
    expected = sizes.T + np.outer(turned * tag, [1, 0, 0, 0, 0])
    assert [list(map(len, pieces)) for pieces in seen] == expected.tolist()
    joined = [b"".join(pieces) + b"\xff\xd9" for pieces in seen]
    assert joined == [sample["jpg"] for sample in prefix.samples()]


def test_the_table_for_the_decoder(tmp_path):
    """Batches are decoded where the images lie; what is damaged or missing has no bytes there."""
    jpegs = [make_jpeg(i, 20 + i, 30) for i in range(4)]
    samples = [encode_sample({"__key__": f"k{i}", "jpg": jpeg}) for i, jpeg in enumerate(jpegs)]
    good = tmp_path / "good-000000.tar"
    write_shard(str(good), samples, ShardFormat("standard"))
    bad = damaged(str(good), tmp_path / "bad.tar", 1, 2)
    table = Shard(bad).load(2).table([3, 1, 0])
    sizes = [len(jpeg) - 2 for jpeg in (sample["jpg"] for sample in Shard(good).samples(2))]
    assert table["size"].sum(axis=1).tolist() == [sizes[3], 0, sizes[0]]


def test_files_are_closed(url, tmp_path):
    """Neither a read nor an error leaves a descriptor open."""
    shard, missing = Shard(url), Shard(tmp_path / "missing.tar")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(PCRError):
            list(missing.samples(1))
        with pytest.raises(ScanUnavailable):
            list(shard.samples(33))
        next(iter(shard.samples(1)))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("scan", "error"),
    [
        (1.5, TypeError),
        *((wrong, TypeError) for wrong in ("5", "FULL", None, [1], True, np.True_)),
        (-1, ScanUnavailable),
        (11, ScanUnavailable),
    ],
)
def test_a_wrong_scan_is_told_as_such(url, scan, error):
    """A mistyped scan is that, not a storage error."""
    with pytest.raises(error, match="expected a scan of 0 to 10 or 'full'"):
        list(Shard(url).samples(scan))
