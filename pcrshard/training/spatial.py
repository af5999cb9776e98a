"""Masks, boxes and keypoints that follow the crop and flip of their picture."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..format.names import is_other_image
from ..format.schema import PART_KINDS, Schema
from ..jpeg.image_decoder import ImageDecoder
from ..jpeg.other_formats import decode_indexed
from ..jpeg.views import Geometry
from ..native import Size

MASK = "mask"
# In names of fields that hold places of the picture.
_WORDS = {"mask", "masks", "seg", "bbox", "bboxes", "boxes", "keypoints", "landmarks"}
Numbers = NDArray[np.float32]
Doubles = NDArray[np.float64]


class Target(NamedTuple):
    """Where a spatial value is moved to.

    Attributes:
        where: The picture's crop and flip.
        size: (height, width) to which the crop is resized.
        min_visible: Boxes of which less than this fraction of the area is left get no area.
    """

    where: Geometry
    size: Size
    min_visible: float = 0.0


def follow(
    schema: Schema, name: str, value: Any, image: ImageDecoder, size: Sequence[int], key: int
) -> Any:
    """Return the value of a spatial field in the crop of its picture; with views, lists of lists.

    Args:
        schema: The schema of the dataset.
        name: Name of the field.
        value: Its value; see :func:`move`.
        image: The decoder of the picture.
        size: (height, width) of the picture, upright.
        key: The random key of the picture's crop and flip.

    Raises:
        FormatError: As for :func:`move`.
        ValueError: The decoder leaves pictures as they are stored.
    """
    if not image.upright:
        raise ValueError(
            f"expected an upright decoder, because field {name!r} follows the crop: use "
            "return_geometry=True and move it in transform="
        )
    moved = [
        [move(schema, name, value, Target(*own, image.min_visible)) for own in view]
        for view in image.places(size, key)
    ]
    return moved if image.views else moved[0][0]


def move(schema: Schema, name: str, value: Any, target: Target) -> Any:
    """Return the value of a spatial field in its crop.

    Args:
        schema: The schema of the dataset.
        name: Name of the field.
        value: Its value: the bytes of a mask, otherwise as :func:`convert` returns it.
        target: Where it is moved to.

    Returns: A mask as (H, W) array of its file's integer type, by nearest neighbor. Boxes and
        keypoints as float32, in pixels of the crop: boxes are clipped to it, and those outside, or
        of which too little is left, have no area; keypoints outside get the visibility 0. Their
        number and order stay, so that labels fit. A JSON field is a copy with the values at its
        ``parts`` moved.

    Raises:
        FormatError: The mask has another size than the picture, or the numbers another shape.
    """
    where, out, _ = target
    y, x, height, width = where.crop.tolist()
    kind = schema.by_name[name].kind
    if kind == MASK:
        mask = decode_indexed(value)
        if mask.shape[:2] != (wanted := tuple(where.size.tolist())):
            raise FormatError(
                f"field {name!r}: expected a mask of the picture's size {wanted}, got "
                f"{mask.shape[:2]}"
            )
        rows = y + (np.arange(out[0]) * 2 + 1) * height // (2 * out[0])
        columns = x + (np.arange(out[1]) * 2 + 1) * width // (2 * out[1])
        return mask[np.ix_(rows, columns[::-1] if where.flipped else columns)]
    if kind in PART_KINDS:
        return _move_numbers(name, kind, value, target)
    value = copy.deepcopy(value)
    for part in schema.parts:
        if part.field == name:
            *path, last = part.path.split(".")
            for holder in _holders(value, path):
                if isinstance(holder, dict) and holder.get(last) is not None:
                    own = f"{name}:{part.path}"
                    found = _move_numbers(own, part.kind, holder[last], target)
                    holder[last] = found.tolist()
    return value


def check_kinds(schemas: Iterable[Schema], fields: Sequence[str] | None) -> None:
    """Refuse fields that a crop would leave where they were, because nobody said what they hold.

    Args:
        schemas: The schemas of the datasets.
        fields: The fields that are read; ``None`` for all.

    Raises:
        ValueError: There is a mask, or a field of boxes or keypoints by its name, without a kind.
    """
    for schema in schemas:
        for field in schema.fields:
            is_read = fields is None or field.name in fields
            words = _WORDS & set(re.split(r"[^a-z]+", field.name))
            is_file = field.kind == "file" and is_other_image(field.name)
            is_loose = is_file or (field.kind in ("file", "json", "array") and words)
            if is_read and is_loose and field.name not in schema.spatial:
                kind = "boxes" if words & {"boxes", "bbox", "bboxes"} else "mask"
                raise ValueError(
                    f"expected field {field.name!r} to have a kind, because crops and flips of the "
                    f"picture would leave it as it is: encode with --kind {field.name}={kind} (or "
                    "boxes, keypoints), leave it out by fields=, or move it in transform= by "
                    "return_geometry=True"
                )


def _holders(value: Any, path: list[str]) -> list[Any]:
    """Return what lies at a path, in each item of the lists on the way."""
    found = [value]
    for key in [*path, None]:
        found = [each for one in found for each in (one if isinstance(one, list) else [one])]
        if key is not None:
            found = [one[key] for one in found if isinstance(one, dict) and key in one]
    return found


def _move_numbers(name: str, kind: str, value: Any, target: Target) -> Numbers:
    columns = (2, 3) if kind == "keypoints" else (4,)
    try:
        numbers = np.array(value, np.float64)
        if not numbers.size:
            return np.zeros((0, columns[0]), np.float32)
        if numbers.shape[-1] not in columns:
            raise ValueError(f"got the shape {numbers.shape}")
    except (TypeError, ValueError) as error:
        wanted = "(x, y) or (x, y, visibility)" if kind == "keypoints" else "4 numbers of each box"
        raise FormatError(f"field {name!r}: expected {wanted}: {error}") from error
    moved = _move_points if kind == "keypoints" else partial(_move_boxes, kind)
    return moved(numbers, target).astype(np.float32)


def _to_crop(points: Doubles, where: Geometry, out: Size) -> Doubles:
    """Return (..., 2) points, x and y, in the crop."""
    y, x, height, width = where.crop.tolist()
    points = (points - (x, y)) * (out[1] / width, out[0] / height)
    if where.flipped:
        points[..., 0] = out[1] - points[..., 0]
    return points


def _move_points(numbers: Doubles, target: Target) -> Doubles:
    points = _to_crop(numbers[..., :2], target.where, target.size)
    inside = ((points >= 0) & (points < target.size[::-1])).all(axis=-1, keepdims=True)
    return np.concatenate([points, numbers[..., 2:] * inside], axis=-1)


def _move_boxes(kind: str, numbers: Doubles, target: Target) -> Doubles:
    first, second = numbers[..., :2], numbers[..., 2:]
    if kind == "boxes:cxcywh":
        first = first - second / 2
    if kind != "boxes:xyxy":
        second = first + second
    whole = _to_crop(np.stack([first, second], axis=-2), target.where, target.size)
    corners = whole.clip(0, target.size[::-1])
    lost = _areas(corners) < target.min_visible * _areas(whole)
    corners[lost] = 0
    first, second = corners.min(axis=-2), corners.max(axis=-2)
    if kind != "boxes:xyxy":
        second = second - first
    if kind == "boxes:cxcywh":
        first = first + second / 2
    return np.concatenate([first, second], axis=-1)


def _areas(corners: Doubles) -> Doubles:
    """Return the (...) areas of boxes by their (..., 2, 2) corners."""
    areas: Doubles = np.abs(np.diff(corners, axis=-2)).prod(axis=-1)[..., 0]
    return areas
