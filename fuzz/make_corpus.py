"""Writes fuzzing seeds: small JPEGs of a folder, cut, damaged and with their segments in disorder,
each after 8 bytes of options.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from pathlib import Path

MAX_SEED_BYTES = 12_000
JFIF = b"\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0"
# EXIF with an orientation alone, in both byte orders.
EXIF = [
    b"\xff\xe1\0\x22Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0%c\0\0\0\0\0\0",
    b"\xff\xe1\0\x22Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0%c\0\0\0\0\0\0\0",
]
ADOBE = [b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0" + bytes([transform]) for transform in range(3)]


def parts(jpeg: bytes) -> list[bytes]:
    """The segments between SOI and EOI; a scan's data belong to its header."""
    found, at = [], 2
    while at + 4 <= len(jpeg) and jpeg[at + 1] != 0xD9:
        stop = at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
        while (
            jpeg[at + 1] == 0xDA
            and stop + 2 < len(jpeg)
            and (jpeg[stop] != 0xFF or jpeg[stop + 1] in (0, *range(0xD0, 0xD8)))
        ):
            stop += 1
        found.append(jpeg[at:stop])
        at = stop
    return found


def oriented(rng: random.Random) -> bytes:
    """A segment with an orientation, which may be none that there is."""
    return rng.choice(EXIF) % rng.randint(0, 9)


def disorder(jpeg: bytes, rng: random.Random) -> bytes:
    """The same with a few segments moved, repeated or left out, and markers of color wherever it
    may be.
    """
    found = parts(jpeg)
    for _ in range(rng.randint(1, 4)):
        piece = rng.choice([*found, JFIF, *ADOBE, oriented(rng)])
        if piece in found and rng.random() < 0.7:
            found.remove(piece)
        if rng.random() < 0.8:
            found.insert(rng.randint(0, len(found)), piece)
    if rng.random() < 0.5:
        found = [piece for piece in found if piece[1] != 0xE0]
    return b"\xff\xd8" + b"".join(found) + b"\xff\xd9"


def seeds(jpeg: bytes, rng: random.Random) -> list[bytes]:
    """The stream with six requests, with an orientation of its own, cut, with a few bits flipped,
    without its last scans, and in disorder.
    """
    out = []
    for variant in (0, 1, 2, 3, 8, 11):
        turned = variant | rng.randrange(9) << 4
        options = bytes([rng.randrange(256), turned, *rng.randbytes(6)])
        out.append(options + jpeg)
        options = bytes([rng.randrange(256), variant, *rng.randbytes(6)])
        out.append(options + jpeg[:2] + oriented(rng) + jpeg[2:])
    out.append(bytes(8) + jpeg[: rng.randrange(2, len(jpeg) + 1)])
    flipped = bytearray(jpeg)
    for _ in range(4):
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    out.append(bytes([0, 3, *rng.randbytes(6)]) + bytes(flipped))
    found = parts(jpeg)
    scans = [i for i, part in enumerate(found) if part[1] == 0xDA]
    for last in scans[:-1]:
        options = bytes([rng.randrange(256), rng.choice((8, 9, 10, 11)), *rng.randbytes(6)])
        out.append(options + b"\xff\xd8" + b"".join(found[: last + 1]))
    out += [rng.randbytes(8) + disorder(jpeg, rng) for _ in range(6)]
    return out


def main() -> None:
    """Reads the folders named on the command line and fills the corpus folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    arguments = parser.parse_args()
    arguments.corpus.mkdir(parents=True, exist_ok=True)
    rng = random.Random(1)
    for folder in arguments.folders:
        for path in sorted(folder.rglob("*.[jJ][pP]*")):
            jpeg = path.read_bytes()
            if 4 <= len(jpeg) <= MAX_SEED_BYTES:
                for seed in seeds(jpeg, rng):
                    (
                        arguments.corpus / hashlib.sha1(seed, usedforsecurity=False).hexdigest()
                    ).write_bytes(seed)


if __name__ == "__main__":
    main()
