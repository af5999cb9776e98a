"""A frame is read back, or refused by a rule with a name before memory is taken."""

import struct

import msgpack
import pytest
import zstandard

from pcrshard.checkpoint import file_frame
from pcrshard.checkpoint.file_frame import MANIFEST, VERSION_FILE, pack_frame, unpack_frame
from pcrshard.checksum import crc32c
from pcrshard.errors import CorruptCheckpoint, UnsupportedVersion


def frame(body: bytes, magic=VERSION_FILE, version=1, size=None, checksum=None) -> bytes:
    rest = struct.pack("<IQ", version, len(body) if size is None else size) + body
    return magic + struct.pack("<I", crc32c(rest) if checksum is None else checksum) + rest


def test_a_header_comes_back():
    """Plain values of all kinds."""
    header = {"a": [1, -2, None, True, 2.5, "text", b"bytes"], "b": {3: "integer key"}}
    assert unpack_frame(pack_frame(VERSION_FILE, header), VERSION_FILE) == header


def test_the_bytes_are_those_of_the_specification():
    """A frame written by hand is read: the layout cannot change unnoticed."""
    literal = bytes.fromhex("895043440d0a1a0a 9be50157 01000000 0500000000000000 00 81a16101")
    assert unpack_frame(literal, VERSION_FILE) == {"a": 1}
    assert pack_frame(VERSION_FILE, {"a": 1}) == literal


def test_every_flipped_bit_is_found():
    """Head, checksum, sizes, header: none of them can change unseen."""
    data = pack_frame(VERSION_FILE, {"text": "hello", "number": 7})
    for place in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            with pytest.raises((CorruptCheckpoint, UnsupportedVersion)):
                unpack_frame(bytes(damaged), VERSION_FILE)


BOMB = b"\x01" + zstandard.compress(bytes(file_frame.MAX_PLAIN_BYTES + 1), 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "head of 24 bytes, got 0"),
        (frame(b"\x00\x80")[:23], "head of 24 bytes, got 23"),
        (frame(b"\x00\x80", magic=MANIFEST), "expected the magic"),
        (frame(b"\x00\x80", size=3), "header of 3 bytes, got 2"),
        (frame(b"\x00\x80", size=1 << 62), "67108864 bytes at most"),
        (frame(b"\x00\x80", checksum=1), "does not match its checksum"),
        (frame(b"\x00\x80") + b"x", "expected a header of 2 bytes, got 3"),
        (frame(b"\x00\x90"), "expected a map, got list"),
        (frame(b"\x00\x81\xa1a"), "not msgpack"),
        (frame(b"\x00" + b"\x91" * 5000), "not msgpack"),
        (frame(b"\x00" + msgpack.packb({"a": msgpack.ExtType(1, b"x")})), "not msgpack"),
        (frame(b"\x00" + b"\x81\xa1a\xdd\xff\xff\xff\xff"), "not msgpack"),
        (frame(b"\x00" + b"\x81\x90\x01"), "not msgpack"),
        (frame(b"\x05\x80"), "mark of a coder"),
        (frame(BOMB), "promises to hold 268435457 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_headers_are_refused(data, message):
    """One vector for each way that a header can be wrong with a right checksum."""
    with pytest.raises(CorruptCheckpoint, match=message):
        unpack_frame(data, VERSION_FILE)


def test_a_newer_format_says_so():
    """Whoever has an older pcrshard is told to update, not that the file is damaged."""
    with pytest.raises(UnsupportedVersion, match="version 1, got 2"):
        unpack_frame(frame(b"\x00\x80", version=2), VERSION_FILE)
