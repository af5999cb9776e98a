"""pcr.json: what is written is read, what is damaged is refused."""

import json
import pickle
import struct
from base64 import b64encode

import msgspec
import pytest
from msgspec.structs import replace
from support import ROOT

from pcrshard import DatasetIndex, Shard, open_dataset
from pcrshard.errors import CorruptIndex, ScanUnavailable, UnsupportedVersion
from pcrshard.format.dataset_index import ShardEntry, most_shards, resolve_scan
from pcrshard.format.levels import Levels
from pcrshard.format.scan_script import STANDARD, ScanScript
from pcrshard.format.schema import Schema

SCHEMA = Schema("standard", ("1", "2"))
ENTRY = ShardEntry("a-000000.tar", 3, 7, (1536, 1536, 2048, 3072))


def test_a_dataset_index_survives_encoding(dataset):
    """pcr.json is what it was, and its totals are right."""
    index, urls = open_dataset(dataset)
    assert DatasetIndex.decode(index.encode()) == index
    assert index.classes == ("cat", "dog")
    assert index.num_samples == 24
    assert [Shard(url).head.prefix_stops for url in urls] == [
        entry.prefix_stops for entry in index.shards
    ]


def test_a_class_folder_that_is_no_utf8_has_a_name():
    """A dataset of any folder can be read again."""
    index = DatasetIndex(SCHEMA, (ENTRY,), ("\udcff",))
    assert DatasetIndex.decode(index.encode()).classes == ("?",)


NAMES = [
    ("a-000008.tar", "a-000009.tar", "a-000010.tar"),
    ("a-8.tar", "a-9.tar", "a-10.tar", "a-11.tar"),
    ("a-01.tar", "a-03.tar", "a-04.tar", "b-05.tar", "b.tar", "1.tar", "2.tar"),
    ("v2-1a.tar", "v2-2a.tar", "v2.tar", "v3.tar"),
    ("9" * 30 + "1.tar", "9" * 30 + "2.tar"),
]


@pytest.mark.parametrize("names", NAMES)
def test_numbered_names_are_names(names):
    """Whatever shards are called, they are found again, in their order, and also by slices."""
    index = DatasetIndex(SCHEMA, [replace(ENTRY, name=name) for name in names])
    found = DatasetIndex.decode(index.encode()).shards
    assert tuple(found.names) == names
    assert [entry.name for entry in found[1:]] == list(names[1:])
    assert found[-1].name == names[-1]
    assert pickle.loads(pickle.dumps(found)) == found
    assert DatasetIndex.decode(DatasetIndex(SCHEMA, found).encode()).shards == index.shards


def test_names_of_many_shards_take_no_bytes():
    """pcr.json of a dataset of a usual name has one string for all shards."""
    entries = [replace(ENTRY, name=f"train-{i:06d}.tar") for i in range(1000)]
    found = json.loads(DatasetIndex(SCHEMA, entries).encode())
    assert found["names"] == ["train-{000000..000999}.tar"]


def test_the_example_in_the_specification_is_valid():
    """Another implementation can begin with the example of SPEC.md."""
    example = (ROOT / "SPEC.md").read_text().partition("```json\n")[2].partition("```")[0]
    assert DatasetIndex.decode(example.encode()).classes == ("cat", "dog")


def dataset_json(samples=3, scan=0, stops=(3, 3, 4, 6), num_rows=1, **changes):
    """Return pcr.json with these numbers in each row of its table; stops are in blocks."""
    index = json.loads(DatasetIndex(SCHEMA, (ENTRY,)).encode())
    row = struct.pack(f"<{3 + len(stops)}I", samples, 7, scan, *stops)
    index |= {"num_samples": samples * num_rows, "table": b64encode(row * num_rows).decode()}
    return json.dumps(index | changes).encode()


def with_schema(**changes):
    schema = json.loads(dataset_json())["schema"]
    return dataset_json(schema=schema | changes)


def with_levels(slopes, *groups, train_size=0):
    """Return pcr.json of a dataset with levels, whose schema agrees."""
    base = ScanScript("x", groups or STANDARD.groups)
    levels = Levels(base, tuple(slopes), train_size)
    index = json.loads(with_schema(script="levels", groups=levels.groups))
    return json.dumps(index | {"levels": msgspec.to_builtins(levels)}).encode()


