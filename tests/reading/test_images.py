"""What a prefix holds: late fields from their scan on, lists, kept files, labels without pixels."""

import fsspec
import pytest

from pcrshard import Shard, ShardFormat
from pcrshard.encoding.shard_writer import encode_sample, write_shard
from pcrshard.errors import CorruptIndex, CorruptPiece
from pcrshard.format.group_table import decode_table
from pcrshard.format.piece_places import late_starts
from pcrshard.testing import CountingFS, make_jpeg

fsspec.register_implementation("counting", CountingFS, clobber=True)
LATE = {"npy": 5, "json": "full"}


@pytest.fixture(scope="module", params=["compact", "preview"])
def url(request, tmp_path_factory):
    """Samples with an array of 40 kB, a list of views, and one file that is no JPEG."""
    samples = []
    for i in range(4):
        sample = {"__key__": f"k{i}", "cls": i, "npy": bytes([i]) * 40_000, "json": b"{}"}
        sample["jpg"] = make_jpeg(i, 30, 40) if i != 2 else b"BM no JPEG"
        sample["views.jpg"] = [make_jpeg(10 + i, 16, 16)] * i
        samples.append(encode_sample(sample, on_unlayered=lambda file, _: file))
    path = str(tmp_path_factory.mktemp("late") / "a-000000.tar")
    fmt = ShardFormat(layout=request.param, late=LATE)
    entry = write_shard(path, samples, fmt)
    return path, entry


def test_scan_0_moves_labels_alone(url):
    """Labels are read without pixels, by one request that ends where the index ends."""
    path, entry = url
    CountingFS.requests.clear()
    samples = list(Shard(f"counting://{path}", entry=entry).samples(0))
    assert samples == [{"__key__": f"k{i}", "cls": b"%d" % i} for i in range(4)]
    assert [request[1:] for request in CountingFS.requests] == [(0, entry.index_stop)]
    assert entry.index_stop < 2048 < entry.prefix_stop(1)


def test_late_fields_cost_nothing_below_their_scan(url):
    """An array of 40 kB a sample is not read at scan 1, and whole from scan 5 on."""
    path, entry = url
    assert entry.prefix_stop(4) < 40_000 < 160_000 < entry.prefix_stop(5)
    for scan, there in ((1, False), (4, False), (5, True), (10, True)):
        for sample in Shard(path).samples(scan):
            assert ("npy" in sample) == there
            assert "json" not in sample
            assert not there or sample["npy"] == bytes([int(sample["cls"])]) * 40_000
    assert all(sample["json"] == b"{}" for sample in Shard(path).samples("full"))


def test_a_prefix_grows_from_labels_to_everything(url):
    """Each step reads what is missing and no more, and gives what a read at once would."""
    path, entry = url
    shard = Shard(f"counting://{path}", entry=entry)
    prefix = shard.load(0)
    for scan in (1, 2, 5, "full"):
        CountingFS.requests.clear()
        before = prefix.num_bytes
        prefix = shard.change_scan(prefix, scan)
        assert list(prefix.samples()) == list(Shard(path).samples(scan))
        if entry.prefix_stop(scan) > before:
            ranges = [request[1:] for request in CountingFS.requests]
            assert ranges == [(before, entry.prefix_stop(scan))]
    for scan in (0, 1, 4, 5):
        assert list(prefix.at(scan).samples()) == list(Shard(path).samples(scan))


def test_lists_and_kept_files_come_as_they_were(url):
    """A list keeps its length and order at every scan; a file that is no JPEG is there from scan 1
    on, byte for byte.
    """
    path, _ = url
    for scan in (1, 5, "full"):
        samples = list(Shard(path).samples(scan))
        assert [len(sample["views.jpg"]) for sample in samples if "views.jpg" in sample] == [
            0,
            1,
            2,
            3,
        ]
        assert samples[2]["jpg"] == b"BM no JPEG"
        assert all(jpeg.endswith(b"\xff\xd9") for sample in samples for jpeg in sample["views.jpg"])
    full = list(Shard(path).samples("full"))
    assert full[3]["views.jpg"][0] == full[3]["views.jpg"][2]


def test_a_damaged_late_value_costs_one_sample(url, tmp_path):
    """The field and the key are named, and the others are whole."""
    path, _ = url
    with open(path, "rb") as file:
        data = bytearray(file.read())
    index = Shard(path).index
    (place,) = [place for place in index.table_places(0, 5) if place.rows[-1] == 4]
    table = decode_table(index, place, data[place.start : place.stop])
    data[late_starts(index, table)["npy"] + 40_001] ^= 1
    bad = tmp_path / "a-000000.tar"
    bad.write_bytes(data)
    errors = []
    got = list(Shard(str(bad)).samples(5, on_error=lambda error: errors.append(error) or True))
    assert [sample["__key__"] for sample in got] == ["k0", "k2", "k3"]
    assert isinstance(errors[0], CorruptPiece)
    assert "npy" in str(errors[0])
    assert "key=k1, scan=5" in str(errors[0])
    assert len(list(Shard(str(bad)).samples(4))) == 4


def test_a_damaged_table_is_named(url, tmp_path):
    """The group is named; lower scans, which do not need the table, are whole."""
    path, _ = url
    with open(path, "rb") as file:
        data = bytearray(file.read())
    (place,) = [place for place in Shard(path).index.table_places(0, 5) if place.rows[-1] == 4]
    data[place.start + 9] ^= 1
    bad = tmp_path / "a-000000.tar"
    bad.write_bytes(data)
    assert len(list(Shard(str(bad)).samples(4))) == 4
    with pytest.raises(CorruptIndex, match=r"the table of group 5: checksum.*a-000000\.tar"):
        Shard(str(bad)).load(5)
