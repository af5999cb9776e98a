"""Untrusted stores: each rule of the format is checked, and small files take little memory."""

import contextlib
import functools
import operator
import resource
import shutil
import struct

import pytest
import torch
import yaml
from forge import MANIFEST, VERSION, frame, manifest_path, rewrite_manifest, rewrite_version
from states import same, saved, tiny_state
from support import ROOT

from pcrshard.checkpoint import DeltaStore, pull
from pcrshard.errors import PCRError

MIB = 1 << 20
BROKEN = yaml.safe_load((ROOT / "tests" / "vectors" / "checkpoints.yaml").read_text())
# A tree of 500 levels is refused before Python's own limit.
BROKEN["version"]["tree"].append({"tree": [["l", 1] * 500 + [1], []]})
BROKEN["manifest"]["fields"].append({"precision": "x" * 5000})


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Return a store of two versions that no test changes."""
    return saved(tmp_path_factory.mktemp("format") / "store", 2, tiny_state).url


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "store")


def load(folder):
    return DeltaStore(folder).load()


def test_a_store_written_by_the_specification_is_read(folder):
    """The forging helpers produce files that load, so each test below breaks only one rule."""
    expected = load(folder)
    rewrite_version(folder, lambda header: None)
    rewrite_manifest(folder, lambda header: None)
    assert same(load(folder), expected)


def changed(header, change):
    for path, value in change.items():
        if not path:
            return value
        *outer, last = (int(key) if key.isdigit() else key for key in path.split("."))
        functools.reduce(operator.getitem, outer, header)[last] = value
    return header


@pytest.mark.parametrize(
    ("kind", "rule", "change"),
    [
        pytest.param(kind, rule, change, id=f"{rule}-{n}")
        for kind, rules in BROKEN.items()
        for rule, changes in rules.items()
        for n, change in enumerate(changes)
    ],
)
def test_a_broken_rule_is_refused(folder, kind, rule, change):
    """A header that breaks one rule is refused although all checksums are valid; ``verify`` finds
    it, too.
    """
    if kind == "manifest":
        rewrite_manifest(folder, lambda header: changed(header, change))
    else:
        keep_id = rule in ("id", "checksums")
        rewrite_version(folder, lambda header: changed(header, change), keep_id=keep_id)
    with pytest.raises(PCRError, match="is damaged" if rule in ("view", "order") else None):
        load(folder)
    if rule == "view":
        assert DeltaStore(folder).verify()


def test_each_rule_of_the_specification_has_a_vector():
    """Every tested rule is named in brackets in docs/checkpoints-format.md."""
    text = (ROOT / "docs" / "checkpoints-format.md").read_text()
    assert [rule for rule in BROKEN["version"] if f"[{rule}]" not in text] == []


@contextlib.contextmanager
def little_memory():
    """The block is refused, and takes at most 20 MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(PCRError) as refused:
        yield refused
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown < 20 * 1024, f"{grown} KiB"


def claim(items=MIB):
    """Return the beginning of an array that claims this number of items."""
    return b"\xdd" + struct.pack(">I", items)


@pytest.mark.parametrize(
    "bomb",
    [
        pytest.param(claim() + b"\x90" * MIB, id="empty lists"),
        pytest.param(claim() + b"\x80" * MIB, id="empty maps"),
        pytest.param(b"\x81\xa8versions" + claim() + b"\x80" * MIB, id="versions"),
        pytest.param(b"\x81\xa7metrics\xdf\xff\xff\xff\xff" + bytes(100), id="metrics"),
        pytest.param(b"\x81\xa4tree\x92" + claim() + b"\x90" * MIB, id="tokens"),
        pytest.param(claim(60_000) * 900 + bytes(60_000), id="claims"),
        pytest.param(b"\xdb" + struct.pack(">I", 1 << 31), id="a long string"),
        pytest.param(b"\xc7\x01\x05a", id="an extension"),
    ],
)
def test_a_header_takes_little_memory(folder, tmp_path, bomb):
    """Loading or pulling a header bomb takes at most 20 MB, in a version and in a manifest."""
    for magic, path in (
        (VERSION, max(folder.glob("*.pcd"))),
        (MANIFEST, manifest_path(folder)),
    ):
        path.write_bytes(frame(magic, bomb))
        with little_memory():
            load(folder)
        with little_memory():
            pull(folder, DeltaStore(tmp_path / "target"), max_bytes=MIB)


MANY = ["l", 15_000]


@pytest.mark.parametrize(
    ("tokens", "blob"),
    [
        pytest.param(["d", 1, "s", "k" * 20_000, *MANY, *["x", 0] * 15_000], b"", id="a path"),
        pytest.param([*MANY, *["i", 0] * 15_000], bytes(19_999) + b"a", id="an integer"),
    ],
)
def test_what_is_used_often_takes_little_memory(folder, tokens, blob):
    """A long key above many tensors, or a large integer in many places, does not multiply."""
    tree = [["l", 4, "x", 0, "x", 1, "x", 2, *tokens], [blob]]
    rewrite_version(folder, lambda header: header | {"tree": tree})
    with little_memory() as refused:
        load(folder)
    assert "the header is damaged" in str(refused.value)


def test_random_headers_raise_our_errors_only(folder):
    """A corrupted header with a valid checksum loads unchanged content or raises PCRError."""
    path = max(folder.glob("*.pcd"))
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
