"""JPEGs that are damaged in ways that a seed decides, and what an encoder makes of them."""

import random
import re

from support import run_tool

from pcrshard import native
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.errors import PCRError
from pcrshard.format.scan_script import STANDARD, scans_for
from pcrshard.jpeg.markers import map_jpeg
from pcrshard.testing import make_jpeg

EOI = b"\xff\xd9"
JPEGTRAN = ("jpegtran", "-copy", "none", "-progressive")
# What jpegtran warns of, and the core passes: three bytes of padding, which some encoders write,
# and JFIF versions and fields of sequential scan headers, which mean nothing.
_HARMLESS = re.compile(r"[123] extraneous bytes before marker|unknown JFIF revision|Invalid SOS")
_BYTES = (0, 1, 0x80, 0xFF)


def sources():
    """Small whole JPEGs of all kinds that are encoded."""
    plain = [
        make_jpeg(seed, 40, 56, mode, quality=80, subsampling=subsampling)
        for seed, (mode, subsampling) in enumerate((("L", 0), ("RGB", 2), ("RGB", 0), ("CMYK", 0)))
    ]
    kinds = (("-restart", "2"), ("-optimize",), ("-progressive",), ("-arithmetic",))
    made = [run_tool("jpegtran", *kind, data=jpeg).stdout for kind in kinds for jpeg in plain[:2]]
    return [*plain, *made, _without_tables(plain[1]), _with_late_height(plain[1])]


def _without_tables(jpeg):
    """As a frame of Motion JPEG."""
    tables, scan = jpeg.index(b"\xff\xc4"), jpeg.index(b"\xff\xda")
    return jpeg[:tables] + jpeg[scan:]


def _with_late_height(jpeg):
    at = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:at] + bytes(2) + jpeg[at + 2 : -2] + b"\xff\xdc\0\4" + jpeg[at : at + 2] + EOI


def mutants(count, seed=0):
    """``count`` damaged JPEGs, the same for the same seed."""
    rng = random.Random(seed)
    bases = sources()
    for _ in range(count):
        jpeg = bytearray(rng.choice(bases))
        for _ in range(rng.choice((1, 1, 2, 3))):
            rng.choice((_flip, _flip, _set, _drop, _insert, _copy))(rng, jpeg)
        yield bytes(jpeg)


def _flip(rng, jpeg):
    jpeg[rng.randrange(2, len(jpeg))] ^= 1 << rng.randrange(8)


def _set(rng, jpeg):
    jpeg[rng.randrange(2, len(jpeg))] = rng.choice(_BYTES)


def _drop(rng, jpeg):
    at = rng.randrange(2, len(jpeg))
    del jpeg[at : at + rng.randrange(1, 9)]


def _insert(rng, jpeg):
    at = rng.randrange(2, len(jpeg))
    jpeg[at:at] = bytes(rng.choice(_BYTES) for _ in range(rng.randrange(1, 9)))


def _copy(rng, jpeg):
    """Some bytes from elsewhere in the same file."""
    at = rng.randrange(2, len(jpeg))
    start = rng.randrange(2, len(jpeg))
    size = rng.randrange(1, 40)
    jpeg[at : at + size] = jpeg[start : start + size]


def judge(jpeg):
    """What ``encode_jpeg`` says of a JPEG: why it is refused, or ``None`` with its scans."""
    try:
        pieces = encode_jpeg(jpeg).pieces
    except PCRError as error:
        return f"{type(error).__name__}: {error}", b""
    return None, b"".join(pieces[:-1]) + EOI


def judge_by_backend(jpeg, backend):
    """What the core says of a JPEG by one of its backends."""
    try:
        source = map_jpeg(jpeg)
        scans = scans_for(STANDARD, source.color, len(source.frame.components))
        return native.rescan(jpeg, scans, backend).jpeg
    except ValueError as error:
        return str(error)


def difference(jpeg):
    """How the judges differ about a JPEG that is encoded; ``None`` if they agree.

    The outside judge is jpegtran: what is accepted is accepted by it too, without a warning, and
    becomes the same bytes.
    """
    backends = {judge_by_backend(jpeg, backend) for backend in ("auto", "portable")}
    if len(backends) > 1:
        return "the backends differ"
    refused, encoded = judge(jpeg)
    if refused:
        return None
    expected = run_tool(*JPEGTRAN, data=jpeg)
    warnings = expected.stderr.decode().splitlines()
    if any(not _HARMLESS.search(line) for line in warnings):
        return f"accepted, but jpegtran says {warnings}"
    return None if expected.stdout == encoded else "jpegtran writes other bytes"
