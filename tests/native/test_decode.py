"""The native decoder against libjpeg with block smoothing off, bit for bit."""

import contextlib

import numpy as np
from PIL import Image
from support import run_python

from pcrshard import native
from pcrshard.errors import FormatError, UnsupportedJpeg

EOI = b"\xff\xd9"
BACKENDS = ("auto", "portable")
# Legal, but not for this core; everything else that is called valid must decode.
UNSUPPORTED = {
    "valid-12bit-sof1.jpg",
    "valid-arith-prog-422.jpg",
    "valid-arith-seq-420.jpg",
    "valid-arith-seq-440-rst1.jpg",
    "valid-dnl-marker.jpg",
    "valid-lossless-sof3-gray16.jpg",
    "valid-lossless-sof3-rgb8.jpg",
}


def test_every_scan_of_photographs_matches_libjpeg(progressive, oracle):
    """Every prefix of every photograph decodes to libjpeg's pixels, with both backends."""
    for name, source, prefixes in progressive:
        for scan, stream in enumerate([source, *prefixes]):
            expected = oracle(stream + EOI)
            for backend in BACKENDS:
                got = native.decode([stream], backend=backend)
                assert np.array_equal(got, expected), (name, scan, backend)


def test_odd_files_match_libjpeg_or_are_refused(odd_files, oracle):
    """Whatever is not refused has libjpeg's pixels, and both backends agree on all of it."""
    compared = 0
    for path in odd_files:
        jpeg = path.read_bytes()
        results = []
        for backend in BACKENDS:
            try:
                results.append(native.decode([jpeg], backend=backend))
            except FormatError as error:
                assert "expected" in str(error), path.name
                is_valid = path.name.startswith("valid")
                assert not is_valid or path.name in UNSUPPORTED, (path.name, str(error))
                assert not is_valid or isinstance(error, UnsupportedJpeg), path.name
                results.append(None)
        assert (results[0] is None) == (results[1] is None), path.name
        if results[0] is not None:
            expected = oracle(jpeg)
            with contextlib.suppress(OSError), Image.open(path) as picture:
                if picture.mode == "CMYK":
                    expected = np.asarray(picture.convert("RGB"))
            assert np.array_equal(results[0], results[1]), path.name
            assert expected is None or np.array_equal(results[0], expected), path.name
            compared += expected is not None
    assert compared > 100


def test_pieces_may_be_cut_anywhere(progressive):
    """Scattered pieces, even of one byte, decode as the joined stream does."""
    _, _, prefixes = min(progressive, key=lambda item: len(item[2][-1]))
    stream = prefixes[2]
    expected = native.decode([stream])
    for step in (1, 7, 1000):
        pieces = [memoryview(stream)[i : i + step] for i in range(0, len(stream), step)]
        assert np.array_equal(native.decode(pieces), expected), step
    assert np.array_equal(native.decode([np.frombuffer(stream, np.uint8), b""]), expected)


def test_without_the_core_the_import_says_what_to_install():
    """A package that was built without a compiler is no half of one: it names what is missing."""
    program = """
import sys
sys.modules["pcrshard.native._core"] = None
import pcrshard
for name in ("ImageDecoder", "decode_image", "encode", "Shard"):
    try:
        getattr(pcrshard, name)
    except ImportError as error:
        assert "the native core of pcrshard is not built" in str(error), error
        assert "install a wheel, or a C compiler" in str(error), error
    else:
        raise AssertionError(name)
"""
    run_python("-c", program)