def test_levels_survive_encoding():
    """What divides the images of a dataset can be used for another one."""
    assert DatasetIndex.decode(with_levels([0.5, 0])).levels == Levels(
        ScanScript("x", STANDARD.groups), (0.5, 0.0)
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"\xff\xff",
        b"[" * 100_000,
        dataset_json(format="other"),
        dataset_json(num_samples=4),
        dataset_json(num_classes=-1),
        dataset_json(names=["../x.tar"]),
        dataset_json(names=["x{0..999999999}.tar"]),
        dataset_json(names=["x{0..00}.tar"]),
        dataset_json(names=["x{1..0}.tar"], num_rows=2),
        dataset_json(names=["x{0..0}.tar"]),
        dataset_json(names=["x{0..1}{0..1}.tar"], num_rows=4),
        dataset_json(names=["x{0..1}.tar", "x1.tar"], num_rows=3),
        dataset_json(names=["x{0..1}.tar"], num_rows=3),
        dataset_json(names=["x{a..b}.tar"], num_rows=2),
        dataset_json(names=[250 * "x" + "{10..11}.tar"], num_rows=2),
        dataset_json(names=["x\n.tar"]),
        dataset_json(names=[300 * "x" + ".tar"]),
        dataset_json(names=[]),
        dataset_json(names=["a.tar", "b.tar"]),
        dataset_json(names=["a.tar", "a.tar"], num_rows=2),
        dataset_json(table="no base64!"),
        dataset_json(samples=0),
        dataset_json(samples=6554),
        dataset_json(samples=(1 << 24) + 1, stops=[1 << 31] * 4),
        dataset_json(stops=(4, 3, 4, 6)),
        dataset_json(stops=(2, 3, 4, 6)),
        dataset_json(stops=(3, 6, 4, 6)),
        dataset_json(stops=(3, 3, 4)),
        dataset_json(scan=3),
        dataset_json(levels={"base": ["x", ["0,1,2: 0-63, 0, 0"]], "slopes": [0.5, 0]}),
        with_levels([0.5, 0], "0: 1-5, 0, 2"),
        with_levels([0, 0.5]),
        with_levels([0.5, 0.1]),
        with_levels([0.5, 0], train_size=-1),
        dataset_json(similarity=[[0.5, 0.4]]),
        dataset_json(similarity=[[0.5, 0.4], [1.5, 0.4]]),
        dataset_json(columns=[["labels", 2, 7]]),
        dataset_json(columns=[["more", 0, 7]]),
        dataset_json(columns=[["more", 257, 7]]),
        dataset_json(columns=[["more", 1, 1 << 32]]),
        dataset_json(columns=[["more", 1]]),
        dataset_json(columns=[["flags", 1, 7], ["flags", 1, 7]]),
        dataset_json(columns=[[65 * "x", 1, 7]]),
        dataset_json(columns=[[f"c{n}", 1, 7] for n in range(257)]),
        with_schema(groups=[]),
        with_schema(layout="other"),
        with_schema(fields=[["jpg", "picture", 1]]),
        with_schema(fields=[["jpg", "image", 1], ["jpg", "image", 1]]),
        with_schema(fields=[["jpg", "image", 2]]),
        with_schema(parts=[["json", "a", "boxes:xyxy"]]),
    ],
)
def test_a_bad_dataset_index_is_refused(data):
    """A damaged or malicious pcr.json is refused, with its place named."""
    with pytest.raises(CorruptIndex, match="here"):
        DatasetIndex.decode(data, url="here")


def test_a_shard_may_have_as_many_samples_as_its_index_has_room_for():
    """A claim is possible up to the bytes that the index of the shard can have."""
    assert DatasetIndex.decode(dataset_json(samples=6553)).num_samples == 6553
    largest = DatasetIndex.decode(dataset_json(samples=1 << 24, stops=[1 << 31] * 4))
    assert largest.num_samples == 1 << 24


@pytest.mark.parametrize(("more", "why"), [(0, "not a dataset index"), (1, "too large")])
def test_a_dataset_index_has_at_most_256_mib(more, why):
    """A longer pcr.json is refused before it is parsed, which would take more memory."""
    with pytest.raises(CorruptIndex, match=why):
        DatasetIndex.decode(bytes((1 << 28) + more))


