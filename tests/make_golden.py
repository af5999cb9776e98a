"""Make tests/golden/v3: run it by hand, only when SPEC.md gains a version.

Golden shards are what version 3 must always look like. Files of tests/vectors/reject are index
prefixes that each break one rule of SPEC.md; tests/make_vectors.py makes them.
"""

import base64
import hashlib
import json
import pathlib
from typing import Any

import msgspec
from support import write_shard

from pcrshard import Shard, ShardFormat
from pcrshard.encoding.encode_jpeg import encode_jpeg, keep_whole
from pcrshard.encoding.shard_writer import encode_sample
from pcrshard.format.kinds import read_kinds
from pcrshard.testing import make_jpeg

TESTS = pathlib.Path(__file__).resolve().parent
GOLDEN = TESTS / "golden" / "v3"
# One gray pixel, as another program wrote it.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg=="
)
EXIF = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"


def sources():
    return [
        {
            "__key__": "a/colour",  # codespell:ignore colour
            "jpg": make_jpeg(1, 40, 56, exif=EXIF, icc_profile=b"a profile"),
            "cls": 0,
            "json": b'{"x": 1}',
        },
        {"__key__": "a/gray", "jpg": make_jpeg(2, 17, 9, "L"), "cls": 1},
        {
            "__key__": "b/cmyk",
            "jpg": make_jpeg(3, 16, 16, "CMYK"),
            "cls": 2,
            "left.jpg": make_jpeg(4, 8, 8),
        },
        {
            "__key__": "b/ünï",
            "jpg": make_jpeg(5, 1, 1),
            "txt": "one pixel",
            "views.jpg": [make_jpeg(6, 24, 8), b"kept in a list", make_jpeg(7, 9, 9, "L")],
        },
        {"__key__": "c/kept", "jpg": b"no JPEG, but a file all the same", "npy": b"late", "cls": 3},
        {"__key__": "c/empty", "jpg": b"", "seg.png": PNG, "boxes.json": b"[[0, 0, 8, 8]]"},
        {"__key__": "c/png", "png": PNG, "cls": 4},
    ]


def encode(sample):
    return encode_sample(
        sample, lambda _, file: encode_jpeg(file) if file[:1] == b"\xff" else keep_whole(file, 10)
    )


def formats():
    late = {"npy": 5, "json": "full"}
    return {
        "compact": ShardFormat(deferred=late),
        "preview": ShardFormat(layout="preview", base=2, preview_fields=("cls",), deferred=late),
    }


KINDS = read_kinds({"seg.png": "mask", "json:x": "boxes:xywh", "boxes.json": "boxes"})


def make_golden():
    (GOLDEN / "sources").mkdir(parents=True, exist_ok=True)
    samples = sources()
    for number, sample in enumerate(samples):
        for name, value in sample.items():
            if name.endswith("jpg"):
                images = value if isinstance(value, list) else [value]
                for place, image in enumerate(images):
                    (GOLDEN / "sources" / f"{number}.{name}.{place}").write_bytes(image)
    expected: dict[str, Any] = {}
    for layout, fmt in formats().items():
        path = GOLDEN / f"{layout}-000000.tar"
        encoded = list(map(encode, samples))
        entry = write_shard(path, encoded, fmt, KINDS)
        expected[layout] = {
            "entry": msgspec.structs.asdict(entry),
            "samples": {str(scan): digest(Shard(str(path)), scan) for scan in (*range(11), "full")},
        }
    (GOLDEN / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def digest(shard, scan):
    """Each sample with its values as short hashes."""
    return [{k: _digest(v) for k, v in sample.items()} for sample in shard.samples(scan)]


def _digest(value):
    if isinstance(value, list):
        return [_digest(one) for one in value]
    return value if isinstance(value, str) else hashlib.sha256(value).hexdigest()[:16]


if __name__ == "__main__":
    make_golden()
