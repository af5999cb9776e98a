"""A reader of shards written from SPEC.md alone: it shares no code with pcrshard."""

import base64
import json
import struct

import msgpack
import zstandard

ABSENT = 0xFFFFFFFF


CRC = list(range(256))
for _ in range(8):
    CRC = [crc >> 1 ^ 0x82F63B78 * (crc & 1) for crc in CRC]


def crc32c(data, crc=0):
    crc ^= ABSENT
    for byte in data:
        crc = crc >> 8 ^ CRC[(crc ^ byte) & 255]
    return crc ^ ABSENT


class Parts:
    """Arrays and byte strings, one after another."""

    def __init__(self, data):
        self.data, self.place = data, 0

    def bytes(self, size):
        self.place += size
        assert self.place <= len(self.data)
        return self.data[self.place - size : self.place]

    def numbers(self, kind, count):
        layout = struct.Struct(f"<{count}{kind}")
        return list(layout.unpack(self.bytes(layout.size)))

    def strings(self, count):
        sizes = self.numbers("I", count)
        return [None if size == ABSENT else self.bytes(size) for size in sizes]


def unpack(frame, size):
    assert zstandard.frame_content_size(frame) == size
    return zstandard.ZstdDecompressor().decompress(frame)


class Shard:
    def __init__(self, data):
        self.data, head = data, Parts(data[512:1024])
        assert head.bytes(8) == b"\x89PCR\r\n\x1a\n"
        self.crc, version, self.samples, self.groups = head.numbers("I", 4)
        assert self.crc == crc32c(data[512:520] + bytes(4) + data[524:1024])
        assert version == 3
        schema_bytes, body_crc = head.numbers("I", 2)
        body_bytes, columns_bytes = head.numbers("Q", 2)
        groups = [head.numbers("I", self.groups + 1) for _ in range(3)]
        stops, self.table_bytes, self.table_crcs = groups
        self.stops = [1024 + body_bytes + -body_bytes % 512, *(512 * stop for stop in stops)]
        body = data[1024 : 1024 + body_bytes]
        assert crc32c(body) == body_crc
        self.schema = msgpack.unpackb(body[:schema_bytes])
        columns = body[schema_bytes:]
        if len(columns) != columns_bytes:
            columns = unpack(columns, columns_bytes)
        self.read_columns(Parts(columns))

    def read_columns(self, columns):
        fields = self.schema["fields"]
        self.images = [(name, kind) for name, kind, _ in fields if kind in ("image", "images")]
        lists = [name for name, kind in self.images if kind == "images"]
        counts = iter(columns.numbers("B", self.samples * len(lists)))
        # The units of each sample and image field.
        self.units, unit = [], 0
        for _ in range(self.samples):
            self.units.append({})
            for name, kind in self.images:
                count = next(counts) if kind == "images" else 1
                self.units[-1][name] = range(unit, unit + count)
                unit += count
        self.num_units = unit
        self.states = columns.numbers("B", unit)
        columns.numbers("H", 2 * unit)
        self.orientation = columns.numbers("B", unit)
        self.profile_numbers = columns.numbers("H", unit)
        self.keys = [key.decode() for key in columns.strings(self.samples)]
        self.profiles = columns.strings(max(self.profile_numbers, default=0))
        self.columns = {name: columns.strings(self.samples) for name, _, scan in fields if not scan}
        if self.schema["layout"] == "tar":
            self.read_members(columns)

    def read_members(self, columns):
        """Find the members of a plain tar, which follows its index in the data."""
        _, begin = columns.numbers("Q", 2)
        columns.numbers("I", 2)
        _, checked = columns.numbers("B", 2)
        columns.strings(1)
        others = [name for name, kind, _ in self.schema["fields"] if kind[:5] != "image"]
        count = self.num_units + len(others) * self.samples
        starts, sizes = columns.numbers("Q", count), columns.numbers("I", count)
        crcs = columns.numbers("I", count) if checked else None
        found = []
        for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            place = self.stops[0] + start - begin
            found.append(None if size == ABSENT else self.data[place : place + size])
            # Members are there unless the data is the index alone.
            if crcs and len(self.data) > self.stops[0]:
                assert crc32c(found[-1] or b"") == crcs[number]
        self.members = found[: self.num_units]
        rest = iter(found[self.num_units :])
        self.values = {name: [next(rest) for _ in range(self.samples)] for name in others}

    def read_groups(self, last):
        """Return each unit's piece in rows 0..last, and the deferred values by name."""
        pieces, late, running = [], {}, [0] * self.num_units
        base, row = self.schema["base"], 0
        while row <= last:
            rows = range(base) if row < base else range(row, row + 1)
            is_base, row = row < base, rows[-1] + 1
            start, size = self.stops[rows[0]] + 512, self.table_bytes[rows[-1]]
            data = self.data[start : start + size]
            assert crc32c(data) == self.table_crcs[rows[-1]]
            table, start = Parts(data), start + size
            total = len(rows) * self.num_units
            assert table.numbers("I", 1)[0] <= size
            sizes, crcs = table.numbers("I", total), table.numbers("I", total)
            offsets = table.numbers("Q", self.num_units) if is_base else [0] * self.num_units
            values = [
                (name, table.numbers("I", self.samples), table.numbers("I", self.samples))
                for name, kind, scan in self.schema["fields"]
                if kind not in ("image", "images") and scan - 1 in rows
            ]
            header_sizes = table.numbers("H", total)
            frame = table.bytes(len(data) - table.place)
            headers = Parts(unpack(frame, sum(header_sizes)) if frame else b"")
            for number, group in enumerate(rows):
                found = []
                for unit in range(self.num_units):
                    at = number * self.num_units + unit
                    header = headers.bytes(header_sizes[at])
                    own = sizes[at] - len(header)
                    place = offsets[unit] if is_base else start
                    found.append(header + self.data[place : place + own])
                    offsets[unit] += own
                    start += own
                    running[unit] = crc32c(found[-1], running[unit] * (group != self.groups))
                    assert running[unit] == crcs[at]
                pieces.append(found)
            if is_base:
                late_bytes = sum(s for _, each, _ in values for s in each if s != ABSENT)
                start = self.stops[rows[-1] + 1] - late_bytes - -late_bytes % 512
            for name, value_sizes, value_crcs in values:
                late[name] = []
                for size, crc in zip(value_sizes, value_crcs, strict=True):
                    value = None if size == ABSENT else self.data[start : start + size]
                    start += len(value or b"")
                    assert crc32c(value or b"") == crc
                    late[name].append(value)
        return pieces, late

    def read(self, scan):
        """Return the samples at a scan, 0 to N or "full"."""
        number = self.groups + 1 if scan == "full" else scan
        if self.schema["layout"] == "tar":
            self.pieces, values = [self.members], self.values
        else:
            self.pieces, values = self.read_groups(number - 1)
        values |= self.columns
        samples, none = [], [None] * self.samples
        for row, key in enumerate(self.keys):
            samples.append({"__key__": key})
            for name, kind, first in self.schema["fields"]:
                if first > number:
                    continue
                units = [unit for unit in self.units[row].get(name, ()) if self.states[unit]]
                value = [self.image(unit, scan) for unit in units]
                if kind != "images":
                    value = value[0] if value else values.get(name, none)[row]
                if value is not None:
                    samples[-1][name] = value
        return samples

    def image(self, unit, scan):
        count = self.groups or 1 if scan == "full" else scan
        pieces = [group[unit] for group in self.pieces[:count]]
        if self.states[unit] != 1:
            return b"".join(pieces)
        tail = self.pieces[self.groups][unit] if scan == "full" else b""
        added = rest = b""
        stop = segments(pieces[0], 2, {0xE0, 0xEE} if tail else {0xE0})
        if tail:
            end = segments(tail, 0, {0xFE, *range(0xE0, 0xF0)})
            added, rest = tail[:end], tail[end + 2 :]
        else:
            if self.orientation[unit] > 1:
                tag = struct.pack(">HHIHH", 0x0112, 3, 1, self.orientation[unit], 0)
                added = segment(0xE1, b"Exif\0\0MM\0*\0\0\0\x08\0\x01" + tag + bytes(4))
            profile = [b"", *self.profiles][self.profile_numbers[unit]]
            chunks = range(0, len(profile), 65519)
            for place, at in enumerate(chunks):
                numbers = bytes([place + 1, len(chunks)])
                added += segment(0xE2, b"ICC_PROFILE\0" + numbers + profile[at : at + 65519])
        jpeg = pieces[0][:stop] + added + pieces[0][stop:]
        return b"".join((jpeg, *pieces[1:], b"\xff\xd9", rest))


def segment(code, payload):
    return struct.pack(">BBH", 0xFF, code, 2 + len(payload)) + payload


def segments(data, place, codes):
    """Return the end of the marker segments of these codes."""
    while data[place : place + 1] == b"\xff" and data[place + 1] in codes:
        place += 2 + struct.unpack_from(">H", data, place + 2)[0]
    return place


def read_dataset_index(text):
    """Return the schema, and for each name the numbers of its row of the table."""
    found = json.loads(text)
    width = len(found["schema"]["groups"]) + 5
    numbers = struct.iter_unpack(f"<{width}I", base64.b64decode(found["table"]))
    return found["schema"], dict(zip(found["names"], numbers, strict=True))
