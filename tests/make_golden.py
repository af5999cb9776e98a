"""Make tests/golden/v3: run it by hand, only when SPEC.md gains a version.

Golden shards are what version 3 must always look like. Files of tests/vectors/reject are index
prefixes that each break one rule of SPEC.md; tests/make_vectors.py makes them.
"""

import base64
import hashlib
import json
import os
import pathlib
from typing import Any

import msgspec
from support import write_shard, write_tar

from pcrshard import IndexOptions, Shard, ShardFormat, index_tars, open_dataset
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
        "compact": ShardFormat("standard", deferred=late),
        "preview": ShardFormat(
            "standard", layout="preview", base=2, preview_fields=("cls",), deferred=late
        ),
    }


PLAIN_KINDS = {"seg.png": "mask", "json:x": "boxes:xywh", "boxes.json": "boxes"}
KINDS = read_kinds(PLAIN_KINDS)


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
    tar = write_plain(GOLDEN / "plain")
    index_tars(tar.parent, options=IndexOptions(checksums=True, kinds=PLAIN_KINDS))
    expected["plain"] = {str(scan): digest(plain_shard(), scan) for scan in (0, "full")}
    (GOLDEN / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def write_plain(folder):
    """Write the samples as a plain tar of a fixed time; returns its path."""
    folder.mkdir(exist_ok=True)
    members = {}
    for sample in sources():
        for name, value in sample.items():
            if isinstance(value, list):
                own = {f"views.{place}.jpg": image for place, image in enumerate(value)}
            else:
                own = {name: value if isinstance(value, bytes) else str(value).encode()}
            members |= {f"{sample['__key__']}.{n}": v for n, v in own.items() if n != "__key__"}
    # Too large for the index.
    members["c/png.npy"] = b"an array" * 200
    path = write_tar(folder / "plain.tar", members)
    os.utime(path, (1, 1))
    return path


def plain_shard():
    index, urls = open_dataset(GOLDEN / "plain")
    return Shard(urls[0], entry=index.shards[0])


def digest(shard, scan):
    """Each sample with its values as short hashes."""
    return [{k: _digest(v) for k, v in sample.items()} for sample in shard.samples(scan)]


def _digest(value):
    if isinstance(value, list):
        return [_digest(one) for one in value]
    return value if isinstance(value, str) else hashlib.sha256(value).hexdigest()[:16]


if __name__ == "__main__":
    make_golden()
