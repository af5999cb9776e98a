"""A version's header follows each rule, or is refused before memory is taken."""

import math

import pytest
from states import tiny_state

from pcrshard.checkpoint.file_frame import VERSION_FILE, pack_frame, unpack_frame
from pcrshard.checkpoint.held_version import Bounds, make_version, write_version
from pcrshard.checkpoint.typed_tree import flatten
from pcrshard.checkpoint.version_file import VersionFile, named, parse_header
from pcrshard.errorbound import RelativeStd
from pcrshard.errors import CorruptCheckpoint, StorageError, TruncatedShard

ENTRY = {
    "path": "w",
    "dtype": "float32",
    "shape": [16, 16],
    "lattice": ["linear", [0.1, 0.05]],
    "coder": "intra",
    "count": 0,
    "sizes": [100, 0, 0],
    "payload_crc": 1,
    "content_crc": 2,
}
HEADER = {
    "number": 1,
    "id": bytes(32),
    "parent": [2, bytes(32)],
    "tree": ["x", 0],
    "tensors": [ENTRY],
    "metrics": {},
    "saved": 1.5,
}


def test_a_header_by_hand_is_read():
    """The accepted form of the vectors below."""
    header = parse_header(HEADER)
    assert header.parent == (2, bytes(32))
    assert header.payload_bytes() == 100
    assert parse_header(unpack_frame(header.pack(), VERSION_FILE)) == header


# The name of each rule of docs/checkpoints-format.md, and headers that break it.
BROKEN = {
    "header-keys": [HEADER | {"more": 1}, {"number": 1}],
    "number": [HEADER | {"number": 0}, HEADER | {"number": 1.0}, HEADER | {"number": True}],
    "id": [HEADER | {"id": bytes(31)}, HEADER | {"id": "0" * 32}],
    "parent": [
        HEADER | {"parent": [1]},
        HEADER | {"parent": [1, b""]},
        HEADER | {"parent": 3},
        HEADER | {"parent": [-1, bytes(32)]},
    ],
    "metrics": [HEADER | {"metrics": []}],
    "saved": [HEADER | {"saved": 1}],
    "tensors": [HEADER | {"tensors": {}}, HEADER | {"tensors": [3]}],
    "paths": [HEADER | {"tensors": [ENTRY, ENTRY]}],
    "no-delta-without-parent": [HEADER | {"parent": None, "tensors": [ENTRY | {"coder": "delta"}]}],
}
BROKEN_ENTRIES = {
    "entry-keys": [{"path": "w"}, ENTRY | {"more": 1}],
    "path": [ENTRY | {"path": 3}, ENTRY | {"path": "w" * 5000}],
    "dtype": [ENTRY | {"dtype": "object"}, ENTRY | {"dtype": ["float32"]}],
    "shape": [ENTRY | {"shape": [-1]}, ENTRY | {"shape": [1] * 65}],
    "lattice": [
        ENTRY | {"lattice": ["linear", [0.0, 1.0]]},
        ENTRY | {"lattice": ["linear", [math.nan, 1.0]]},
        ENTRY | {"lattice": ["cubic", [1.0]]},
        ENTRY | {"lattice": 3},
        ENTRY | {"lattice": ["log", [1, 1 << 60, 0.1]]},
        ENTRY | {"dtype": "int32"},
    ],
    "coder": [
        ENTRY | {"coder": "lzma"},
        ENTRY | {"coder": ["intra"]},
        ENTRY | {"coder": "sparse"},
    ],
    "sizes": [
        ENTRY | {"sizes": [100, 0]},
        ENTRY | {"sizes": [100, 0, -1]},
        ENTRY | {"sizes": [1 << 63, 0, 0]},
        ENTRY | {"sizes": 3},
    ],
    "checksums": [
        ENTRY | {"payload_crc": 1 << 32},
        ENTRY | {"content_crc": None},
    ],
    "ratio": [
        ENTRY | {"shape": [1 << 40]},
        ENTRY | {"shape": [1 << 40, 1 << 40, 1 << 40]},
        ENTRY | {"sizes": [0, 0, 0]},
        ENTRY | {"coder": "same"},
        ENTRY | {"shape": [1 << 20, 64], "sizes": [1, 0, 0]},
    ],
    "count": [
        ENTRY | {"count": 257, "sizes": [100, 9, 9]},
        ENTRY | {"count": 1},
        ENTRY | {"count": -1},
        ENTRY | {"count": 200, "sizes": [100, 50, 0]},
    ],
}
VECTORS = [(rule, header) for rule, headers in BROKEN.items() for header in headers]
VECTORS += [
    (rule, HEADER | {"tensors": [entry]})
    for rule, entries in BROKEN_ENTRIES.items()
    for entry in entries
]


@pytest.mark.parametrize(("rule", "header"), VECTORS, ids=lambda value: str(value)[:20])
def test_a_broken_rule_is_refused(rule, header, tmp_path):
    """As a whole file with right checksums, too: nothing but the rule is wrong."""
    path = tmp_path / "v"
    path.write_bytes(pack_frame(VERSION_FILE, header))
    with pytest.raises(CorruptCheckpoint, match=rf"file={path}"):
        VersionFile(str(path))


def test_each_rule_of_the_specification_has_a_vector():
    """docs/checkpoints-format.md names the rules in brackets."""
    from support import ROOT

    text = (ROOT / "docs" / "checkpoints-format.md").read_text()
    for rule in {**BROKEN, **BROKEN_ENTRIES}:
        assert f"[{rule}]" in text, rule


def write(tmp_path):
    bounds = Bounds(RelativeStd(0.01))
    version = make_version(flatten(tiny_state(1)), bounds, None, number=1, metrics={})
    path = tmp_path / "v"
    written = write_version(str(path), version, None)
    return path, written


def test_a_file_is_as_long_as_its_header_says(tmp_path):
    """One byte more, or one less, is found."""
    path, written = write(tmp_path)
    data = path.read_bytes()
    file = VersionFile(str(path), written.header_bytes)
    assert file.num_bytes == written.num_bytes == len(data)
    file.check_size()
    for other in (data + b"x", data[:-1]):
        path.write_bytes(other)
        with pytest.raises(CorruptCheckpoint, match=f"expected {len(data)} bytes"):
            VersionFile(str(path)).check_size()


def test_payloads_are_checked_and_read_in_runs(tmp_path):
    """Tensors side by side are one read; a damaged one is named."""
    path, _ = write(tmp_path)
    file = VersionFile(str(path))
    entries = file.header.tensors
    parts = {entry.path: bytes(view) for entry, view in file.payloads(entries)}
    some = [entries[-1], entries[0]]
    assert {e.path: bytes(view) for e, view in file.payloads(some)} == {
        entry.path: parts[entry.path] for entry in some
    }
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match=f"checksum.*key={entries[-1].path}"):
        list(file.payloads(entries))


def test_a_cut_file_is_refused(tmp_path):
    """Within the head, the header or the payloads."""
    path, _ = write(tmp_path)
    data = path.read_bytes()
    for stop in (0, 10, 30, len(data) - 1):
        path.write_bytes(data[:stop])
        with pytest.raises((CorruptCheckpoint, TruncatedShard, StorageError)):
            file = VersionFile(str(path))
            list(file.payloads(file.header.tensors))


def test_an_error_gets_its_file_once():
    """The innermost name stays."""
    with pytest.raises(CorruptCheckpoint, match=r"^bad \(file=a, key=w\)$"):
        with named("b"), named("a", "w"):
            raise CorruptCheckpoint("bad")
