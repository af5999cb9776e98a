"""Make tests/golden/v1 and tests/vectors/reject: run it by hand, only when SPEC.md gains a rule or
a version.

Golden shards are what version 1 must always look like. Reject vectors are index prefixes that each
break one rule of SPEC.md; a vector is named RULE--WHY--ERROR.bin.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import struct
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np

from pcrshard import Shard, ShardFormat
from pcrshard.checksum import crc32c
from pcrshard.encoding.shard_writer import encode_sample, write_shard
from pcrshard.format.shard_index import BLOCK, HEAD_STOP, MAGIC, round512
from pcrshard.testing import make_jpeg

TESTS = pathlib.Path(__file__).resolve().parent.parent / "tests"
GOLDEN = TESTS / "golden" / "v1"
REJECT = TESTS / "vectors" / "reject"
EXIF = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"


def sources() -> list[dict[str, Any]]:
    return [
        {
            "__key__": "a/colour",
            "jpg": make_jpeg(1, 40, 56, exif=EXIF),
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
        {"__key__": "b/ünï", "jpg": make_jpeg(5, 1, 1), "txt": "one pixel"},
    ]


def make_golden() -> None:
    (GOLDEN / "sources").mkdir(parents=True, exist_ok=True)
    samples = sources()
    for number, sample in enumerate(samples):
        for name, value in sample.items():
            if name.endswith("jpg"):
                (GOLDEN / "sources" / f"{number}.{name}").write_bytes(value)
    formats = {
        "compact": ShardFormat(),
        "preview": ShardFormat(layout="preview", base=2, preview_fields=("cls",)),
    }
    expected: dict[str, Any] = {}
    for layout, fmt in formats.items():
        path = GOLDEN / f"{layout}-000000.tar"
        entry = write_shard(str(path), [encode_sample(sample) for sample in samples], fmt)
        expected[layout] = {
            "entry": entry._asdict(),
            "samples": {
                str(scan): digest(Shard(str(path)), scan) for scan in (*range(1, 11), "full")
            },
        }
    (GOLDEN / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def digest(shard: Shard, scan: Any) -> list[dict[str, str]]:
    """Each sample with its values as short hashes."""
    return [
        {
            k: v if isinstance(v, str) else hashlib.sha256(v).hexdigest()[:16]
            for k, v in sample.items()
        }
        for sample in shard.samples(scan)
    ]


class Vector:
    """The bytes of a small index, to be changed and signed again."""

    def __init__(self, layout: str = "compact") -> None:
        samples = [
            encode_sample({"__key__": key, "jpg": make_jpeg(i, 8, 8, "L"), "cls": i})
            for i, key in enumerate("pq")
        ]
        path = REJECT / "base-000000.tar"
        write_shard(str(path), samples, ShardFormat(layout=layout))
        self.shard = path.read_bytes()
        head = Shard(str(path)).head
        path.unlink()
        self.head: dict[str, Any] = dict(
            zip(("samples", "groups"), (head.num_samples, head.num_groups), strict=True)
        )
        self.head |= {
            "magic": MAGIC,
            "version": 1,
            "stops": list(head.prefix_stops),
            "padding": b"",
        }
        body = self.shard[HEAD_STOP : HEAD_STOP + head.body_bytes]
        self.schema = msgpack.unpackb(body[: head.schema_bytes])
        self.columns = bytearray(body[head.schema_bytes :])

    def column(self, name: str, dtype: str, shape: tuple[int, ...]) -> Any:
        """A writable view of a column of two gray samples."""
        starts = {
            "sizes": 0,
            "crcs": 88,
            "dims": 176,
            "orientation": 184,
            "base_offsets": 186,
            "key_bytes": 186,
            "keys": 194,
        }
        return np.frombuffer(self.columns, dtype, int(np.prod(shape)), starts[name]).reshape(shape)

    def build(self, **claims: Any) -> bytes:
        schema = claims.get("schema", msgpack.packb(self.schema))
        body = schema + bytes(self.columns)
        head = (
            self.head
            | {"schema_bytes": len(schema), "body_crc": crc32c(body), "body_bytes": len(body)}
            | claims
        )
        names = ("version", "samples", "groups", "schema_bytes", "body_crc", "body_bytes")
        block = head["magic"] + bytes(4) + struct.pack("<IIIIIQ", *(head[name] for name in names))
        block += struct.pack(f"<{len(head['stops'])}Q", *head["stops"])
        block = bytearray(
            (block[: BLOCK - len(head["padding"])]).ljust(BLOCK - len(head["padding"]), b"\0")
            + head["padding"]
        )
        block[8:12] = struct.pack("<I", claims.get("head_crc", crc32c(block)))
        data = self.shard[:BLOCK] + bytes(block) + body
        return data.ljust(round512(len(data)), b"\0")


def head_vectors() -> Iterator[tuple[str, bytes]]:
    good = Vector()
    stops = good.head["stops"]
    yield (
        "magic--text-mode--NotAShard",
        good.build(magic=MAGIC.replace(b"\r\n", b"\n").ljust(8, b"\n")),
    )
    yield "head-checksum--zero--CorruptIndex", good.build(head_crc=0)
    yield "version--newer--UnsupportedVersion", good.build(version=2)
    yield "version--zero--UnsupportedVersion", good.build(version=0)
    yield "num-samples--zero--CorruptIndex", good.build(samples=0)
    yield "num-samples--huge--CorruptIndex", good.build(samples=(1 << 24) + 1)
    yield "num-groups--zero--CorruptIndex", good.build(groups=0, stops=stops[:1])
    yield "num-groups--33--CorruptIndex", good.build(groups=33, stops=stops[:1] * 34)
    yield "schema-bytes--zero--CorruptIndex", good.build(schema_bytes=0)
    yield "schema-bytes--huge--CorruptIndex", good.build(schema_bytes=65537)
    yield "body-checksum--wrong--CorruptIndex", good.build(body_crc=1)
    yield "body-bytes--beyond-first-group--CorruptIndex", good.build(body_bytes=stops[0])
    yield "body-bytes--2-to-63--CorruptIndex", good.build(body_bytes=1 << 63)
    yield "body-bytes--less-than-schema--CorruptIndex", good.build(body_bytes=4)
    yield "prefix-stops--unaligned--CorruptIndex", good.build(stops=[stops[0] + 1, *stops[1:]])
    yield "prefix-stops--falling--CorruptIndex", good.build(stops=[stops[1], stops[0], *stops[2:]])
    yield "prefix-stops--2-to-63--CorruptIndex", good.build(stops=[*stops[:-1], 1 << 63])
    yield "head-padding--not-zero--CorruptIndex", good.build(padding=b"\1")


def schema_vectors() -> Iterator[tuple[str, bytes]]:
    def changed(**values: Any) -> bytes:
        vector = Vector(values.pop("made_as", "compact"))
        vector.schema |= values
        return vector.build()

    groups = Vector().schema["groups"]
    missing = Vector()
    del missing.schema["base"]
    yield "schema-keys--missing--CorruptIndex", missing.build()
    yield "schema-keys--additional--CorruptIndex", changed(more=1)
    yield "schema-keys--a-list--CorruptIndex", Vector().build(schema=msgpack.packb([1, 2]))
    yield "schema-types--float-base--CorruptIndex", changed(base=0.0)
    yield "schema-types--nil-script--CorruptIndex", changed(script=None)
    yield "schema-types--ext--CorruptIndex", changed(script=msgpack.ExtType(5, b"x"))
    yield "schema-types--long-string--CorruptIndex", changed(script="x" * 1025)
    yield (
        "schema-types--not-utf8--CorruptIndex",
        Vector().build(schema=msgpack.packb(Vector().schema).replace(b"standard", b"\xff" * 8)),
    )
    yield "schema-types--deep--CorruptIndex", Vector().build(schema=b"\x91" * 60000 + b"\x90")
    yield "schema-types--fields-a-map--CorruptIndex", changed(fields={})
    yield "schema-groups--nine--CorruptIndex", changed(groups=groups[:9])
    yield "schema-groups--not-a-scan--CorruptIndex", changed(groups=["nonsense", *groups[1:]])
    yield "schema-groups--band-64--CorruptIndex", changed(groups=["0: 1-64, 0, 0", *groups[1:]])
    yield "layout--unknown--CorruptIndex", changed(layout="sideways")
    yield "base--in-compact--CorruptIndex", changed(base=2)
    yield "base--zero-in-preview--CorruptIndex", changed(made_as="preview", base=0)
    yield "base--above-groups--CorruptIndex", changed(made_as="preview", base=11)
    yield "streams--none--CorruptIndex", changed(streams=[])
    yield "streams--unknown-codec--CorruptIndex", changed(streams=[["jpg", "jp2"]])
    yield "streams--triple--CorruptIndex", changed(streams=[["jpg", "jpeg", "x"]])
    yield "fields--also-a-stream--CorruptIndex", changed(fields=["jpg"])
    yield "fields--twice--CorruptIndex", changed(fields=["cls", "cls"])
    yield "preview-fields--in-compact--CorruptIndex", changed(preview_fields=["cls"])
    yield (
        "preview-fields--unknown--CorruptIndex",
        changed(made_as="preview", preview_fields=["txt"]),
    )
    yield "field-name--slash--CorruptIndex", changed(fields=["../cls"])
    yield "field-name--underscores--CorruptIndex", changed(fields=["__key__"])
    yield "field-name--upper-case--CorruptIndex", changed(fields=["CLS"])


def column_vectors() -> Iterator[tuple[str, bytes]]:
    def changed(
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        where: Any,
        value: Any,
        layout: str = "compact",
    ) -> bytes:
        vector = Vector(layout)
        vector.column(name, dtype, shape)[where] = value
        return vector.build()

    short, long, huge = Vector(), Vector(), Vector()
    del short.columns[-1]
    long.columns += b"\0"
    yield "columns-length--short--CorruptIndex", short.build()
    yield "columns-length--long--CorruptIndex", long.build()
    yield "columns-length--samples-not-there--CorruptIndex", huge.build(samples=1 << 24)
    yield "columns-length--huge-key--CorruptIndex", changed("key_bytes", "<u4", (2,), 0, 0xFFFFFFFE)
    yield "empty-crc--changed--CorruptIndex", changed("crcs", "<u4", (11, 2), (2, 0), 5)
    yield "empty-crc--empty-tail--CorruptIndex", changed("crcs", "<u4", (11, 2), (10, 0), 5)
    yield "dims--zero-height--CorruptIndex", changed("dims", "<u2", (2, 2), (0, 0), 0)
    yield "orientation--nine--CorruptIndex", changed("orientation", "<u1", (2,), 1, 9)
    yield "group-stops--larger-piece--CorruptIndex", changed("sizes", "<u4", (11, 2), (0, 0), 5000)
    yield (
        "group-stops--4-gib-piece--CorruptIndex",
        changed("sizes", "<u4", (11, 2), (0, 0), 0xFFFFFFFF),
    )
    yield "dims--pieces-without-a-first--CorruptIndex", changed("sizes", "<u4", (11, 2), (0, 0), 0)
    yield "key--way-out--CorruptIndex", changed("keys", "S1", (2,), 0, b".")
    yield "key--leading-slash--CorruptIndex", changed("keys", "S1", (2,), 0, b"/")
    yield "key--nul--CorruptIndex", changed("keys", "<u1", (2,), 0, 0)
    yield "key--not-utf8--CorruptIndex", changed("keys", "<u1", (2,), 0, 0xFF)
    yield "key--twice--CorruptIndex", changed("keys", "S1", (2,), 0, b"q")
    yield (
        "key--absent--CorruptIndex",
        changed("key_bytes", "<u4", (2,), slice(None), [0xFFFFFFFF, 2]),
    )
    for why, where, value in (
        ("overlap", 1, 2560),
        ("inside-index", 0, 512),
        ("unaligned", 0, 2049),
        ("2-to-63", 1, 1 << 63),
        ("elsewhere", 1, 1 << 20),
    ):
        yield (
            f"base-offsets--{why}--CorruptIndex",
            changed("base_offsets", "<u8", (2,), where, value, "preview"),
        )


def make_vectors() -> None:
    REJECT.mkdir(parents=True, exist_ok=True)
    for old in REJECT.iterdir():
        old.unlink()
    for make in (head_vectors, schema_vectors, column_vectors):
        for name, data in make():
            (REJECT / f"{name}.bin").write_bytes(data)


if __name__ == "__main__":
    make_golden()
    make_vectors()
    print(f"{len(list(REJECT.iterdir()))} vectors in {REJECT}, golden shards in {GOLDEN}")
