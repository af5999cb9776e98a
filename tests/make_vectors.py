"""Make tests/vectors/reject: run it by hand, only when SPEC.md gains a version.

Each file breaks one rule of SPEC.md, with all checksums right, and is named RULE--WHY--ERROR.bin;
messages.json has what it is refused for. Shards are put together here from their parts, not by
pcrshard's writer, which refuses to write most of them.
"""

import json
import pathlib
import struct
import tarfile
import tempfile
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zstandard

from pcrshard import Shard, errors
from pcrshard.checksum import crc32c

REJECT = pathlib.Path(__file__).resolve().parent / "vectors" / "reject"
ABSENT = 0xFFFFFFFF
# A Zstandard frame that states a content of a tebibyte.
BOMB = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 40) + b"\x01\0\0"


@dataclass
class Unit:
    """An image: its pieces and their shared headers' sizes in each group, and in the tail."""

    state: int
    dims: tuple[int, int]
    pieces: list[bytes]
    headers: list[int] = field(default_factory=lambda: [0] * 9)
    orientation: int = 0
    profile: int = 0


@dataclass
class Parts:
    """What a shard is made of; ``head`` and ``table`` replace numbers before checksums are made."""

    schema: dict[str, Any]
    images: list[list[list[Unit]]]  # of each sample and field
    values: dict[str, list[bytes | None]]
    keys: list[bytes | None] = field(default_factory=lambda: [b"a", b"b/c", b"d"])
    profiles: list[bytes | None] = field(default_factory=list)
    head: dict[str, int] = field(default_factory=dict)
    # (row, name of the part): {place: number}; the name "extra" adds bytes to a table.
    table: dict[tuple[int, str], Any] = field(default_factory=dict)
    packed: dict[int, bytes] = field(default_factory=dict)
    raw_schema: bytes | None = None
    stored: Any = None  # columns to stored columns
    finish: Any = None  # bytes of the shard to others
    tar: dict[str, Any] = field(default_factory=dict)  # other numbers of a plain tar's columns


def layered(*sizes, header=0, **more):
    pieces = [bytes([place + 1]) * size for place, size in enumerate(sizes)]
    return Unit(1, (8, 16), pieces, [header, *[0] * 8], **more)


def whole(data, groups, state=2, dims=(0, 0)):
    return Unit(state, dims, [data, *[b""] * groups])


def schema(fields, groups, layout, base, preview_fields=()):
    return {
        "script": "by hand",
        "groups": [f"group {number + 1}" for number in range(groups)],
        "layout": layout,
        "base": base,
        "fields": fields,
        "parts": [],
        "preview_fields": list(preview_fields),
    }


def compact():
    fields = [["jpg", "image", 1], ["views.jpg", "images", 1], ["txt", "text", 0]]
    fields += [["json", "json", 0], ["seg.png", "mask", 0], ["npy", "array", 1]]
    first = layered(40, 20, 9, header=7, orientation=6, profile=1)
    return Parts(
        schema(fields, 2, "compact", 0),
        [
            [[first], [layered(30, 0, 0, profile=2), whole(b"an image", 2, dims=(3, 4))]],
            [[Unit(0, (0, 0), [b""] * 3)], []],
            [[whole(b"a file", 2)], [whole(b"damaged", 2, state=3)]],
        ],
        {"txt": [b"one", None, b""], "json": [b"{}", None, None], "npy": [b"late", None, b""]},
        profiles=[b"a profile", b"another"],
    )


def preview():
    fields = [["jpg", "image", 1], ["cls", "class", 0], ["npy", "array", 2]]
    return Parts(
        schema(fields, 3, "preview", 2, ["cls"]),
        [
            [[layered(40, 20, 10, 9)]],
            [[Unit(0, (0, 0), [b""] * 4)]],
            [[whole(b"a file", 3, dims=(3, 4))]],
        ],
        {"cls": [b"0", b"1", None], "npy": [b"late", None, b""]},
    )


def plain():
    """A plain tar behind its index; the second sample has no picture, the third no label."""
    fields = [["jpg", "image", 1], ["cls", "class", 0], ["npy", "array", 1]]
    return Parts(
        schema(fields, 0, "tar", 0),
        [[[whole(b"a file", 0)]], [[Unit(0, (0, 0), [b""])]], [[whole(b"x" * 600, 0)]]],
        {"cls": [b"0", b"1", None], "npy": [b"late", None, b""]},
    )


