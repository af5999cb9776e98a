"""The schema of a shard: names, scan groups and locations of fields (SPEC.md section 2.2).

Bytes in, bytes out; no I/O. Types and lengths are checked before anything is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import msgpack

from ..errors import CorruptIndex
from .names import are_distinct, valid_field
from .scan_script import parse_group
from .shard_head import require

MAX_STREAMS = 16
MAX_FIELDS = 256
IMAGE = "jpeg"
IMAGE_LIST = "jpegs"


@dataclasses.dataclass(frozen=True)
class Schema:
    """The msgpack part of the index (SPEC 2.2).

    ``late`` has pairs of a field's name and the first scan that has it, N + 1 for ``"full"``.
    """

    script: str
    groups: tuple[str, ...]
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
        return bytes(msgpack.packb(dataclasses.asdict(self)))


_SCHEMA_KEYS = [field.name for field in dataclasses.fields(Schema)]


@lru_cache(maxsize=64)
def decode_schema(data: bytes) -> Schema:
    """Parse and check the schema (SPEC 2.2).

    Cached, because all shards of a dataset share one schema.
    """
    raw = _unpack(data)
    known = isinstance(raw, dict) and list(raw) == _SCHEMA_KEYS
    require(known, f"expected schema keys {_SCHEMA_KEYS}")

    schema = Schema(**raw)
    _check_types(schema)
    check_schema(schema)
    return schema


def _unpack(data: bytes) -> Any:
    """Unpack a small msgpack map."""
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            use_list=False,
            strict_map_key=True,
            max_str_len=1024,
            max_bin_len=0,
            max_ext_len=0,
            max_array_len=MAX_FIELDS,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise CorruptIndex(f"schema is not msgpack within limits: {error}") from error


def _check_types(schema: Schema) -> None:
    require(type(schema.base) is int, "expected base to be an integer")
    _check_pairs(schema.streams)
    _check_pairs(schema.late)
    late = tuple(name for name, _ in schema.late)
    require(all(type(scan) is int for _, scan in schema.late), "expected scans of deferred fields")
    _check_strings((schema.script, schema.layout))
    for strings in (schema.groups, schema.fields, schema.preview_fields, late, *schema.streams):
        _check_strings(strings)


def _is_tuple_of(kind: type, values: Any) -> bool:
    return type(values) is tuple and all(type(value) is kind for value in values)


def _check_pairs(pairs: Any) -> None:
    legal = _is_tuple_of(tuple, pairs)
    require(legal and all(len(pair) == 2 for pair in pairs), "expected pairs in the schema")


def _check_strings(strings: Any) -> None:
    legal = _is_tuple_of(str, strings)
    require(legal, f"expected strings in the schema, got {strings!r}")


def check_schema(schema: Schema) -> None:
    """Check names and numbers of a schema (SPEC 2.2); raises :class:`CorruptIndex`."""
    _check_layout(schema)
    require(len(schema.streams) <= MAX_STREAMS, "expected at most 16 streams")
    _check_fields(schema)
    _check_script(schema.groups)


def _check_script(groups: Sequence[str]) -> None:
    try:
        for group in groups:
            parse_group(group)
    except ValueError as error:
        raise CorruptIndex(f"scan script: {error}") from error


def _check_layout(schema: Schema) -> None:
    bases = {
        "compact": range(1),
        "preview": range(1, len(schema.groups) + 1),
    }
    require(schema.layout in bases, f"unknown layout {schema.layout!r}")
    require(schema.base in bases[schema.layout], "base does not fit layout")


def _check_fields(schema: Schema) -> None:
    codecs = {codec for _, codec in schema.streams}
    require(codecs <= {IMAGE, IMAGE_LIST}, f"unknown codecs {sorted(codecs)}")

    require(len(schema.fields) + len(schema.late) <= MAX_FIELDS, "expected at most 256 fields")
    names = [*(field for field, _ in schema.streams), *schema.fields]
    require(are_distinct(names), "streams and fields are not distinct")
    require(all(map(valid_field, names)), "a field name is not legal")
    _check_late_fields(schema)

    shown = schema.preview_fields
    fits = set(shown) <= set(schema.fields) and are_distinct(shown)
    require(fits and (not shown or schema.layout == "preview"), "preview_fields do not fit")


def _check_late_fields(schema: Schema) -> None:
    late = [field for field, _ in schema.late]
    require(are_distinct([*late, *schema.fields]), "deferred fields and fields are not distinct")
    require(all(map(valid_field, late)), "the name of a deferred field is not legal")
    require(not {*late} & {*schema.lists}, "a deferred field has the name of a list of images")
    _check_late_scans(schema)


def _check_late_scans(schema: Schema) -> None:
    last = len(schema.groups) + 1
    legal = all(1 <= scan <= last for _, scan in schema.late)
    require(legal, "a deferred field has no such scan")
