"""Untrusted stores: each rule of the format is checked, and small files take little memory."""

import math
import os
import resource
import struct

import pytest
import torch
from forge import MANIFEST, VERSION, frame, manifest_path, rewrite_manifest, rewrite_version
from states import same, tiny_state
from support import ROOT

from pcrshard.checkpoint import DeltaStore, pull
from pcrshard.errors import PCRError

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path):
    with DeltaStore(str(tmp_path / "store")) as store:
        for number in (1, 2):
            store.save(tiny_state(number))
    return tmp_path / "store"


def load(folder):
    return DeltaStore(str(folder)).load()


def test_a_store_written_by_the_specification_is_read(folder):
    """The forging helpers produce files that load, so each test below breaks only one rule."""
    expected = load(folder)
    rewrite_version(folder, lambda header: None)
    rewrite_manifest(folder, lambda header: None)
    assert same(load(folder), expected)


ENTRY = ("spec", "lattice", "is_delta", "main_bytes", "patch_bytes", "payload_crc", "digest")


def field(name, value):
    return lambda header: header.update({name: value})


def entry(name, value):
    def change(header):
        header["tensors"][0][ENTRY.index(name)] = value

    return change


def tokens(*tree, blobs=()):
    return field("tree", [list(tree), list(blobs)])


# The name of each rule of docs/checkpoints-format.md, and changes of a header that break it.
BROKEN = {
    "header-keys": [field("more", 1), lambda header: {"number": 1}, lambda header: b"\xc1"],
    "number": [field("number", value) for value in (0, 1.0, True, -1, 1 << 60)],
    "id": [field("id", bytes(31)), field("id", "0" * 32)],
    "parent": [
        *(field("parent", value) for value in ("1", -1, 2, [1])),
        field("parent_id", bytes(32)),
        field("parent_id", b""),
    ],
    "metrics": [field("metrics", value) for value in ([], {"a": [1]}, {1: 2})],
    "saved": [field("saved", value) for value in (1e300, -1.0, math.nan, "1")],
    "tensors": [field("tensors", {}), field("tensors", [3]), field("tensors", [])],
    "no-delta-without-parent": [lambda header: header.update(parent=None, parent_id=None)],
    "spec": [
        *(entry("spec", [dtype, [24, 16]]) for dtype in ("object", None, ["float32"])),
        *(entry("spec", ["float32", shape]) for shape in (3, [-1], [True], ["1"], [1] * 65)),
    ],
    "lattice": [
        *(entry("lattice", ["linear", numbers]) for numbers in ([0.0, 1.0], [math.nan, 1.0], [])),
        entry("lattice", ["cubic", [1.0]]),
        entry("lattice", 3),
        entry("lattice", ["log", [1, 1 << 60, 0.1]]),
        lambda header: (
            header["tensors"][1].__setitem__(0, ["int32", [4]])
            or header["tensors"][1].__setitem__(1, ["linear", [0.1, 0.05]])
        ),
    ],
    "bytes": [entry("main_bytes", value) for value in (-1, 1 << 63, "1")]
    + [entry("patch_bytes", value) for value in (1.5, 1 << 40)],
    "checksums": [entry("payload_crc", 1 << 32), entry("digest", b""), entry("digest", bytes(32))],
    "ratio": [
        entry("spec", ["float32", [1 << 40]]),
        entry("spec", ["float32", [1 << 40, 1 << 40, 1 << 40]]),
    ],
    "tree": [
        tokens(),
        tokens("d"),
        tokens("q", 1),
        tokens("d", 1),
        tokens("d", 1, "l", 0, 1),
        tokens("d", -1),
        tokens("l", "s", "text"),
        tokens("l", 1 << 40),
        tokens("x", 0),
        tokens("x", 5),
        tokens("x", "0"),
        tokens("l", 3, "x", 0, "x", 1, "x", 2, 7),
        tokens("i", 0),
        tokens("b", -1, blobs=[b""]),
        tokens("g", "object", 0, blobs=[bytes(8)]),
        tokens("g", "float32", 0, blobs=[b"abc"]),
        field("tree", [[["l", []]], []]),
        tokens(*["l", 1] * 500, 1),
    ],
    "view": [
        tokens("l", 4, "x", 0, "x", 1, "x", 2, "v", 0, *view)
        for view in (
            [0, 1, 385, 1],
            [384, 1, 1, 1],
            [-1, 1, 1, 1],
            [0, 1, 2, 1 << 62],
            [0, 1, 1 << 40, 1],
            [0, 1 << 40],
            [0, 2, 2],
        )
    ],
}
VECTORS = [(rule, n) for rule, changes in BROKEN.items() for n in range(len(changes))]


