"""Reading prefixes: exact, checked, and never silently short."""

import random
import shutil
import sys

import pytest
from support import CountingFS, damage, pieces, write_shard

from pcrshard import Shard, open_dataset
from pcrshard.encoding.shard_writer import encode_sample
from pcrshard.errors import (
    CorruptIndex,
    CorruptPiece,
    PCRError,
    TruncatedShard,
)
from pcrshard.format.scan import FULL
from pcrshard.format.shard_format import ShardFormat
from pcrshard.jpeg.split import join_scans, split_scans
from pcrshard.testing import make_jpeg
from pcrshard.upkeep.verify import VerifyTask, verify_shard

SCANS = [*range(1, 11), FULL]


@pytest.fixture(scope="module", params=["compact", "preview"])
def small(request, tmp_path_factory):
    """A shard of three small samples, its path."""
    path = tmp_path_factory.mktemp(request.param) / "small-000000.tar"
    modes = ["RGB", "L", "RGB"]
    samples = [
        {"__key__": f"k{i}", "jpg": make_jpeg(i, 16, 24, mode, exif=EXIF), "cls": i}
        for i, mode in enumerate(modes)
    ]
    write_shard(
        str(path),
        [encode_sample(s) for s in samples],
        ShardFormat("standard", layout=request.param, preview_fields=("cls",)),
    )
    return path


EXIF = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"


@pytest.mark.parametrize("scan", [1, 5, FULL])
def test_reads_exactly_the_prefix(dataset, scan):
    """A job at scan k moves prefix_stop(k) bytes a shard: one request with a dataset index, two
    without.
    """
    index, urls = open_dataset(dataset)
    for url, entry in zip(urls, index.shards, strict=True):
        stop = entry.prefix_stop(scan)
        for known, expected in ((entry, [(0, stop)]), (None, [(0, 1024), (1024, stop)])):
            CountingFS.requests.clear()
            samples = list(Shard(f"counting://{url}", entry=known).samples(scan))
            assert len(samples) == entry.num_samples
            assert [(start, stop) for _, start, stop in CountingFS.requests] == expected


def reads_of(work):
    """(bytes, calls) that some work asked the system to read."""
    if not sys.platform.startswith("linux"):
        pytest.skip("NO /proc/self/io HERE")

    def count():
        with open("/proc/self/io", "rb", buffering=0) as file:
            data = file.read(4096)
        numbers = dict(line.split(b": ") for line in data.splitlines())
        return int(numbers[b"rchar"]), int(numbers[b"syscr"]), len(data)

    work()
    size, calls, own = count()
    work()
    after, calls_after, _ = count()
    return after - size - own, calls_after - calls - 1  # the first look is itself a read


def test_reads_local_files_with_no_byte_more(dataset):
    """A local prefix takes two reads at most, of its first page and of the rest, and no byte after
    it.
    """
    index, urls = open_dataset(dataset)
    for scan in (0, 1, 5, FULL):
        shard = Shard(urls[0], entry=index.shards[0])
        size, calls = reads_of(lambda shard=shard, scan=scan: list(shard.samples(scan)))
        assert calls <= 2
        stop = index.shards[0].prefix_stop(scan)
        members = 12 if scan == FULL else scan + 1
        assert stop - 1023 * members <= size <= stop


@pytest.mark.parametrize("scan", SCANS)
def test_a_prefix_is_the_cut_jpeg(scan, tmp_path, jpegtran, djpeg):
    """Each sample at scan k decodes as jpegtran's progressive file cut after scan k."""
    jpeg = make_jpeg(9, 50, 70, quality=92)
    write_shard(
        str(tmp_path / "a-000000.tar"),
        [encode_sample({"__key__": "a", "jpg": jpeg})],
        ShardFormat("standard"),
    )
    got = next(Shard(tmp_path / "a-000000.tar").samples(scan))["jpg"]
    header, scans, _ = split_scans(jpegtran(jpeg, "-copy", "none", "-progressive"))
    assert djpeg(got) == djpeg(join_scans(header, scans[: 10 if scan == FULL else scan]))


