"""The index: head, schema, columns, dataset index."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcrshard import DatasetIndex, Shard, open_dataset
from pcrshard.checksum import crc32c
from pcrshard.errors import CorruptIndex, PCRError, ScanUnavailable, UnsupportedVersion
from pcrshard.format.dataset_index import ShardEntry
from pcrshard.format.names import valid_field, valid_key
from pcrshard.format.scan import check_scan
from pcrshard.format.shard_index import HEAD_STOP, decode_head, decode_index, encode_body

ENTRY = ShardEntry("a-000000.tar", 3, 7, 4096, 8, (1536, 2048, 3072))


def test_crc32c_is_castagnoli():
    """The checksum is the one that RFC 3720 appendix B.4 gives for its test patterns."""
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


def test_an_index_survives_encoding(shard_urls):
    """What is written is what is read."""
    index = Shard(shard_urls[0]).index
    again = decode_index(decode_head(index.head.encode()), encode_body(index.schema, index))
    assert (again.head, again.schema, again.keys, again.fields) == (
        index.head,
        index.schema,
        index.keys,
        index.fields,
    )
    for name in ("sizes", "crcs", "dims", "orientation", "base_offsets"):
        assert np.array_equal(getattr(again, name), getattr(index, name)), name


def test_starts_point_at_the_pieces(shard_urls):
    """Every piece of group 1 begins with SOI where the index says."""
    shard = Shard(shard_urls[0])
    with open(shard.url, "rb") as file:
        data = file.read()
    starts = shard.index.starts("full")
    assert starts.shape == shard.index.sizes.shape
    assert all(data[start : start + 2] == b"\xff\xd8" for start in starts[0].ravel())
    assert int(starts[-1].max()) <= shard.prefix_stop("full")


@pytest.mark.parametrize(
    ("key", "valid"),
    [
        ("a", True), ("a/b", True), ("x.y/b", True), ("ünï 1", True), ("a//b", False), ("a/./b", False), ("", False), ("a.b", False), ("/a", False),
        ("../a", False), ("a/../b", False), ("a/", False), ("a\0b", False), ("a\\b", False), ("é" * 513, False), ("..", False),
    ],
)  # fmt: skip
def test_keys_stay_inside_a_folder_and_split_as_joined(key, valid):
    """A key can neither escape an export folder nor confuse WebDataset."""
    assert valid_key(key) is valid


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        ("jpg", True),
        ("left.jpg", True),
        ("", False),
        ("a/b", False),
        ("JPG", False),
        ("__x", False),
        ("a b", False),
    ],
)
def test_field_names(name, valid):
    """Field names are those that WebDataset would give."""
    assert valid_field(name) is valid


@pytest.mark.parametrize("scan", [0, -1, 11, 1 << 40])
def test_scans_out_of_range(scan):
    """A scan that is not there is an error that says what is."""
    with pytest.raises(ScanUnavailable, match="1 to 10"):
        check_scan(scan, 10)


@pytest.mark.parametrize("scan", [True, 2.0, "5", None])
def test_scans_of_a_wrong_type(scan):
    """A scan of a wrong type is a TypeError."""
    with pytest.raises(TypeError, match="expected a scan"):
        check_scan(scan, 10)


def test_a_dataset_index_survives_encoding(dataset):
    """pcr.json is what it was, and its totals are right."""
    index, urls = open_dataset(str(dataset))
    assert DatasetIndex.decode(index.encode()) == index
    assert index.classes == ("cat", "dog")
    assert index.num_samples == 24
    assert [Shard(url).head.prefix_stops for url in urls] == [
        entry.prefix_stops for entry in index.shards
    ]


def dataset_json(**changes):
    index = json.loads(DatasetIndex("standard", 2, (ENTRY,)).encode())
    index["shards"][0] |= changes.pop("shard", {})
    return json.dumps(index | changes).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"{}", b"nonsense", b"\xff\xff", b"[" * 100_000,
        dataset_json(format="other"), dataset_json(num_samples=4), dataset_json(num_groups=3), dataset_json(shards=[5]),
        dataset_json(shard={"name": "../x.tar"}), dataset_json(shard={"name": "x/y.tar"}), dataset_json(shard={"name": 5}),
        dataset_json(shard={"prefix_stops": [1537, 2048, 3072]}), dataset_json(shard={"prefix_stops": [3072, 2048, 3072]}),
        dataset_json(shard={"prefix_stops": [1536, 2048]}), dataset_json(shard={"prefix_stops": [1536, 2048, 1 << 80]}),
        dataset_json(shard={"shard_bytes": 100}), dataset_json(shard={"num_samples": -3}), dataset_json(shard={"num_samples": 3.0}),
        dataset_json(shards=[ENTRY._asdict()] * 2, num_samples=6),
    ],
)  # fmt: skip
def test_a_bad_dataset_index_is_refused(data):
    """A damaged or malicious pcr.json is refused, with its place named."""
    with pytest.raises(CorruptIndex, match="here"):
        DatasetIndex.decode(data, url="here")


def test_a_newer_dataset_index_says_so():
    """A newer format asks for a newer pcrshard."""
    with pytest.raises(UnsupportedVersion):
        DatasetIndex.decode(dataset_json(version=2))


@given(st.integers(0, HEAD_STOP * 3), st.integers(1, 255))
def test_any_changed_byte_of_an_index_is_found(shard_urls, position, change):
    """No byte of an index can change unnoticed."""
    index = Shard(shard_urls[0]).index
    data = bytearray(index.head.encode() + encode_body(index.schema, index))
    data[position % len(data)] ^= change
    with pytest.raises(PCRError):
        decode_index(decode_head(bytes(data[:512])), bytes(data[512:]))


def test_a_staged_entry_knows_what_is_there():
    """A staged copy says which scans it holds, and asking for more names both numbers and the command that fetches the rest."""
    staged = ENTRY._replace(scan=1)
    index = DatasetIndex("standard", 2, (staged,))
    assert DatasetIndex.decode(index.encode()) == index
    assert staged.prefix_stop(1) == ENTRY.prefix_stop(1)
    for scan in (2, "full"):
        with pytest.raises(
            ScanUnavailable,
            match=rf"scan {scan}, the staged copy holds scans 1 to 1 of 2.*pcrshard stage SRC DST --scan {scan}",
        ):
            staged.prefix_stop(scan)
    assert b'"scan"' not in DatasetIndex("standard", 2, (ENTRY,)).encode()


@pytest.mark.parametrize("scan", [0, 3, -1, True, "1", 1.0])
def test_a_staged_scan_is_checked(scan):
    """A dataset index that claims an impossible scan is refused."""
    raw = DatasetIndex("standard", 2, (ENTRY._replace(scan=1),)).encode()
    with pytest.raises(CorruptIndex):
        DatasetIndex.decode(raw.replace(b'"scan": 1', f'"scan": {json.dumps(scan)}'.encode()))