def plain_tar(p, units):
    """Return the bytes of a plain tar, and the columns that say where its members are."""
    members = [unit.pieces[0] if unit.state else None for unit in units]
    for name in ("cls", "npy"):
        members += p.values[name]
    tar, starts = b"", []
    for place, data in enumerate(members):
        starts.append(0 if data is None else len(tar) + 512)
        tar += b"" if data is None else member(f"{place}.x", data)
    sizes = [ABSENT if data is None else len(data) for data in members]
    found = {
        "tar_bytes": len(tar) + 1024,
        "begin": 0,
        "part": 0,
        "parts": 1,
        "packed": 0,
        "checked": 1,
        "version": b"3072 mtime=5",
        "starts": starts,
        "sizes": sizes,
        "crcs": [crc32c(data or b"") for data in members],
    }
    for name, new in p.tar.items():
        if isinstance(new, dict):
            for place, number in new.items():
                found[name][place] = number
        else:
            found[name] = new
    columns = numbers("Q", [found["tar_bytes"], found["begin"]])
    columns += numbers("I", [found["part"], found["parts"]])
    columns += numbers("B", [found["packed"], found["checked"]]) + byte_strings([found["version"]])
    columns += numbers("Q", found["starts"]) + numbers("I", found["sizes"])
    return tar, columns + numbers("I", found["crcs"])


def numbers(kind, values):
    return struct.pack(f"<{len(values)}{kind}", *values)


def byte_strings(values):
    sizes = [ABSENT if value is None else len(value) for value in values]
    return numbers("I", sizes) + b"".join(filter(None, values))


def member(name, data, size=None):
    info = tarfile.TarInfo(name)
    info.size = len(data) if size is None else size
    return info.tobuf(tarfile.PAX_FORMAT) + data + bytes(-len(data) % 512)


def encode_columns(p, units):
    kinds = [each[1] for each in p.schema["fields"] if each[1] in ("image", "images")]
    lists = [at for at, kind in enumerate(kinds) if kind == "images"]
    counts = [len(sample[at]) for sample in p.images for at in lists if at < len(sample)]
    parts = [
        numbers("B", counts),
        numbers("B", [unit.state for unit in units]),
        numbers("H", [side for unit in units for side in unit.dims]),
        numbers("B", [unit.orientation for unit in units]),
        numbers("H", [unit.profile for unit in units]),
        byte_strings(p.keys),
        byte_strings(p.profiles),
    ]
    none: list[bytes | None] = [None] * len(p.keys)
    for name, _, scan in (each for each in p.schema["fields"] if len(each) == 3):
        if scan == 0:
            parts.append(byte_strings(p.values.get(name, none)))
    return b"".join(parts)


def encode_table(p, units, rows, late, offsets):
    last = rows[-1]
    tail = last == len(p.schema["groups"])
    sums = [0] * len(units)
    crcs = []
    for row in range(0 if not tail else last, last + 1):
        sums = [crc32c(unit.pieces[row], crc) for unit, crc in zip(units, sums, strict=True)]
        crcs += sums if row in rows else []
    parts = {
        "sizes": [len(unit.pieces[row]) for row in rows for unit in units],
        "crcs": crcs,
        "offsets": offsets,
        "late": [],
        "header_sizes": [unit.headers[row] for row in rows for unit in units],
    }
    for values in late:
        parts["late"] += [ABSENT if value is None else len(value) for value in values]
        parts["late"] += [crc32c(value or b"") for value in values]
    headers = b"".join(unit.pieces[row][: unit.headers[row]] for row in rows for unit in units)
    packed = zstandard.compress(headers) if headers else b""
    packed = p.packed.get(last, packed)
    for name, values in parts.items():
        for place, number in p.table.get((last, name), {}).items():
            values[place] = number
    size = p.table.get((last, "headers_bytes"), len(packed))
    table = numbers("I", [size, *parts["sizes"], *parts["crcs"]]) + numbers("Q", parts["offsets"])
    table += numbers("I", parts["late"]) + numbers("H", parts["header_sizes"]) + packed
    return table + p.table.get((last, "extra"), b"")


