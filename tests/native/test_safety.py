"""Hostile bytes: refused with a message, never a crash, and at a cost bounded by their number."""

import random
import subprocess
import sys
import time

import numpy as np
import pytest
from hostile import ARITHMETIC, HUFFMAN, frame, huffman, scan, segment
from oracle import scan_ends

from pcrshard import native
from pcrshard.errors import CorruptJpeg, FormatError, UnsupportedJpeg
from pcrshard.native._core import ffi, lib
from pcrshard.testing import make_jpeg


@pytest.mark.parametrize("color", ["rgb", "gray"])
@pytest.mark.parametrize("transform", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 1, 2, 5])
@pytest.mark.parametrize("jfif", [True, False])
def test_late_color_markers_change_nothing(oracle, color, transform, after, jfif):
    """As for libjpeg, only the markers before the first scan tell the color space."""
    source = make_jpeg(3, 40, 50, progressive=True)
    source = source if jfif else source[:2] + source[20:]
    at = scan_ends(source)[after - 1] if after else 2
    adobe = segment(0xEE, b"Adobe\0\x64\0\0\0\0" + bytes([transform]))
    marked = source[:at] + adobe + source[at:]
    expected, unmarked = (oracle(jpeg, 1 if color == "gray" else 0) for jpeg in (marked, source))
    assert expected is not None
    assert after == 0 or np.array_equal(expected, unmarked)
    for backend in ("auto", "portable"):
        assert np.array_equal(native.decode([marked], color=color, backend=backend), expected)