def test_full_restores_metadata(small):
    """EXIF comes back at full fidelity, is not read at scan 10, and orientation is known at every
    scan.
    """
    shard = Shard(small)
    samples = list(shard.samples(FULL))
    assert all(EXIF in sample["jpg"] for sample in samples)
    assert [sample["cls"] for sample in samples] == [b"0", b"1", b"2"]
    assert not any(EXIF in sample["jpg"] for sample in shard.samples(10))
    assert shard.index.orientation.ravel().tolist() == [6, 6, 6]


def test_iterating_a_shard_reads_once(small):
    """``for sample in shard`` costs one read of the prefix, not one a sample."""
    CountingFS.requests.clear()
    assert [sample["cls"] for sample in Shard(f"counting://{small}")] == [b"0", b"1", b"2"]
    assert [start for _, start, _ in CountingFS.requests] == [0, 1024]


@pytest.mark.parametrize("step", [41, pytest.param(1, marks=pytest.mark.long)])
def test_every_cut_is_an_error(step, small, tmp_path):
    """A shard cut at any byte is a clear error, never a short epoch."""
    data = small.read_bytes()
    path = tmp_path / small.name
    stop = Shard(small).prefix_stop(FULL)
    for cut in sorted(
        {*range(0, stop, step), *range(0, stop, 512), *range(511, stop, 512), stop - 1}
    ):
        path.write_bytes(data[:cut])
        with pytest.raises(PCRError, match=path.name):
            list(Shard(path).samples(FULL))
    path.write_bytes(data[:stop])
    assert len(list(Shard(path).samples(FULL))) == 3
    assert verify_shard(VerifyTask(str(path), None)).problems


def test_a_cut_behind_the_prefix_does_not_matter(small, tmp_path):
    """Only the bytes that a scan needs must be there."""
    stop = Shard(small).prefix_stop(4)
    path = tmp_path / small.name
    path.write_bytes(small.read_bytes()[:stop])
    assert len(list(Shard(path).samples(4))) == 3
    with pytest.raises(TruncatedShard):
        list(Shard(path).samples(5))


def _flip(data, bit):
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def _check_flip(path, data, bit, expected):
    """A flip gives an error, or exactly the right samples; verify names it in any case."""
    path.write_bytes(_flip(data, bit))
    try:
        got = list(Shard(path).samples(FULL))
    except PCRError as error:
        assert path.name in str(error)
    else:
        assert got == expected, f"bit {bit} changed samples without an error"
    problems = verify_shard(VerifyTask(str(path), None)).problems
    assert problems, f"bit {bit} was not found by verify"
    assert path.name in problems[0]


@pytest.mark.parametrize("count", [100, pytest.param(None, marks=pytest.mark.long)])
def test_flipped_bits_are_found(small, tmp_path, count):
    """A flipped bit is detected, or changes nothing that a reader uses; verify finds every one.

    Among them are the name, mode, checksum and type of each tar header, and its last byte.
    """
    data = small.read_bytes()
    expected = list(Shard(small).samples(FULL))
    bits = random.Random(1).sample(range(len(data) * 8), count or len(data) * 8)
    starts = [place - 257 for place in range(len(data)) if data.startswith(b"ustar", place)]
    bits += [8 * (start + at) for start in starts for at in (0, 100, 136, 156, 265, 511)]
    for bit in bits:
        _check_flip(tmp_path / small.name, data, bit, expected)


def test_what_was_sound_at_a_lower_scan_is_checked_again_at_a_higher_one(small, tmp_path):
    """A level that falls and rises while a damaged shard is in memory gets the error, not the
    damage.
    """
    path = tmp_path / small.name
    offset = int(pieces(Shard(small)).starts[3, 2, 0])
    shutil.copy(small, path)
    damage(path, offset)
    shard = Shard(path)
    prefix = shard.change_scan(shard.load(5), 2)
    assert len(list(prefix.samples())) == 3
    with pytest.raises(CorruptPiece, match="scan=4"):
        prefix.at(5).sample(2)
    with pytest.raises(CorruptPiece, match="scan=4"):
        shard.change_scan(prefix, 5).sample(2)


def test_a_replaced_shard_is_an_error(dataset, tmp_path):
    """A shard that is not the one in pcr.json is refused, not read by old offsets."""
    index, urls = open_dataset(dataset)
    path = tmp_path / index.shards[0].name
    shutil.copy(urls[1], path)
    with pytest.raises(CorruptIndex, match="replaced"):
        list(Shard(path, entry=index.shards[0]).samples(2))