def assemble(p):
    """Return the bytes of the shard without its trailer."""
    s = p.schema
    groups, is_preview = len(s["groups"]), s["layout"] == "preview"
    base = s["base"] if is_preview and 1 <= s["base"] <= groups else 0
    units = [unit for sample in p.images for images in sample for unit in images]
    packed_schema = p.raw_schema if p.raw_schema is not None else msgpack.packb(s)
    columns = encode_columns(p, units)
    tar = b""
    if is_plain := not groups and s["layout"] == "tar":
        tar, more = plain_tar(p, units)
        columns += more
    stored = p.stored(columns) if p.stored else columns
    body = packed_schema + stored
    first = "__pcr_index__" if is_preview or is_plain else "x.pcr"
    shard = member(first, bytes(512) + body) + tar
    stops, sizes, crcs = [len(shard) // 512] * is_plain, [0] * (groups + 1), [0] * (groups + 1)
    none: list[bytes | None] = [None] * len(p.keys)
    for row in range(groups + 1):
        if row < base - 1 or is_plain:
            continue
        rows = range(base) if row < base else range(row, row + 1)
        late = [
            p.values.get(each[0], none)
            for each in s["fields"]
            if len(each) == 3 and each[1][:5] != "image" and each[2] in [row + 1 for row in rows]
        ]
        values = b"".join(value for each in late for value in each if value)
        group = "tail" if row == groups else f"scan{row + 1:02d}"
        name = f"__pcr_{group}__" if is_preview else f"x.{group}"
        if row < base:
            empty = encode_table(p, units, rows, late, [0] * len(units))
            place, members, offsets = len(shard) + len(member(name, empty)), b"", []
            for key, sample, label in zip(p.keys, p.images, p.values["cls"], strict=True):
                stem = (key or b"").decode("latin-1")
                members += b"" if label is None else member(f"{stem}.cls", label)
                unit = sample[0][0]
                data = b"".join(unit.pieces[:base]) + b"\xff\xd9" * (unit.state == 1)
                offsets.append((place + len(members) + 512) * (unit.state > 0))
                members += member(f"{stem}.jpg", data) if unit.state else b""
            members += member("__pcr_late__", values) if values else b""
            table = encode_table(p, units, rows, late, offsets)
            shard += member(name, table) + members
        else:
            table = encode_table(p, units, rows, late, [])
            own = b"".join(unit.pieces[row][unit.headers[row] :] for unit in units)
            shard += member(name, table + own + values)
        sizes[row], crcs[row] = len(table), crc32c(table)
        stops += [len(shard) // 512] * (base if row < base else 1)
    values = {
        "version": 3,
        "num_samples": len(p.keys),
        "num_groups": groups,
        "schema_bytes": len(packed_schema),
        "body_crc": crc32c(body),
        "body_bytes": len(body),
        "columns_bytes": len(columns),
    }
    for name, each in (("stop", stops), ("table", sizes), ("crc", crcs)):
        values |= {f"{name}{place}": number for place, number in enumerate(each)}
    values |= p.head
    padding = values.pop("padding", 0)
    first, second, *rest = [*values.values()][:5], [*values.values()][5:7], *[*values.values()][7:]
    head = numbers("I", first) + numbers("Q", second) + numbers("I", rest)
    head = (head + bytes([padding])).ljust(500, b"\0")
    magic = b"\x89PCR\r\n\x1a\n"
    crc = crc32c(magic + bytes(4) + head)
    shard = shard[:512] + magic + numbers("I", [crc]) + head + shard[1024:]
    return p.finish(shard) if p.finish else shard


CASES: list[tuple[str, str, Any, Any, str]] = []


def case(name, message, change, make=compact, error="CorruptIndex"):
    CASES.append((name, message, change, make, error))


def in_head(name, message, error="CorruptIndex", make=compact, **new):
    case(name, message, lambda p: p.head.update(new), make, error)


def in_table(name, message, row, part, new, make=compact):
    where = f"the table of {'the tail' if row == 2 and make is compact else f'group {row + 1}'}: "
    case(name, where + message, lambda p: p.table.update({(row, part): new}), make)


def in_schema(name, message, make=compact, **new):
    case(name, message, lambda p: p.schema.update(new), make)


def in_fields(name, message, *new, first=(), make=compact):
    def change(p):
        p.schema["fields"] = [*first, *p.schema["fields"], *new]
        for sample in p.images:
            count = sum(len(each) > 1 and each[1] == "image" for each in new)
            added = [[Unit(0, (0, 0), [b""] * 3)] for _ in range(count)]
            sample.extend(added)

    case(name, message, change, make)


def in_unit(name, message, sample, at, make=compact, **new):
    def change(p):
        images = p.images[sample][at]
        images[-1] = Unit(**(vars(images[-1]) | new))

    case(name, message, change, make)


def in_key(name, message, key, place=0):
    def change(p):
        p.keys[place] = key

    case(name, message, change)


def raw(name, message, change):
    """Change the schema's bytes."""

    def replace(p):
        p.raw_schema = change(msgpack.packb(p.schema))

    case(name, message, replace)


def finished(name, message, change, error="CorruptIndex"):
    def replace(p):
        p.finish = change

    case(name, message, replace, error=error)


def columns(name, message, change, **head):
    def replace(p):
        p.stored = change
        p.head.update(head)

    case(name, message, replace)


def count(of):
    """Return the number of bytes of the columns of a sound compact shard."""
    p = compact()
    return of(len(encode_columns(p, [u for s in p.images for each in s for u in each])))


# 2.1 Head
finished(
    "magic--text-mode",
    "its magic is not there",
    lambda shard: shard.replace(b"PCR\r\n", b"PCR\n\n", 1),
    "NotAShard",
)
finished(
    "head-checksum--zero",
    "head checksum does not match",
    lambda shard: shard[:520] + bytes(4) + shard[524:],
)
for number, why in ((1, "first"), (2, "second")):
    message = f"expected format version 3, got {number}, which was never released; encode"
    in_head(f"version--{why}", message, "UnsupportedVersion", version=number)
for number, why in ((0, "zero"), (4, "newer")):
    message = f"expected format version 3, got {number}; a newer pcrshard reads it"
    in_head(f"version--{why}", message, "UnsupportedVersion", version=number)
in_head("num-samples--zero", "num_samples 0 is not in 1..16777216", num_samples=0)
in_head("num-samples--huge", "num_samples 16777217 is not in", num_samples=(1 << 24) + 1)
GROUPS = "number of groups does not fit layout"
in_schema("num-groups--zero", GROUPS, plain, layout="compact")
in_head("num-groups--33", "num_groups 33 is not in 0..32", num_groups=33)
in_head("schema-bytes--zero", "schema_bytes 0 is not in 1..65536", schema_bytes=0)
in_head("schema-bytes--huge", "schema_bytes 65537 is not in 1..65536", schema_bytes=65537)
in_head("body-checksum--wrong", "index checksum does not match", body_crc=1)
ORDER = "prefix stops fall, or are before the end of the index"
in_head("body-bytes--2-to-40", ORDER, body_bytes=1 << 40, columns_bytes=1 << 40)
in_head("body-bytes--beyond-first-group", ORDER, stop0=2)
in_head("body-bytes--less-than-schema", "do not fit", body_bytes=100)
in_head("columns-bytes--65-times", "do not fit", columns_bytes=count(lambda n: 65 * n))
in_head("columns-bytes--fewer-than-stored", "do not fit", columns_bytes=count(lambda n: n - 1))
in_head("columns-bytes--four-a-sample", "cannot hold", num_samples=count(lambda n: n // 5 + 1))
in_head("columns-bytes--2-to-63", "do not fit", columns_bytes=1 << 63)
in_head("prefix-stops--falling", ORDER, stop1=4)
in_head("prefix-stops--tail-before-the-groups", ORDER, stop2=4)
in_head("table-bytes--beyond-its-group", "the table of group 1 ends after it, at", table0=4096)
in_head(
    "table-bytes--of-a-base-group",
    "prefix stops or tables of the base groups differ",
    make=preview,
    table0=16,
    crc0=1,
)
in_head(
    "base-stops--differ",
    "prefix stops or tables of the base groups differ",
    make=preview,
    stop0=6,
)
in_head("table-checksum--wrong", "the table of group 1: checksum does not match", crc0=1)
case(
    "table-checksum--of-another-shard",
    "the table of group 1: checksum does not match",
    # The same lengths everywhere; only the head tells the shards apart.
    lambda p: setattr(p, "finish", lambda shard: shard[:2048] + other_shard()[2048:]),
)
in_head(
    "no-table--with-checksum",
    "a table that is not there has a checksum",
    make=preview,
    crc0=1,
)
in_head("head-padding--not-zero", "head padding is not zero", padding=1)

# 2.2 Schema
raw("schema-keys--a-list", "schema: ", lambda data: b"\x97" + b"\xc0" * 7)
in_schema("schema-keys--additional", "schema: ", more=1)
case("schema-keys--missing", "the schema lacks keys", lambda p: p.schema.pop("parts"))
case(
    "schema-keys--another-order",
    "the schema lacks keys or is not canonical msgpack",
    lambda p: p.schema.update(script=p.schema.pop("script")),
)
raw("schema-keys--bytes-left", "schema: ", lambda data: data + b"\xc0")
in_schema("schema-types--deep", "schema: ", script=[[[[]]]])
in_schema("schema-types--ext", "schema: ", script=msgpack.ExtType(5, b"x"))
in_schema("schema-types--float-base", "schema: ", base=0.0)
in_schema("schema-types--long-string", "schema: ", script="x" * 1025)
in_schema("schema-types--nil-script", "schema: ", script=None)
in_schema("schema-types--fields-a-map", "schema: ", fields={})
raw("schema-types--not-utf8", "schema: ", lambda data: data.replace(b"by hand", b"by \xff\xffnd"))
case(
    "schema-groups--one-fewer",
    "schema and num_groups differ",
    lambda p: setattr(p, "raw_schema", msgpack.packb(p.schema | {"groups": ["x"]})),
)
in_schema("schema-groups--of-a-plain-tar", GROUPS, layout="tar")
in_schema("layout--unknown", "schema: ", layout="other")
in_schema("base--in-compact", "base does not fit layout", base=1)
in_schema("base--zero-in-preview", "base does not fit layout", preview, base=0)
in_schema("base--above-groups", "base does not fit layout", preview, base=4)
others = [[f"f{number}", "file", 0] for number in range(253)]
images = [[f"{number}.jpg", "image", 1] for number in range(17)]


def many_images(p):
    p.schema["fields"] = [*images, *p.schema["fields"][2:]]
    for sample in p.images:
        sample[:] = [[Unit(0, (0, 0), [b""] * 3)] for _ in range(17)]
    p.profiles = []


def move_images(p):
    p.schema["fields"].append(p.schema["fields"].pop(1))


case("fields--17-image-fields", "expected at most 16 image fields", many_images)
in_fields("fields--257-others", "expected at most 256 fields", *others)
case("fields--images-not-first", "images are not the first fields", move_images)
in_fields("fields--twice", "fields are not distinct", ["txt", "text", 0])
in_fields("fields--also-an-image", "fields are not distinct", ["jpg", "text", 0])
in_fields("fields--a-pair", "the schema lacks keys or is not canonical msgpack", ["x", "text"])
in_fields("fields--four", "schema: ", ["x", "text", 0, 0])
in_fields("kinds--unknown", "schema: ", ["x", "video", 0])
in_fields("kinds--boxes-of-no-form", "schema: ", ["x", "boxes", 0])
SCAN = "begins at no scan"


def image_at(scan):
    return lambda p: p.schema["fields"][0].__setitem__(2, scan)


for scan in (0, 2):
    message = "image field 'jpg' does not begin at scan 1"
    case(f"first-scan--image-at-{scan}", message, image_at(scan))
in_fields("first-scan--after-the-tail", SCAN, ["x", "text", 4])
in_fields("first-scan--34", "schema: ", ["x", "text", 34])
in_fields("first-scan--a-word", "schema: ", ["x", "text", "full"])
in_fields("first-scan--negative", "schema: ", ["x", "text", -1])
BOXES = "boxes:xyxy"
FITS = "does not fit field"
in_schema("parts--of-another-kind", FITS, parts=[["txt", "a.b", BOXES]])
in_schema("parts--of-no-field", FITS, parts=[["none", "a.b", BOXES]])
in_schema("parts--kind-mask", FITS, parts=[["json", "a", "mask"]])
in_schema("parts--empty-path", FITS, parts=[["json", "", BOXES]])
twice = [["json", "a", BOXES], ["json", "a", "keypoints"]]
in_schema("parts--twice", "parts are not distinct", parts=twice)
in_schema("parts--257", "schema: ", parts=[["json", f"a{n}", BOXES] for n in range(257)])
in_schema("parts--a-pair", "schema: ", parts=[["json", "a"]])
in_schema("preview-fields--in-compact", "preview_fields do not fit", preview_fields=["txt"])
for why, names in (("unknown", ["x"]), ("deferred", ["npy"]), ("twice", ["cls", "cls"])):
    in_schema(f"preview-fields--{why}", "preview_fields do not fit", preview, preview_fields=names)
NAMES = {
    "101-bytes": "x" * 101,
    "slash": "a/b",
    "underscores": "__x",
    "upper-case": "Txt",
    "space": "a b",
    "empty": "",
}
for why, name in NAMES.items():
    in_fields(f"field-name--{why}", "a field name is not legal", [name, "file", 0])

# 2.3 Columns
frame = zstandard.compress
columns("columns-frame--no-frame", "columns: expected a Zstandard frame", bytes, columns_bytes=999)
columns(
    "columns-frame--a-bomb",
    "columns: expected a frame of 60 bytes, got one of 1099511627776",
    lambda data: BOMB,
    columns_bytes=60,
)
columns(
    "columns-frame--no-size",
    "columns: expected a",
    lambda data: zstandard.ZstdCompressor(write_content_size=False).compress(data + bytes(999)),
    columns_bytes=count(lambda n: n + 999),
)


def frame_and_more(p):
    p.values["txt"] = [bytes(999), None, None]
    p.stored = lambda data: frame(data) + b"x"


case("columns-frame--bytes-left", "columns: expected a Zstandard frame", frame_and_more)
SHORT = "a column is longer than the index"
columns(
    "columns-length--short", SHORT, lambda data: data[:-1], columns_bytes=count(lambda n: n - 1)
)
columns(
    "columns-length--long",
    "bytes are left after the last column",
    lambda data: data + b"x",
    columns_bytes=count(lambda n: n + 1),
)
columns(
    "columns-length--huge-key",
    SHORT,
    lambda data: data.replace(numbers("I", [1, 3, 1]), numbers("I", [ABSENT - 1, 3, 1])),
)
in_head("columns-length--samples-not-there", "cannot hold 16777216 samples", num_samples=1 << 24)


def many_listed(p):
    p.images[1][1] = [layered(9, 9, 9) for _ in range(65)]


case("counts--65", "expected at most 64 images in a list", many_listed)
NO_SIDE = "a height or a width is 0"
SHOWED = "an image that no decoder showed has dims"
PLAIN = "an image without scans has an orientation or a profile"
in_unit("states--four", "a state is above 3", 0, 1, state=4)
in_unit(
    "states--missing-in-a-list",
    "an image of a list is missing",
    0,
    1,
    state=0,
    dims=(0, 0),
    pieces=[b""] * 3,
)
in_unit("dims--of-a-divided-image-0", NO_SIDE, 0, 0, dims=(0, 0))
in_unit("dims--zero-height", NO_SIDE, 0, 0, dims=(0, 8))
in_unit("dims--zero-width", NO_SIDE, 0, 0, dims=(8, 0))
in_unit("dims--zero-height-of-a-file", NO_SIDE, 0, 1, dims=(0, 8))
in_unit("dims--zero-width-of-a-file", NO_SIDE, 0, 1, dims=(8, 0))
in_unit("dims--of-a-damaged-file", SHOWED, 2, 1, dims=(8, 8))
in_unit("dims--of-a-missing-image", SHOWED, 1, 0, dims=(8, 8))
in_unit("orientation--nine", "an orientation is above 8", 0, 0, orientation=9)
in_unit("orientation--of-a-file", PLAIN, 0, 1, orientation=6)
in_unit("orientation--of-a-missing-image", PLAIN, 1, 0, orientation=1)
in_unit("profiles--of-a-file", PLAIN, 0, 1, profile=1)
in_unit("profiles--of-a-missing-image", PLAIN, 1, 0, profile=1)
for why, second, message in (
    ("empty", b"", "an ICC profile is empty"),
    ("absent", None, "an ICC profile is empty"),
    ("twice", b"a profile", "ICC profiles are not distinct"),
):
    case(f"profile--{why}", message, lambda p, to=second: p.profiles.__setitem__(1, to))
KEYS = {
    "nul": b"\0",
    "leading-slash": b"/a",
    "way-out": b"..",
    "here": b"./a",
    "inner-way-out": b"a/../b",
    "dot-in-name": b"b.c",
    "backslash": b"a\\b",
    "empty": b"",
    "empty-component": b"a//b",
    "trailing-slash": b"a/",
}
for why, bad in KEYS.items():
    in_key(f"key--{why}", "is not legal", bad)
in_key("key--after-a-legal-one", "key 'b.c' is not legal", b"b.c", 2)
in_key("key--absent", "a key is absent", None)
in_key("key--1025-bytes", "a key has more than 1024 bytes", b"x" * 1025)
in_key("key--not-utf8", "a key is not UTF-8", b"\xff")
in_key("key--twice", "keys are not distinct", b"d")

# 2.4 Plain tars


def in_tar(name, message, **new):
    case(name, message, lambda p: p.tar.update(new), plain)


in_head("tar-stop--elsewhere", "expected the tar to end at", make=plain, stop0=99)
in_tar("tar-parts--beyond", "part 2 cannot be one of 2", part=2, parts=2)
in_tar("tar-parts--none", "part 0 cannot be one of 0", parts=0)
in_tar("tar-parts--of-a-compressed-tar", "part 0 cannot be one of 2", parts=2, packed=1)
in_tar("tar-flags--packed", "packed and checked are not 0 or 1", packed=2)
in_tar("tar-flags--checked", "packed and checked are not 0 or 1", checked=2)
for why, bad in (("not-utf8", b"\xff"), ("1025-bytes", b"x" * 1025), ("absent", None)):
    in_tar(f"tar-version--{why}", "the version is not legal", version=bad)
in_tar("tar-starts--in-its-header", "a member begins before its header", starts={0: 511})
in_tar("tar-starts--before-the-part", "a member begins before its header", begin=512)
in_tar("tar-starts--2-to-62", "a member begins beyond every tar", starts={0: 1 << 62})
in_tar("tar-starts--2-to-64", "a member begins beyond every tar", starts={0: (1 << 64) - 1})
in_tar("tar-sizes--beyond-the-tar", "a member ends after the tar", tar_bytes=99)
in_tar("tar-sizes--4-gib", "a member ends after the tar", sizes={0: ABSENT - 1})
NOWHERE = "a member that is not there has a place or a checksum"
in_tar("tar-members--absent-with-a-place", NOWHERE, starts={1: 512})
in_tar("tar-members--absent-with-a-checksum", NOWHERE, crcs={1: 1})
STATES = "the states are not those of the members"
in_tar("tar-members--a-picture-of-none", STATES, sizes={0: ABSENT}, starts={0: 0}, crcs={0: 0})
in_unit("tar-members--divided", STATES, 0, 0, plain, state=1, dims=(8, 8))
in_tar("tar-values--longer", "values of 'cls' are not as long as their members", sizes={3: 2})

# 3 Scan groups
in_table("group-stops--elsewhere", "it ends elsewhere", 1, "sizes", {0: 2000})
in_table("group-stops--4-gib-piece", "it ends elsewhere", 0, "sizes", {0: ABSENT})
in_table("sizes--larger", "it ends elsewhere", 0, "sizes", {1: 2000})
NONE = "an image that is not there has pieces"


def pieces(name, message, sample, at, new, make=compact):
    in_unit(name, message, sample, at, make, pieces=new)


pieces("sizes--of-a-missing-unit", NONE, 1, 0, [b"x", b"", b""])
pieces("sizes--later-of-a-missing-unit", NONE, 1, 0, [b"", b"x", b""])
pieces("sizes--tail-of-a-missing-unit", NONE, 1, 0, [b"", b"", b"x"])
in_unit(
    "sizes--none-of-the-first",
    "an image has no first piece",
    0,
    0,
    pieces=[b"", b"x", b""],
    headers=[0, 0, 0],
)
LATER = "a file kept whole has a later piece"
pieces("whole--a-later-piece", LATER, 0, 1, [b"x", b"y", b""])
pieces("whole--a-tail", LATER, 0, 1, [b"x", b"", b"y"])
pieces("whole--a-later-piece-of-the-base", LATER, 2, 0, [b"x", b"y", b"", b""], preview)
in_unit("whole--a-header", LATER, 0, 1, headers=[3, 0, 0])
in_table("empty-crc--of-a-tail", "an empty tail has a checksum", 2, "crcs", {1: 1})
in_table("empty-crc--of-a-file", "an empty tail has a checksum", 2, "crcs", {2: 1})
ABSENT_LATE = "an absent npy has a checksum"
in_table("late-values--absent-with-checksum", ABSENT_LATE, 0, "late", {4: 1})
in_table("late-values--larger", "it ends elsewhere", 0, "late", {0: 2000})
in_unit(
    "header-sizes--above-512",
    "expected headers of at most 512 bytes",
    0,
    0,
    pieces=[b"x" * 600, b"y", b""],
    headers=[513, 0, 0],
)


def long_header(p):
    p.table[1, "header_sizes"] = {0: 21}
    p.packed[1] = frame(b"\2" * 21)


case("header-sizes--above-the-piece", "a header is longer than its piece", long_header)
in_unit("header-sizes--in-the-tail", "a tail has a header", 0, 0, headers=[7, 0, 3])
in_unit(
    "header-sizes--in-a-base-group",
    "a base member has a shared header",
    0,
    0,
    preview,
    headers=[0, 7, 0, 0],
)
for why, data, message in (
    ("no-frame", b"no frame", "expected a Zstandard frame"),
    ("a-bomb", BOMB, "expected a frame of 7 bytes, got one of 1099511627776"),
    ("another-sum", frame(b"12345678"), "expected a frame of 7 bytes, got one of 8"),
):
    case(f"headers--{why}", message, lambda p, to=data: p.packed.update({0: to}))
case("headers--of-none", "bytes of headers, but no header", lambda p: p.packed.update({1: b"x"}))
in_table("table-length--bytes-left", "its parts end elsewhere", 0, "extra", b"x")
in_table("table-length--not-there", "its parts end elsewhere", 0, "headers_bytes", 999)
in_head("table-length--shorter", "bytes or more", table0=9)
OFFSET = "a base offset is after its group"
OVERLAP = "base members overlap"
for why, new, message in (
    ("2-to-63", {0: 1 << 63}, OFFSET),
    ("elsewhere", {2: 1 << 20}, OFFSET),
    ("inside-index", {0: 1024}, OVERLAP),
    ("of-a-missing-unit", {1: 4096}, "a missing image has an offset"),
    ("overlapping", {2: 4096}, OVERLAP),
    ("unaligned", {2: 4097}, OVERLAP),
):
    in_table(f"base-offsets--{why}", message, 1, "offsets", new, preview)


def last_offset(p):
    stop = struct.unpack_from("<I", assemble(preview()), 560)[0] * 512
    p.table[1, "offsets"] = {2: stop - 512}


case("base-offsets--past-their-group", "the table of group 2: it ends at", last_offset, preview)


def other_shard():
    p = compact()
    p.images[0][0][0].pieces[0] = b"\7" * 40
    return assemble(p)


def load(path):
    _ = Shard(path).index
    return Shard(path).load()


def make_vectors():
    messages = {}
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for make in (compact, preview, plain):
            sound = pathlib.Path(folder, f"{make.__name__}.bin")
            sound.write_bytes(assemble(make()))
            prefix = load(sound)
            assert not prefix.damaged
            print(make.__name__, sound.stat().st_size)
    REJECT.mkdir(parents=True, exist_ok=True)
    for path in REJECT.iterdir():
        path.unlink()
    for name, message, change, make, error in CASES:
        assert name not in messages, name
        parts = make()
        change(parts)
        path = REJECT / f"{name}--{error}.bin"
        path.write_bytes(assemble(parts))
        messages[name] = message
        try:
            load(path)
            failed.append(f"{name}: not refused")
        except errors.PCRError as caught:
            if type(caught).__name__ != error or message not in str(caught):
                failed.append(f"{name}: {type(caught).__name__} {caught}, not {message}")
    text = json.dumps(messages, indent=1, sort_keys=True, ensure_ascii=False)
    (REJECT / "messages.json").write_text(text + "\n")
    print(*failed, f"{len(CASES)} vectors, {len(failed)} not refused as expected", sep="\n")


if __name__ == "__main__":
    make_vectors()