@pytest.mark.parametrize(("rule", "n"), VECTORS)
def test_a_broken_rule_is_refused(rule, n, folder):
    """A header that breaks one rule is refused although all checksums are valid."""
    rewrite_version(folder, BROKEN[rule][n], keep_id=rule in ("id", "checksums"))
    with pytest.raises(PCRError):
        load(folder)


def test_each_rule_of_the_specification_has_a_vector():
    """Every tested rule is named in brackets in docs/checkpoints-format.md."""
    text = (ROOT / "docs" / "checkpoints-format.md").read_text()
    for rule in BROKEN:
        assert f"[{rule}]" in text, rule


def nested(depth):
    """Return nested arrays that each claim as many items as there are bytes."""
    return b"".join(b"\xdd" + struct.pack(">I", 60_000) for _ in range(depth)) + bytes(60_000)


BOMBS = {
    "empty lists": b"\xdd" + struct.pack(">I", MIB) + b"\x90" * MIB,
    "empty maps": b"\xdd" + struct.pack(">I", MIB) + b"\x80" * MIB,
    "versions": b"\x81\xa8versions\xdd" + struct.pack(">I", MIB) + b"\x80" * MIB,
    "metrics": b"\x81\xa7metrics\xdf\xff\xff\xff\xff" + bytes(100),
    "tokens": b"\x81\xa4tree\x92\xdd" + struct.pack(">I", MIB) + b"\x90" * MIB,
    "claims": nested(900),
    "one claim": b"\xdd\xff\xff\xff\xff",
    "a long string": b"\xdb" + struct.pack(">I", 1 << 31),
    "an extension": b"\xc7\x01\x05a",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_header_takes_little_memory(folder, tmp_path, name):
    """Loading or pulling a header bomb takes at most 20 MB, in a manifest and in a version."""
    for magic, path in (
        (MANIFEST, manifest_path(folder)),
        (MANIFEST, folder / "manifest.pcm"),
        (VERSION, folder / DeltaStore(str(folder)).versions()[-1].file),
    ):
        kept = path.read_bytes()
        path.write_bytes(frame(magic, BOMBS[name]))
        if path.name == "manifest.pcm":
            for other in folder.glob("manifest-*"):
                os.rename(other, tmp_path / other.name)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(PCRError):
            load(folder)
        with pytest.raises(PCRError):
            pull(str(folder), DeltaStore(str(tmp_path / "target")), max_bytes=MIB)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        assert grown < 20 * 1024, f"{grown} KiB for {path.stat().st_size} bytes"
        path.write_bytes(kept)
        for other in tmp_path.glob("manifest-*"):
            os.rename(other, folder / other.name)


def of_record(name, value):
    return lambda raw: raw["versions"][-1].update({name: value})


RECORDS = {
    "number": [0, "1", 1 << 60],
    "id": [b"", None],
    "file": ["../../etc/passwd", "000001-00.pcd", 3, "000001-0123456789abcdef.pcd\n"],
    "file_bytes": [-1, 1.5],
    "header_bytes": [1 << 62],
    "raw_bytes": ["x", 1 << 47],
    "metrics": [[], {"a": {}}],
    "saved": [1e300, math.nan, "3"],
    "parent": [2, 7, -1, b"x"],
}


@pytest.mark.parametrize(
    "change",
    [
        *(of_record(name, value) for name, values in RECORDS.items() for value in values),
        field("number", -1),
        field("precision", 3),
        field("precision", "x" * 5000),
        field("next_version", 1),
        field("versions", {}),
        field("more", 1),
        lambda raw: raw["versions"].reverse(),
        lambda raw: raw["versions"].append(raw["versions"][0]),
    ],
)
def test_every_field_of_a_manifest_is_checked(folder, change):
    """Invalid values are refused before they reach arithmetic, a terminal, or a file name."""
    rewrite_manifest(folder, change)
    with pytest.raises(PCRError):
        load(folder)


def test_random_headers_raise_our_errors_only(folder):
    """A corrupted header with a valid checksum loads unchanged content or raises PCRError."""
    path = folder / DeltaStore(str(folder)).versions()[-1].file
    data = path.read_bytes()
    stop = 24 + struct.unpack_from("<Q", data, 16)[0]
    expected = load(folder)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        place, value = (int(torch.randint(n, (1,), generator=generator)) for n in (stop - 24, 256))
        damaged = bytearray(data[24:stop])
        damaged[place] = value
        path.write_bytes(frame(VERSION, bytes(damaged)) + data[stop:])
        try:
            loaded = load(folder)
        except PCRError:
            continue
        # The time and the metrics are not part of the content.
        assert same(loaded, expected)
