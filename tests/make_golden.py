"""Make tests/golden/v2 and tests/vectors/reject: run it by hand, only when SPEC.md gains a rule or
a version.

Golden shards are what version 2 must always look like. Reject vectors are index prefixes that each
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
import msgspec
import numpy as np

from pcrshard import Shard, ShardFormat, zstd
from pcrshard.checksum import crc32c
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.encoding.shard_writer import encode_sample, write_shard
from pcrshard.format.shard_head import BLOCK, HEAD_STOP, MAGIC, decode_head, round512
from pcrshard.format.shard_index import decode_index
from pcrshard.testing import make_jpeg

TESTS = pathlib.Path(__file__).resolve().parent
GOLDEN = TESTS / "golden" / "v2"
REJECT = TESTS / "vectors" / "reject"
EXIF = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"


def sources() -> list[dict[str, Any]]:
    return [
        {
            "__key__": "a/colour",  # codespell:ignore colour
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
        {
            "__key__": "b/ünï",
            "jpg": make_jpeg(5, 1, 1),
            "txt": "one pixel",
            "views.jpg": [make_jpeg(6, 24, 8), make_jpeg(7, 9, 9, "L")],
        },
        {"__key__": "c/kept", "jpg": b"no JPEG, but a file all the same", "npy": b"late", "cls": 3},
    ]


def encode(sample: dict[str, Any]) -> Any:
    return encode_sample(sample, lambda _, file: encode_jpeg(file) if file[:1] == b"\xff" else file)


def formats() -> dict[str, ShardFormat]:
    late = {"npy": 5, "json": "full"}
    return {
        "compact": ShardFormat(deferred=late),
        "preview": ShardFormat(layout="preview", base=2, preview_fields=("cls",), deferred=late),
    }


def make_golden() -> None:
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
        entry = write_shard(str(path), list(map(encode, samples)), fmt)
        expected[layout] = {
            "entry": msgspec.structs.asdict(entry),
            "samples": {str(scan): digest(Shard(str(path)), scan) for scan in (*range(11), "full")},
        }
    (GOLDEN / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def digest(shard: Shard, scan: Any) -> list[dict[str, Any]]:
    """Each sample with its values as short hashes."""
    return [{k: _digest(v) for k, v in sample.items()} for sample in shard.samples(scan)]


def _digest(value: Any) -> Any:
    if isinstance(value, list):
        return [_digest(one) for one in value]
    return value if isinstance(value, str) else hashlib.sha256(value).hexdigest()[:16]


class Vector:
    """The bytes of a small index, to be changed and signed again."""

    def __init__(self, layout: str = "compact") -> None:
        samples = [
            encode_sample({"__key__": key, "jpg": make_jpeg(i, 8, 8, "L"), "cls": i})
            for i, key in enumerate("pq")
        ]
        self.shard = shard_bytes(samples, ShardFormat(layout=layout))
        head = decode_head(self.shard[BLOCK:HEAD_STOP])
        self.head: dict[str, Any] = dict(
            zip(("samples", "groups"), (head.num_samples, head.num_groups), strict=True)
        )
        self.head |= {
            "magic": MAGIC,
            "version": 2,
            "stops": list(head.prefix_stops),
            "tables": list(head.table_bytes),
            "padding": b"",
        }
        body = self.shard[HEAD_STOP : HEAD_STOP + head.body_bytes]
        self.schema = msgpack.unpackb(body[: head.schema_bytes])
        stored = body[head.schema_bytes :]
        if len(stored) < head.columns_bytes:
            stored = zstd.decompress(stored, head.columns_bytes)
        self.columns = bytearray(stored)

    def column(self, name: str, dtype: str, shape: tuple[int, ...]) -> Any:
        """A writable view of a column of two gray samples."""
        starts = {"dims": 0, "orientation": 8, "key_bytes": 10, "keys": 18}
        return np.frombuffer(self.columns, dtype, int(np.prod(shape)), starts[name]).reshape(shape)

    def build(self, **claims: Any) -> bytes:
        schema = claims.get("schema", msgpack.packb(self.schema))
        body = schema + bytes(self.columns)
        head = (
            self.head
            | {"schema_bytes": len(schema), "body_crc": crc32c(body), "body_bytes": len(body)}
            | {"columns_bytes": len(self.columns)}
            | claims
        )
        names = ["version", "samples", "groups", "schema_bytes", "body_crc", "body_bytes"]
        names.append("columns_bytes")
        block = head["magic"] + bytes(4) + struct.pack("<IIIIIQQ", *(head[name] for name in names))
        block += struct.pack(f"<{len(head['stops'])}Q", *head["stops"])
        block += struct.pack(f"<{len(head['tables'])}I", *head["tables"])
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
    yield "version--newer--UnsupportedVersion", good.build(version=3)
    yield "version--never-released--UnsupportedVersion", good.build(version=1)
    yield "version--zero--UnsupportedVersion", good.build(version=0)
    yield "num-samples--zero--CorruptIndex", good.build(samples=0)
    yield "num-samples--huge--CorruptIndex", good.build(samples=(1 << 24) + 1)
    yield "num-groups--zero--CorruptIndex", good.build(groups=0, stops=stops[:1], tables=[0])
    yield (
        "num-groups--33--CorruptIndex",
        good.build(groups=33, stops=stops[:1] * 34, tables=[0] * 34),
    )
    yield "schema-bytes--zero--CorruptIndex", good.build(schema_bytes=0)
    yield "schema-bytes--huge--CorruptIndex", good.build(schema_bytes=65537)
    yield "body-checksum--wrong--CorruptIndex", good.build(body_crc=1)
    yield "body-bytes--beyond-first-group--CorruptIndex", good.build(body_bytes=stops[0])
    yield "body-bytes--2-to-63--CorruptIndex", good.build(body_bytes=1 << 63)
    yield "body-bytes--less-than-schema--CorruptIndex", good.build(body_bytes=4)
    yield "prefix-stops--unaligned--CorruptIndex", good.build(stops=[stops[0] + 1, *stops[1:]])
    yield "prefix-stops--falling--CorruptIndex", good.build(stops=[stops[1], stops[0], *stops[2:]])
    yield "prefix-stops--2-to-63--CorruptIndex", good.build(stops=[*stops[:-1], 1 << 63])
    stored = len(good.columns)
    yield "columns-bytes--fewer-than-stored--CorruptIndex", good.build(columns_bytes=stored - 1)
    yield "columns-bytes--65-times--CorruptIndex", good.build(columns_bytes=65 * stored)
    yield "columns-frame--no-frame--CorruptIndex", good.build(columns_bytes=2 * stored)
    bomb = Vector()
    bomb.columns[:] = frame_that_claims(1 << 40).ljust(stored, b"\0")
    yield "columns-frame--a-bomb--CorruptIndex", bomb.build(columns_bytes=2 * stored)
    tables = good.head["tables"]
    yield "table-bytes--beyond-its-group--CorruptIndex", good.build(tables=[4096, *tables[1:]])
    base = Vector("preview")
    claims = [8, *base.head["tables"][1:]]
    yield "table-bytes--of-a-base-group--CorruptIndex", base.build(tables=claims)
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
    yield "streams--seventeen--CorruptIndex", changed(streams=[[f"{i}", "jpeg"] for i in range(17)])
    yield "streams--unknown-codec--CorruptIndex", changed(streams=[["jpg", "jp2"]])
    yield "streams--triple--CorruptIndex", changed(streams=[["jpg", "jpeg", "x"]])
    yield "fields--also-a-stream--CorruptIndex", changed(fields=["jpg"])
    yield "late--also-a-field--CorruptIndex", changed(late=[["cls", 1]])
    yield "late--twice--CorruptIndex", changed(late=[["npy", 1], ["npy", 2]])
    yield "late--scan-0--CorruptIndex", changed(late=[["npy", 0]])
    yield "late--scan-12--CorruptIndex", changed(late=[["npy", 12]])
    yield (
        "late--name-of-a-list--CorruptIndex",
        changed(streams=[["a.jpg", "jpegs"]], late=[["a.jpg", 1]]),
    )
    yield "late--a-word--CorruptIndex", changed(late=[["npy", "5"]])
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
    yield "dims--zero-height--CorruptIndex", changed("dims", "<u2", (2, 2), (0, 0), 0)
    yield "orientation--nine--CorruptIndex", changed("orientation", "<u1", (2,), 1, 9)
    yield "key--way-out--CorruptIndex", changed("keys", "S1", (2,), 0, b".")
    yield "key--leading-slash--CorruptIndex", changed("keys", "S1", (2,), 0, b"/")
    yield "key--nul--CorruptIndex", changed("keys", "<u1", (2,), 0, 0)
    yield "key--not-utf8--CorruptIndex", changed("keys", "<u1", (2,), 0, 0xFF)
    yield "key--twice--CorruptIndex", changed("keys", "S1", (2,), 0, b"q")
    yield (
        "key--absent--CorruptIndex",
        changed("key_bytes", "<u4", (2,), slice(None), [0xFFFFFFFF, 2]),
    )
    lists = Vector()
    lists.schema["streams"] = [["v.jpg", "jpegs"]]
    lists.columns[:0] = bytes([65, 0])
    yield "counts--65--CorruptIndex", lists.build()


class TableVector:
    """A small shard with a late field, to change a table of and sign it again."""

    def __init__(self, row: int, layout: str = "compact") -> None:
        samples = [
            {"__key__": "p", "jpg": make_jpeg(1, 8, 8, "L"), "npy": b"1"},
            {"__key__": "q", "jpg": b"kept"},
        ]
        fmt = ShardFormat(layout=layout, deferred={"npy": 1})
        self.shard = bytearray(shard_bytes(list(map(encode, samples)), fmt))
        head = decode_head(self.shard[BLOCK:HEAD_STOP])
        index = decode_index(head, self.shard[HEAD_STOP : HEAD_STOP + head.body_bytes])
        rows = 2 if layout == "preview" else 1
        self.row = row
        self.place = next(place for place in index.table_places(0, 11) if row in place.rows)
        self.table = self.shard[self.place.start : self.place.stop]
        late = index.late_fields(row)
        self.starts = {"headers_bytes": 4, "sizes": 8, "crcs": 8 + 8 * rows}
        at = 8 + 16 * rows
        if layout == "preview" and row < 2:
            self.starts["offsets"] = at
            at += 16
        for name in late:
            self.starts |= {f"{name} sizes": at, f"{name} crcs": at + 8}
            at += 16
        self.starts["header_sizes"] = at

    def changed(self, name: str, dtype: str, at: int, value: int) -> bytes:
        """The shard with another number in a column."""
        np.frombuffer(self.table, dtype, at + 1, self.starts[name])[at] = value
        return self.build()

    def build(self, *, sign: bool = True) -> bytes:
        if sign:
            self.table[:4] = struct.pack("<I", crc32c(bytes(self.table[4:])))
        self.shard[self.place.start : self.place.stop] = self.table
        return bytes(self.shard)


def table_vectors() -> Iterator[tuple[str, bytes]]:
    def changed(
        name: str,
        dtype: str,
        at: int,
        value: int,
        row: int = 0,
        layout: str = "compact",
    ) -> bytes:
        return TableVector(row, layout).changed(name, dtype, at, value)

    unsigned, short, raw = TableVector(0), TableVector(0), TableVector(0)
    unsigned.table[8] ^= 1
    yield "table-checksum--wrong--CorruptIndex", unsigned.build(sign=False)
    headers_bytes = int.from_bytes(short.table[4:8], "little")
    yield (
        "table-length--bytes-left--CorruptIndex",
        short.changed("headers_bytes", "<u4", 0, headers_bytes - 1),
    )
    yield (
        "table-length--not-there--CorruptIndex",
        changed("headers_bytes", "<u4", 0, 0xFFFFFFFF),
    )
    yield "sizes--larger--CorruptIndex", changed("sizes", "<u4", 0, 5000)
    yield "group-stops--4-gib-piece--CorruptIndex", changed("sizes", "<u4", 0, 0xFFFFFFFF)
    yield "sizes--of-a-missing-unit--CorruptIndex", changed("sizes", "<u4", 1, 1)
    yield "sizes--none-of-the-first--CorruptIndex", changed("sizes", "<u4", 0, 0)
    yield "sizes--later-of-a-missing-unit--CorruptIndex", changed("sizes", "<u4", 1, 1, 3)
    yield "empty-crc--of-a-tail--CorruptIndex", changed("crcs", "<u4", 0, 5, 10)
    yield "header-sizes--above-the-piece--CorruptIndex", changed("header_sizes", "<u2", 0, 4000)
    yield "header-sizes--above-512--CorruptIndex", changed("header_sizes", "<u2", 0, 513)
    yield "header-sizes--in-the-tail--CorruptIndex", changed("header_sizes", "<u2", 0, 1, 10)
    yield (
        "header-sizes--in-a-base-group--CorruptIndex",
        changed("header_sizes", "<u2", 0, 1, 1, "preview"),
    )
    yield "headers--another-sum--CorruptIndex", changed("header_sizes", "<u2", 0, 7)
    raw.table[-headers_bytes:] = bytes(headers_bytes)
    yield "headers--no-frame--CorruptIndex", raw.build()
    bomb = TableVector(0)
    bomb.table[-headers_bytes:] = frame_that_claims(1 << 40).ljust(headers_bytes, b"\0")
    yield "headers--a-bomb--CorruptIndex", bomb.build()
    yield "late-values--larger--CorruptIndex", changed("npy sizes", "<u4", 0, 600)
    yield "late-values--absent-with-checksum--CorruptIndex", changed("npy crcs", "<u4", 1, 5)
    yield "kept--beside-its-stream--CorruptIndex", changed("jpg sizes", "<u4", 0, 0)
    for why, at, value in (
        ("inside-index", 0, 512),
        ("unaligned", 0, 2049),
        ("2-to-63", 0, 1 << 63),
        ("elsewhere", 0, 1 << 20),
        ("of-a-missing-unit", 1, 512),
    ):
        vector = changed("offsets", "<u8", at, value, 1, "preview")
        yield f"base-offsets--{why}--CorruptIndex", vector


def frame_that_claims(num_bytes: int) -> bytes:
    """Return the start of a Zstandard frame (RFC 8878 3.1.1) that claims this content size."""
    return b"\x28\xb5\x2f\xfd" + b"\xe0" + num_bytes.to_bytes(8, "little")


def shard_bytes(samples: list[Any], fmt: ShardFormat) -> bytes:
    """A shard of samples."""
    path = REJECT / "base-000000.tar"
    write_shard(str(path), samples, fmt)
    data = path.read_bytes()
    path.unlink()
    return data


def make_vectors() -> None:
    REJECT.mkdir(parents=True, exist_ok=True)
    for old in REJECT.iterdir():
        old.unlink()
    for make in (head_vectors, schema_vectors, column_vectors, table_vectors):
        for name, data in make():
            (REJECT / f"{name}.bin").write_bytes(data)


if __name__ == "__main__":
    make_golden()
    make_vectors()
    print(f"{len(list(REJECT.iterdir()))} vectors in {REJECT}, golden shards in {GOLDEN}")
