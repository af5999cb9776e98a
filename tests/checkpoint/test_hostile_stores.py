"""Stores that somebody else wrote: small files take little memory, and errors are ours."""

import os
import resource
import struct

import msgpack
import pytest
import torch
import zstandard
from states import same, tiny_state

from pcrshard.checkpoint import DeltaStore, pull
from pcrshard.checkpoint.frame import MANIFEST, VERSION_FILE, pack_frame, unpack_frame
from pcrshard.checksum import crc32c
from pcrshard.errors import CorruptCheckpoint, PCRError

MIB = 1 << 20


def frame(magic, plain, *, packed=True):
    body = b"\x01" + zstandard.compress(plain) if packed else b"\x00" + plain
    rest = struct.pack("<IQ", 2, len(body)) + body
    return magic + struct.pack("<I", crc32c(rest)) + rest


def nested(depth):
    """Arrays that each claim to hold as much as there are bytes."""
    return b"".join(b"\xdd" + struct.pack(">I", 60_000) for _ in range(depth)) + bytes(60_000)


BOMBS = {
    "empty lists": b"\xdd" + struct.pack(">I", 40 * MIB) + b"\x90" * (40 * MIB),
    "empty maps": b"\xdd" + struct.pack(">I", 40 * MIB) + b"\x80" * (40 * MIB),
    "claims": nested(900),
    "one claim": b"\xdd\xff\xff\xff\xff",
    "a long string": b"\xdb" + struct.pack(">I", 1 << 31),
    "zeros": bytes(100 * MIB),
    "an extension": b"\xc7\x01\x05a",
}


@pytest.fixture
def folder(tmp_path):
    with DeltaStore(str(tmp_path / "store")) as store:
        for number in (1, 2):
            store.save(tiny_state(number))
    return tmp_path / "store"


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", BOMBS)
def test_a_header_takes_no_more_than_64_times_its_bytes(folder, tmp_path, name, packed):
    """Refused by counting, in a manifest and in a version, opened and pulled."""
    plain = BOMBS[name]
    if not packed and len(plain) > MIB:
        pytest.skip("large files may take memory")
    for magic, path in (
        (MANIFEST, max(folder.glob("manifest-*.pcm"))),
        (MANIFEST, folder / "manifest.pcm"),
        (VERSION_FILE, folder / DeltaStore(str(folder)).versions()[-1].file),
    ):
        kept = path.read_bytes()
        path.write_bytes(frame(magic, plain, packed=packed))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(PCRError):
            if path.name == "manifest.pcm":
                for other in folder.glob("manifest-*"):
                    os.rename(other, tmp_path / other.name)
            DeltaStore(str(folder)).load()
        with pytest.raises(PCRError):
            pull(str(folder), DeltaStore(str(tmp_path / "target")), max_bytes=MIB)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        assert grown < 20 * 1024, f"{grown} KiB for {path.stat().st_size} bytes"
        path.write_bytes(kept)
        for other in tmp_path.glob("manifest-*"):
            os.rename(other, folder / other.name)


@pytest.mark.parametrize(
    "value",
    [[], {}, {"a": [0] * 100_000}, {"a": [[]] * 50_000}, {"a": {str(i): i for i in range(3000)}}],
)
def test_what_is_packed_is_unpacked(value):
    """Also states that compress so well that they look like an attack."""
    packed = pack_frame(MANIFEST, {"value": value})
    assert unpack_frame(packed, MANIFEST) == {"value": value}


def test_a_state_of_many_small_values_comes_back(tmp_path):
    """A long history of equal entries is no bomb."""
    state = {"history": [{"loss": 0.5, "tags": []}] * 30_000, "zeros": [0] * 100_000}
    with DeltaStore(str(tmp_path)) as store:
        store.save(state)
        assert same(store.load(), state)


def rewrite(folder, change):
    """Change the newest manifest by a function of its map; the checksum is right again."""
    path = max(folder.glob("manifest-*.pcm"))
    raw = unpack_frame(path.read_bytes(), MANIFEST)
    change(raw)
    path.write_bytes(frame(MANIFEST, msgpack.packb(raw)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("number", 0), ("number", "1"), ("number", 1 << 60), ("id", b""), ("id", None),
        ("file", "../../etc/passwd"), ("file", "000001-00.pcd"), ("file", 3),
        ("file_bytes", -1), ("file_bytes", 1.5), ("header_bytes", 1 << 62), ("raw_bytes", "x"),
        ("raw_bytes", 1 << 47), ("metrics", []), ("metrics", {"a": {}}), ("saved", 1e300),
        ("saved", float("nan")), ("saved", 3), ("parent", 2), ("parent", 7), ("parent", -1),
        ("parent", b"x"),
    ],
)  # fmt: skip
def test_every_field_of_a_record_is_checked(folder, field, value):
    """Before it reaches arithmetic, a terminal or a file name."""

    def change(raw):
        raw["versions"][-1][field] = value

    rewrite(folder, change)
    with pytest.raises(PCRError):
        DeltaStore(str(folder)).load()


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.update(number=-1),
        lambda raw: raw.update(precision=3),
        lambda raw: raw.update(next_version=1),
        lambda raw: raw.update(versions={}),
        lambda raw: raw.update(more=1),
        lambda raw: raw["versions"].reverse(),
        lambda raw: raw["versions"].append(raw["versions"][0]),
    ],
)
def test_every_field_of_a_manifest_is_checked(folder, change):
    """The same for the manifest itself."""
    rewrite(folder, change)
    with pytest.raises(CorruptCheckpoint):
        DeltaStore(str(folder)).load()


def test_random_headers_raise_our_errors_only(folder):
    """Bytes changed anywhere in the plain header, with right checksums otherwise."""
    path = folder / DeltaStore(str(folder)).versions()[-1].file
    data = path.read_bytes()
    size = 24 + struct.unpack_from("<Q", data, 16)[0]
    plain = msgpack.packb(unpack_frame(data[:size], VERSION_FILE))
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        place, value = (int(torch.randint(n, (1,), generator=generator)) for n in (len(plain), 256))
        damaged = bytearray(plain)
        damaged[place] = value
        head = frame(VERSION_FILE, bytes(damaged), packed=False)
        path.write_bytes(head + data[size:])

        def change(raw, header_bytes=len(head) - 24, size=len(head) + len(data) - size):
            raw["versions"][-1] |= {"header_bytes": header_bytes, "file_bytes": size}

        rewrite(folder, change)
        try:
            loaded = DeltaStore(str(folder)).load()
        except PCRError:
            continue
        # The time and the metrics are not part of the content.
        assert same(loaded, DeltaStore(str(folder)).load())