def test_unknown_keys_are_ignored():
    """What another writer adds, at any place, changes nothing."""
    extra = {"more": [{"a": "}"}, [1, "]"]], "note": 'a "b"'}
    changed = json.loads(dataset_json(**extra))
    expected = DatasetIndex.decode(dataset_json())
    for text in (json.dumps(changed), json.dumps(changed, indent=2, sort_keys=True)):
        assert DatasetIndex.decode(b"\xef\xbb\xbf" + text.encode()) == expected


def test_a_newer_dataset_index_says_so():
    """A newer format asks for a newer pcrshard, one that was never released for `encode`."""
    for version in (1, 2):
        with pytest.raises(UnsupportedVersion, match="pcrshard encode"):
            DatasetIndex.decode(dataset_json(version=version))
    with pytest.raises(UnsupportedVersion, match="a newer pcrshard"):
        DatasetIndex.decode(dataset_json(version=4))


def test_a_staged_entry_knows_what_is_there():
    """A staged copy says which scans it holds, and asking for more names both numbers and the
    command that fetches the rest.
    """
    staged = replace(ENTRY, scan=1)
    entries = (replace(ENTRY, name="b-0.tar", scan=2), staged, replace(ENTRY, name="c-0.tar"))
    index = DatasetIndex(SCHEMA, entries)
    assert DatasetIndex.decode(index.encode()) == index
    assert index.scan == 1
    assert staged.prefix_stop(1) == ENTRY.prefix_stop(1)
    for scan in (2, "full"):
        with pytest.raises(
            ScanUnavailable,
            match=rf"scan {scan}, the staged copy holds scans 1 to 1 of 2.*"
            rf"pcrshard stage SRC DST --scan {scan}",
        ):
            staged.prefix_stop(scan)


def test_the_totals_of_a_prefix():
    """The bytes of a scan are the sum of all shards' prefixes at it."""
    other = replace(ENTRY, name="a-000001.tar", stops=(1536, 2048, 2560, 4096))
    index = DatasetIndex(SCHEMA, (ENTRY, other))
    totals = [index.prefix_bytes(scan) for scan in (0, 1, 2, "full")]
    assert totals == [3072, 3584, 4608, 7168]
    with pytest.raises(ScanUnavailable, match="0 to 2"):
        index.prefix_bytes(3)


@pytest.mark.parametrize(
    ("fraction", "scan"), [(0.374, None), (0.375, 1), (0.499, 1), (0.5, 2), (0.99, 2)]
)
def test_a_fraction_is_the_highest_scan_within_it(fraction, scan):
    """A fraction of the bytes never reads more than that; scans themselves stay what they are."""
    entries = [replace(ENTRY, stops=(1536, 1536, 2048, 4096))] * 2
    if scan is None:
        with pytest.raises(ScanUnavailable, match=r"at least 0\.375"):
            resolve_scan(entries, fraction)
    else:
        assert resolve_scan(entries, fraction) == scan
        staged = [*entries, replace(entries[0], scan=1)]
        assert resolve_scan(staged, fraction) == 1
    assert [resolve_scan(entries, scan) for scan in (1, "full")] == [1, "full"]
    with pytest.raises(TypeError, match="a fraction in"):
        resolve_scan(entries, 1.5)


def test_a_dataset_index_describes_itself():
    """In a line, also of a dataset with thousands of shards and classes."""
    many = DatasetIndex(SCHEMA, (ENTRY,) * 1000, tuple(map(str, range(1000))))
    assert many.num_classes == 1000
    assert f"{1000 * ENTRY.num_samples} samples in 1000 shards" in repr(many)
    assert len(repr(many)) < 200


def test_an_index_of_the_most_shards_is_accepted():
    """What `encode` allows while it plans, every reader accepts after it; one of a million shards
    takes a tenth of a kilobyte each.
    """
    names = [f"data-{number:06d}.tar" for number in range(1000)]
    shards = [replace(ENTRY, name=name) for name in names]
    data = DatasetIndex(SCHEMA, shards).encode()
    assert len(data) / 1000 < (1 << 28) / most_shards(2, len(names[0])) * 1.02
    assert len(data) < 100_000