def test_truncations_and_flips_never_crash(photos):
    """Cut and damaged streams decode or raise a FormatError, the same with both backends."""
    rng = random.Random(6)
    name, source = min(photos, key=lambda item: len(item[1]))
    for _ in range(300):
        damaged = bytearray(source[: rng.randint(2, len(source))])
        for _ in range(rng.randint(0, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        results = []
        for backend in ("auto", "portable"):
            try:
                results.append(native.decode([bytes(damaged)], backend=backend))
            except FormatError as error:
                assert str(error)
                results.append(None)
        assert (results[0] is None) == (results[1] is None), name
        assert results[0] is None or np.array_equal(results[0], results[1])


def test_sizes_that_the_bytes_cannot_hold_are_refused_at_once():
    """A header that claims a gigapixel in 200 bytes is refused before memory is taken."""
    for side in (16000, 65535):
        start = time.perf_counter()
        with pytest.raises(CorruptJpeg, match=r"pixels|1 bit per block"):
            native.decode([frame(HUFFMAN, side, side) + huffman(0, 0) + scan(0, 0) + bytes(64)])
        assert time.perf_counter() - start < 2  # a gigapixel takes ten times as long


def test_progressive_bomb_is_refused():
    """Hundreds of scans that end every block at once cost more than their bytes pay for."""
    side = 2048
    blocks = (side // 8) ** 2
    stream = frame(HUFFMAN, side, side) + huffman(0, 0) + scan(0, 0, 13) + bytes(blocks // 8)
    run = huffman(0x10, 0xE0)
    bomb = b"".join(
        scan(k, k, al, ah=al + 1 if al < 12 else 0) + bytes(8)
        for k in range(1, 20)
        for al in range(12, -1, -1)
    )
    assert native.decode([stream + run]).shape == (side, side, 3)
    with pytest.raises(CorruptJpeg, match=r"visits per bit|at most 256 scans"):
        native.decode([stream + run + bomb])


@pytest.mark.parametrize(
    ("stream", "unsupported", "match"),
    [
        (b"", False, "no bytes"),
        (b"\x89PNG", False, "FF D8"),
        (b"\xff\xd8\xff\xd9", False, "frame header"),
        (frame(HUFFMAN, 8, 8), False, "at least one scan"),
        (frame(ARITHMETIC, 8, 8), True, "SOF9"),
        (frame(HUFFMAN, 0, 8), True, "DNL"),
        (frame(HUFFMAN, 8, 8) + scan(0, 0), True, "DHT"),
        (frame(HUFFMAN, 8, 8) + huffman(0, 0) + scan(0, 5), False, "DC alone"),
        (frame(HUFFMAN, 8, 8) + huffman(0, 0) + scan(1, 5), False, "DC before AC"),
        (frame(HUFFMAN, 8, 8) + huffman(0, 0) + scan(0, 0, 2, ah=3), False, "Ah"),
        (frame(HUFFMAN, 8, 8) + huffman(0, 0) + scan(0, 0), False, "MCU rows"),
        (
            frame(HUFFMAN, 8, 8)
            + segment(0xC4, bytes([0, 3, *bytes(15), 0, 1, 2]))
            + scan(0, 0)
            + b"\0",
            False,
            "fit",
        ),
    ],
)
def test_each_refusal_says_what_was_expected(stream, unsupported, match):
    """Each error has its message, and says whether another decoder should get the file."""
    with pytest.raises(FormatError, match=match) as caught:
        native.decode([stream])
    assert isinstance(caught.value, UnsupportedJpeg) is unsupported
    assert "expected" in str(caught.value)


WRONG = [
    *({"scale": scale} for scale in (-1, 3, 16, 2**31 - 1)),
    {"layout": 2},
    {"layout": -1},
    {"color": 2},
    {"orientation": 9},
    {"crop_y": 2**31 - 1, "crop_h": 2**31 - 1, "crop_w": 1},
    {"out_h": -1, "out_w": 1},
    {"out_h": 65536, "out_w": 1},
]


@pytest.mark.parametrize("fields", WRONG)
def test_the_core_refuses_requests_that_mean_nothing(fields):
    """A wrong number at the boundary of the core is an error with a message, not a signal."""
    jpeg = make_jpeg(1, 40, 50)
    decoder = ffi.gc(lib.pcr_decoder_new(0), lib.pcr_decoder_free)
    piece = ffi.new("pcr_piece *", (ffi.from_buffer(jpeg), len(jpeg)))
    request, found = ffi.new("pcr_request *", fields), ffi.new("int32_t[2]")
    out = ffi.new("uint8_t[]", 6000)
    for call in (
        lambda: lib.pcr_output_size(decoder, piece, 1, request, found, found + 1),
        lambda: lib.pcr_decode(decoder, piece, 1, request, out, 6000),
    ):
        assert call() == lib.PCR_USAGE
        assert b"expected" in ffi.string(lib.pcr_message(decoder))


def test_numbers_beyond_the_core_are_value_errors():
    """A crop or size of more than 31 bits is invalid like any other."""
    for box in ((0, 0, 2**31, 1), (-(2**40), 0, 1, 1)):
        with pytest.raises(ValueError, match="crop"):
            native.decode([make_jpeg()], crop=box)
    with pytest.raises(ValueError, match="size"):
        native.decode([make_jpeg()], size=(2**33, 1))


FAILED = """
import sys
import numpy as np
from pcrshard import native
from pcrshard.errors import CorruptJpeg
from pcrshard.jpeg.markers import map_jpeg
from pcrshard.format.scan_script import STANDARD, scans_for
from pcrshard.jpeg.other_formats import compress

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

whole = compress(np.zeros((6000, 6000, 3), np.uint8), 90)
scans = scans_for(STANDARD, "ycc", 3)
native.rescan(compress(np.zeros((64, 64, 3), np.uint8), 90), scans)
before = resident()
cut = whole[: len(whole) // 2] + bytes([255, 217])
try:
    native.rescan(cut, scans) if sys.argv[1] == "cut" else native.rescan(whole, scans[:2])
except (CorruptJpeg, ValueError):
    print((resident() - before) >> 20)
"""


@pytest.mark.parametrize("how", ["cut", "script"])
def test_a_call_that_fails_frees_its_memory(how):
    """After a damaged file or a wrong script, no thread keeps the coefficients of a large image."""
    command = [sys.executable, "-c", FAILED, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 70
