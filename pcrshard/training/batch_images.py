"""The images of a batch that the native core decodes: where they are, and the memory they go to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from .. import memory
from ..jpeg.image_decoder import ImageDecoder
from ..jpeg.views import Geometry, at_image, geometry_field
from ..native.pieces import Table, empty_table
from ..native.pool import Batch, Pool, draw_keys
from ..reading.prefix import Prefix
from .shard_set import Row

# An image that a sample does not have, or that is stored as a file.
_NO_UNIT = -1
# The places in a batch, and the units, of each prefix's images.
Groups = dict[Prefix, tuple[list[int], list[int]]]


@dataclass(frozen=True)
class BatchMemory:
    """Memory for batches, which is used again when nothing refers to it any more.

    Attributes:
        pin: Whether batches are to be copied to a GPU.
    """

    pin: bool = False

    def take(self, size: int) -> torch.Tensor:
        """Memory for so many bytes, (size,) uint8."""
        if get_worker_info() is not None:
            # A worker shares memory with the loader, and torch would copy there what lies
            # elsewhere. torch's own collation does the same.
            new_shared: Any = torch.UntypedStorage._new_shared
            return torch.empty(0, dtype=torch.uint8).set_(new_shared(size))
        if self.pin:
            # torch uses it again only after the copies that it began from it.
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return torch.from_numpy(memory.borrow_array(size))


@dataclass(frozen=True, eq=False)
class FieldImages:
    """The images of one field of a batch.

    Attributes:
        arrays: The pixels of all of them, one after the other, (images, 3, H, W) or as the
            decoder's layout says; (images, V, 3, H, W) of each of its views.
        image: What decodes them.
        first: (samples + 1) positions in the arrays: where those of each sample begin.
        is_list: Whether the field has a list of images in each sample.
        decoding: Their decoding, if the native core does it.
    """

    arrays: list[torch.Tensor]
    image: ImageDecoder
    first: list[int]
    is_list: bool
    decoding: Batch | None

    @property
    def pixels(self) -> Any:
        """A tensor, or one of each view."""
        return self.arrays if self.image.views else self.arrays[0]

    @cached_property
    def geometry(self) -> Any:
        """Where decoded images are from, if that is asked for: a Geometry, or one of each view."""
        done = self.decoding
        return None if done is None else self.image.geometry(done.boxes, done.sizes)

    def columns(self, name: str) -> dict[str, Any]:
        """The field and its geometry, as a batch has them."""
        if (geometry := self.geometry) is None:
            return {name: self.pixels}
        return {name: self.pixels, geometry_field(name): as_tensors(geometry)}

    def decoded(self) -> list[bool]:
        """For each sample whether all of its images were decoded; waits for them."""
        if self.decoding is None:
            return [False] * (len(self.first) - 1)
        each: list[bool] = self.decoding.wait().tolist()
        if not self.is_list:
            return each
        return [all(each[start:stop]) for start, stop in itertools.pairwise(self.first)]

    def of_sample(self, name: str, position: int) -> dict[str, Any]:
        """The field and its geometry of a sample: of one image, or of a list of them."""
        start, stop = self.first[position : position + 2]
        own = [array[start:stop].numpy() for array in self.arrays]
        images = list(map(list, zip(*own, strict=True))) if self.image.views else list(own[0])
        found = {name: images if self.is_list else images[0]}
        if (geometry := self.geometry) is not None:
            places = [at_image(geometry, place) for place in range(start, stop)]
            found[geometry_field(name)] = places if self.is_list else places[0]
        return found

    def put(self, position: int, pixels: Any) -> None:
        """Take over what was decoded elsewhere; what does not fit stays where it is."""
        own = pixels if self.image.views else [pixels]
        if self.is_list or own is None or not all(isinstance(each, np.ndarray) for each in own):
            return
        for array, each in zip(self.arrays, own, strict=True):
            array[position] = torch.from_numpy(each)


def as_tensors(value: Any) -> Any:
    """Arrays as tensors: of an image, its views, its geometry, or a list of images."""
    if isinstance(value, Geometry):
        return Geometry(*map(torch.as_tensor, value))
    if isinstance(value, list):
        return list(map(as_tensors, value))
    return torch.from_numpy(value)


def picture_column(values: Sequence[Any], image: ImageDecoder) -> Any:
    """The pixels or the geometry of a field, of all samples.

    Args:
        values: Those of each sample, ``None`` if it has none.
        image: What decoded them.

    Returns:
        A tensor or a Geometry, or one of each view, if each sample has one image of one size; else
        a list with tensors. ``None`` if these are other values.
    """
    if not any(map(has_pictures, values)):
        return None
    tensors = [None if value is None else as_tensors(value) for value in values]
    shown = tensors if not image.views else [value and value[0] for value in tensors]
    if all(isinstance(value, Geometry) for value in shown):
        return _stack(tensors)
    one = image.is_sized and all(isinstance(value, torch.Tensor) for value in shown)
    return _stack(tensors) if one else tensors


def has_pictures(value: Any) -> bool:
    """Whether a value of a sample is pixels or their geometry, or a list of such."""
    if isinstance(value, list):
        return any(map(has_pictures, value))
    return isinstance(value, np.ndarray | Geometry)


def _stack(values: Sequence[Any]) -> Any:
    """Along a new first dimension, view by view."""
    if isinstance(values[0], torch.Tensor):
        return torch.stack(list(values))
    parts = [_stack(part) for part in zip(*values, strict=True)]
    return Geometry(*parts) if isinstance(values[0], Geometry) else parts


def begin_images(
    rows: list[Row],
    fields: list[str],
    image: ImageDecoder,
    key: tuple[int, int],
    pool: Pool | None,
    target: BatchMemory,
) -> dict[str, FieldImages]:
    """Begin to decode the images of a batch.

    Args:
        rows: The samples.
        fields: Their image fields.
        image: How to decode; it has a size.
        key: Seed and epoch, from which each sample draws.
        pool: Decodes; without one there is only the memory.
        target: Where they go.
    """
    return {field: _begin_field(rows, field, image, key, pool, target) for field in fields}


def _begin_field(
    rows: list[Row],
    field: str,
    image: ImageDecoder,
    key: tuple[int, int],
    pool: Pool | None,
    target: BatchMemory,
) -> FieldImages:
    prefixes = {prefix for _, prefix, _ in rows}
    is_list = any(field in prefix.index.schema.lists for prefix in prefixes)
    alone = {each for each in prefixes if each.has_one_image and each.streams[0] == field}
    units = [
        [row] if prefix in alone else _units(prefix, row, field, is_list) for _, prefix, row in rows
    ]
    first = [0, *itertools.accumulate(map(len, units))]
    arrays = _take(target, image.batch_shapes(first[-1]))
    decoding = None
    if pool is not None:
        decoding = _decode(rows, units, image, key, pool, arrays)
    return FieldImages(arrays, image, first, is_list, decoding)


def _take(target: BatchMemory, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Memory for tensors of these shapes, one after the other."""
    stops = list(itertools.accumulate(map(math.prod, shapes), initial=0))
    whole = target.take(stops[-1])
    places = itertools.pairwise(stops)
    return [
        whole[start:stop].view(shape) for (start, stop), shape in zip(places, shapes, strict=True)
    ]


