"""The schema of a shard: names, scan groups and locations of fields (SPEC.md section 2.2).

Bytes in, bytes out; no I/O. Types and lengths are checked before anything is used.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Annotated, Literal

import msgspec

from ..errors import CorruptIndex
from .names import are_distinct, valid_field
from .scan_script import parse_group
from .shard_head import require

MAX_FIELDS = 256
IMAGE: Literal["jpeg"] = "jpeg"
IMAGE_LIST: Literal["jpegs"] = "jpegs"
_Text = Annotated[str, msgspec.Meta(max_length=1024)]
# A field and its codec.
Stream = tuple[str, Literal["jpeg", "jpegs"]]


class Schema(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The msgpack part of the index (SPEC 2.2).

    ``late`` has pairs of a field's name and the first scan that has it, N + 1 for ``"full"``.
    """

    script: _Text
    groups: tuple[_Text, ...]
    layout: Literal["compact", "preview"] = "compact"
    base: int = 0
    streams: Annotated[tuple[Stream, ...], msgspec.Meta(max_length=16)] = (("jpg", IMAGE),)
    fields: tuple[str, ...] = ()
    late: tuple[tuple[str, Annotated[int, msgspec.Meta(ge=1)]], ...] = ()
    preview_fields: tuple[str, ...] = ()

    @cached_property
    def lists(self) -> tuple[str, ...]:
        """The streams with a list of images per sample."""
        return tuple(field for field, codec in self.streams if codec == IMAGE_LIST)

    def names_at(self, position: int) -> tuple[str, ...]:
        """Return the fields at a scan, images first; ``position`` is that of :func:`check_scan`."""
        streams = [field for field, _ in self.streams] if position else []
        late = [field for field, first in self.late if first <= position]
        return tuple(dict.fromkeys([*streams, *self.fields, *late]))

    def encode(self) -> bytes:
        """Return the schema as canonical msgpack."""
        return msgspec.msgpack.encode(self)


@lru_cache(maxsize=64)
def decode_schema(data: bytes) -> Schema:
    """Parse and check the schema (SPEC 2.2).

    Cached, because all shards of a dataset share one schema.

    Raises:
        CorruptIndex: It breaks a rule.
    """
    try:
        schema = msgspec.msgpack.decode(data, type=Schema)
        for group in schema.groups:
            parse_group(group)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptIndex(f"schema: {error}") from error
    require(schema.encode() == data, "the schema lacks keys or is not canonical msgpack")

    is_preview = schema.layout == "preview"
    num_groups = len(schema.groups)
    bases = range(1, num_groups + 1) if is_preview else range(1)
    require(schema.base in bases, "base does not fit layout")
    fields = schema.fields
    streams = [field for field, _ in schema.streams]
    late = [field for field, _ in schema.late]
    require(len(fields) + len(late) <= MAX_FIELDS, "expected at most 256 fields")
    require(are_distinct([*streams, *fields]), "streams and fields are not distinct")
    require(are_distinct([*late, *fields]), "deferred fields and fields are not distinct")
    require(all(map(valid_field, [*streams, *fields, *late])), "a field name is not legal")
    require(not {*late} & {*schema.lists}, "a deferred field has the name of a list of images")
    in_range = all(scan <= num_groups + 1 for _, scan in schema.late)
    require(in_range, "a deferred field has no such scan")
    shown = schema.preview_fields
    fits = set(shown) <= set(fields) and are_distinct(shown)
    require(fits and (is_preview or not shown), "preview_fields do not fit")
    return schema
