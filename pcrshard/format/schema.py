"""The schema of a dataset: what its samples hold, from which scan on (SPEC.md section 2.2).

``pcr.json`` and every shard hold the same schema, so that nothing about structure is inferred from
the data at hand. Bytes in, bytes out; no I/O. Types and lengths are checked before use.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Literal, get_args

import msgspec

from ..errors import CorruptIndex
from ..lazy import lazy
from .names import are_distinct, valid_field
from .scan_script import MAX_GROUPS
from .shard_head import require

MAX_FIELDS = 256
MAX_IMAGE_FIELDS = 16
Kind = Literal[
    "image",
    "images",
    "mask",
    "boxes:xyxy",
    "boxes:xywh",
    "boxes:cxcywh",
    "boxes:xyxy:normalized",
    "boxes:xywh:normalized",
    "boxes:cxcywh:normalized",
    "keypoints",
    "keypoints:normalized",
    "text",
    "class",
    "integer",
    "json",
    "array",
    "file",
]
KINDS: tuple[str, ...] = get_args(Kind)
IMAGE: Literal["image"] = "image"
IMAGE_LIST: Literal["images"] = "images"
# Kinds of values inside a JSON field.
PART_KINDS = tuple(kind for kind in KINDS if kind.startswith(("boxes", "keypoints")))
_Text = Annotated[str, msgspec.Meta(max_length=1024)]


class Field(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A field of a dataset.

    Attributes:
        name: Its name, ``jpg`` or ``seg.png``.
        kind: What it holds. An ``image`` or a list of ``images`` is divided into scans, or kept
            whole; all other kinds are stored as bytes.
        scan: The first scan that has the field, N + 1 for ``"full"``; 0 if every scan does, even
            scan 0. Images are there from scan 1.
    """

    name: _Text
    kind: Kind
    scan: Annotated[int, msgspec.Meta(ge=0, le=MAX_GROUPS + 1)] = 0

    @property
    def is_image(self) -> bool:
        """Whether the field has one or several images, which are units of a shard."""
        return self.kind in (IMAGE, IMAGE_LIST)


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A spatial value inside a JSON field: ``("json", "objects.bbox", "boxes:xywh")``.

    Attributes:
        field: Name of the field.
        path: Keys that lead to the value, joined by dots.
        kind: What the value holds, one of :data:`PART_KINDS`.
    """

    field: _Text
    path: _Text
    kind: Kind


class Schema(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """What the shards of a dataset hold (SPEC 2.2).

    Attributes:
        script: Name of what divides images into scan groups.
        groups: A description of each scan group; readers do not need it.
        layout: ``compact`` or ``preview``; ``tar`` for a plain tar, which has no scan groups.
        base: Groups in the base members of the preview layout, else 0.
        fields: All fields, images first.
        parts: Spatial values inside JSON fields.
        preview_fields: Fields stored as members, too.
    """

    script: _Text
    groups: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    layout: Literal["compact", "preview", "tar"] = "compact"
    base: int = 0
    fields: tuple[Field, ...] = (Field("jpg", IMAGE, 1),)
    parts: Annotated[tuple[Part, ...], msgspec.Meta(max_length=MAX_FIELDS)] = ()
    preview_fields: tuple[str, ...] = ()

    @property
    def num_groups(self) -> int:
        """Scan groups N."""
        return len(self.groups)

    @lazy
    def by_name(self) -> dict[str, Field]:
        """The fields by name."""
        return {field.name: field for field in self.fields}

    @lazy
    def streams(self) -> tuple[str, ...]:
        """The names of the image fields."""
        return tuple(field.name for field in self.fields if field.is_image)

    @lazy
    def lists(self) -> tuple[str, ...]:
        """The image fields with a list of images per sample."""
        return tuple(field.name for field in self.fields if field.kind == IMAGE_LIST)

    @lazy
    def columns(self) -> tuple[str, ...]:
        """The fields at every scan; a shard's index holds their values."""
        return tuple(field.name for field in self.fields if not field.scan)

    @lazy
    def late(self) -> tuple[tuple[str, int], ...]:
        """The deferred fields, each with its first scan."""
        others = (field for field in self.fields if field.scan and not field.is_image)
        return tuple((field.name, field.scan) for field in others)

    @lazy
    def spatial(self) -> frozenset[str]:
        """The fields that hold places of the picture: masks, boxes and keypoints."""
        own = {each.name for each in self.fields if each.kind in ("mask", *PART_KINDS)}
        return frozenset(own | {part.field for part in self.parts})

    def names_at(self, position: int) -> tuple[str, ...]:
        """Return the fields at a scan, images first; ``position`` is that of :func:`check_scan`."""
        return tuple(field.name for field in self.fields if field.scan <= position)

    def encode(self) -> bytes:
        """Return the schema as canonical msgpack."""
        return msgspec.msgpack.encode(self)

    def check(self) -> None:
        """Check the rules that types do not express.

        Raises:
            CorruptIndex: The schema breaks a rule of SPEC 2.2.
        """
        is_preview = self.layout == "preview"
        require(bool(self.groups) == (self.layout != "tar"), "number of groups does not fit layout")
        bases = range(1, self.num_groups + 1) if is_preview else range(1)
        require(self.base in bases, "base does not fit layout")
        names = list(self.by_name)
        num_images = len(self.streams)
        require(len(names) == len(self.fields), "fields are not distinct")
        require(num_images <= MAX_IMAGE_FIELDS, f"expected at most {MAX_IMAGE_FIELDS} image fields")
        require(len(names) - num_images <= MAX_FIELDS, f"expected at most {MAX_FIELDS} fields")
        require(all(map(valid_field, names)), "a field name is not legal")
        for place, field in enumerate(self.fields):
            require(field.is_image == (place < num_images), "images are not the first fields")
            if field.is_image:
                require(field.scan == 1, f"image field {field.name!r} does not begin at scan 1")
            in_range = field.scan <= self.num_groups + 1
            require(in_range, f"field {field.name!r} begins at no scan")
        places = [(part.field, part.path) for part in self.parts]
        require(are_distinct(places), "parts are not distinct")
        for part in self.parts:
            of_json = part.field in self.by_name and self.by_name[part.field].kind == "json"
            fits = of_json and part.path and part.kind in PART_KINDS
            require(fits, f"part {part.path!r} does not fit field {part.field!r}")
        shown = self.preview_fields
        fits = set(shown) <= set(self.columns) and are_distinct(shown)
        require(fits and (is_preview or not shown), "preview_fields do not fit")


# Made here, once: msgspec builds what it knows of nested types at their first use, and crashes if
# another thread uses it meanwhile.
_DECODER = msgspec.msgpack.Decoder(Schema)


@lru_cache(maxsize=64)
def decode_schema(data: bytes) -> Schema:
    """Parse and check the schema of a shard.

    Cached, because all shards of a dataset share one schema.

    Raises:
        CorruptIndex: It breaks a rule of SPEC 2.2.
    """
    try:
        schema = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptIndex(f"schema: {error}") from error
    require(schema.encode() == data, "the schema lacks keys or is not canonical msgpack")
    schema.check()
    return schema
