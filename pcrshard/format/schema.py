"""The schema of a shard: names, scan groups and locations of fields (SPEC.md section 2.2).

Bytes in, bytes out; no I/O. Types and lengths are checked before anything is used.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Annotated

import msgspec

from ..errors import CorruptIndex
from .names import are_distinct, valid_field
from .scan_script import parse_group
from .shard_head import require

MAX_STREAMS = 16
MAX_FIELDS = 256
IMAGE = "jpeg"
IMAGE_LIST = "jpegs"
_Text = Annotated[str, msgspec.Meta(max_length=1024)]


class Schema(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The msgpack part of the index (SPEC 2.2).

    ``late`` has pairs of a field's name and the first scan that has it, N + 1 for ``"full"``.
    """

    script: _Text
    groups: tuple[_Text, ...]
    layout: str = "compact"
    base: int = 0
    streams: tuple[tuple[str, str], ...] = (("jpg", "jpeg"),)
    fields: tuple[str, ...] = ()
    late: tuple[tuple[str, int], ...] = ()
    preview_fields: tuple[str, ...] = ()

    @cached_property
    def lists(self) -> tuple[str, ...]:
        """Return the streams with a list of images per sample."""
        return tuple(field for field, codec in self.streams if codec == IMAGE_LIST)

    def encode(self) -> bytes:
        """Return the schema as canonical msgpack."""
        return msgspec.msgpack.encode(self)


@lru_cache(maxsize=64)
def decode_schema(data: bytes) -> Schema:
    """Parse and check the schema (SPEC 2.2).

    Cached, because all shards of a dataset share one schema.
    """
    try:
        schema = msgspec.msgpack.decode(data, type=Schema)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptIndex(f"schema: {error}") from error
    require(schema.encode() == data, "the schema lacks keys or is not canonical msgpack")
    check_schema(schema)
    return schema


def check_schema(schema: Schema) -> None:
    """Check names and numbers of a schema (SPEC 2.2); raises :class:`CorruptIndex`."""
    num_groups = len(schema.groups)
    bases = {"compact": range(1), "preview": range(1, num_groups + 1)}
    require(schema.layout in bases, f"unknown layout {schema.layout!r}")
    require(schema.base in bases[schema.layout], "base does not fit layout")
    try:
        for group in schema.groups:
            parse_group(group)
    except ValueError as error:
        raise CorruptIndex(f"scan script: {error}") from error

    require(len(schema.streams) <= MAX_STREAMS, "expected at most 16 streams")
    codecs = {codec for _, codec in schema.streams}
    require(codecs <= {IMAGE, IMAGE_LIST}, f"unknown codecs {sorted(codecs)}")
    late = [field for field, _ in schema.late]
    scans = [scan for _, scan in schema.late]
    streams = [field for field, _ in schema.streams]
    require(len(schema.fields) + len(late) <= MAX_FIELDS, "expected at most 256 fields")
    require(are_distinct([*streams, *schema.fields]), "streams and fields are not distinct")
    require(are_distinct([*late, *schema.fields]), "deferred fields and fields are not distinct")
    require(all(map(valid_field, [*streams, *schema.fields, *late])), "a field name is not legal")
    require(not {*late} & {*schema.lists}, "a deferred field has the name of a list of images")
    in_range = all(1 <= scan <= num_groups + 1 for scan in scans)
    require(in_range, "a deferred field has no such scan")

    shown = schema.preview_fields
    fits = set(shown) <= set(schema.fields) and are_distinct(shown)
    require(fits and (not shown or schema.layout == "preview"), "preview_fields do not fit")
