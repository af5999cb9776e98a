"""Writes fuzzing seeds: small JPEGs of a folder, cut to prefixes, each behind 8 bytes of options."""

from __future__ import annotations

import argparse
import hashlib
import random
from pathlib import Path

MAX_SEED_BYTES = 12_000


def seeds(jpeg: bytes, rng: random.Random) -> list[bytes]:
    """The stream with four requests, cut, and with a few bits flipped."""
    out = []
    for variant in range(4):
        options = bytes([rng.randrange(256), variant, *rng.randbytes(6)])
        out.append(options + jpeg)
    out.append(bytes(8) + jpeg[: rng.randrange(2, len(jpeg) + 1)])
    flipped = bytearray(jpeg)
    for _ in range(4):
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    out.append(bytes([0, 3, *rng.randbytes(6)]) + bytes(flipped))
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
                    (arguments.corpus / hashlib.sha1(seed, usedforsecurity=False).hexdigest()).write_bytes(seed)


if __name__ == "__main__":
    main()