def _units(
    prefix: Prefix,
    row: int,
    field: str,
    is_list: bool,
) -> list[int]:
    """Which units of a prefix a sample's images are; one, if its field has no list."""
    found = list(dict(prefix.units(row)).get(field, ()))
    return found if is_list or found else [_NO_UNIT]


def _decode(
    rows: list[Row],
    units: list[list[int]],
    image: ImageDecoder,
    key: tuple[int, int],
    pool: Pool,
    arrays: list[torch.Tensor],
) -> Batch:
    groups = _group(rows, units)
    ids = [row[0] for row, own in zip(rows, units, strict=True) for _ in own]
    table, orientations = _table(groups, len(ids))
    return image.begin(
        pool,
        table,
        [array.numpy() for array in arrays],
        draw_keys(key, ids),
        orientations=orientations,
        keep=[prefix.contents for prefix in groups],
    )


def _table(groups: Groups, count: int) -> tuple[Table, NDArray[np.uint8]]:
    """Where the images are, and their EXIF orientations."""
    # An empty stream is not decoded: an image that is missing or damaged.
    tables = {prefix: prefix.table(wanted) for prefix, (_, wanted) in groups.items()}
    table = empty_table(count, max([1, *(own.shape[1] for own in tables.values())]))
    orientations = np.zeros(count, np.uint8)
    for prefix, (places, wanted) in groups.items():
        own = tables[prefix]
        table[places, : own.shape[1]] = own
        orientations[places] = prefix.index.orientation[wanted]
    return table, orientations


def _group(
    rows: list[Row],
    units: list[list[int]],
) -> Groups:
    """By prefix, the place of each image in the batch, and its unit."""
    groups: Groups = {}
    place = 0
    for (_, prefix, _), own in zip(rows, units, strict=True):
        places, wanted = groups.setdefault(prefix, ([], []))
        for unit in own:
            if unit != _NO_UNIT:
                places.append(place)
                wanted.append(unit)
            place += 1
    return groups
