"""A version's header follows each rule, or is refused before memory is taken."""

import math

import pytest

from pcrshard.checkpoint.frame import VERSION_FILE, pack_frame
from pcrshard.checkpoint.version_file import VersionFile
from pcrshard.errors import CorruptCheckpoint

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


def test_a_header_by_hand_is_read(tmp_path):
    """The accepted form of the vectors below."""
    path = tmp_path / "v"
    path.write_bytes(pack_frame(VERSION_FILE, HEADER))
    file = VersionFile(str(path))
    assert file.parent == (2, bytes(32))
    assert file.num_bytes == file.payload_start + 100
    assert file.entries[0].pack() == ENTRY


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
    "metrics": [
        HEADER | {"metrics": []},
        HEADER | {"metrics": {"a": [1]}},
        HEADER | {"metrics": {1: 2}},
    ],
    "saved": [HEADER | {"saved": saved} for saved in (1, 1e300, -1.0, math.nan)],
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
