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
from torch.utils.data import get_worker_info

from .. import memory
from ..jpeg.image_decoder import ImageDecoder
from ..jpeg.views import Geometry, Picture, at_image, geometry_field
from ..native.pieces import empty_table
from ..native.pool import Batch, Pool, draw_keys
from ..reading.prefix import Prefix
from .shard_set import Row


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

    def take_arrays(self, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """Memory for tensors of these shapes, one after the other."""
        stops = list(itertools.accumulate(map(math.prod, shapes), initial=0))
        whole = self.take(stops[-1])
        ends = zip(stops, stops[1:], shapes, strict=False)
        return [whole[start:stop].view(shape) for start, stop, shape in ends]


@dataclass(frozen=True, eq=False)
class FieldImages:
    """The images of one field of a batch, which the native core decodes.

    Attributes:
        name: Name of the field.
        arrays: The pixels of all of them, one after the other, (images, 3, H, W) or as the
            decoder's layout says; (images, V, 3, H, W) of each of its views.
        image: How they are decoded.
        first: (samples + 1) positions in the arrays: where those of each sample begin.
        is_list: Whether the field has a list of images in each sample.
        decoding: Their decoding.
    """

    name: str
    arrays: list[torch.Tensor]
    image: ImageDecoder
    first: list[int]
    is_list: bool
    decoding: Batch

    @property
    def pixels(self) -> Any:
        """A tensor, or one of each view."""
        return self.arrays if self.image.views else self.arrays[0]

    @cached_property
    def geometry(self) -> Any:
        """Where decoded images are from, if that is asked for: a Geometry, or one of each view."""
        return self.image.geometry(self.decoding.boxes, self.decoding.sizes)

    @property
    def columns(self) -> dict[str, Any]:
        """The field and its geometry, as a batch has them."""
        if not self.image.return_geometry:
            return {self.name: self.pixels}
        return {self.name: self.pixels, geometry_field(self.name): as_tensors(self.geometry)}

    @cached_property
    def decoded(self) -> list[bool]:
        """For each sample whether all of its images were decoded; waits for them."""
        each = self.decoding.wait()
        if not self.is_list:
            return each
        return [all(each[start:stop]) for start, stop in itertools.pairwise(self.first)]

    def value(self, position: int) -> Any:
        """What the decoder gives for a sample: of one image, or of a list of them."""
        start, stop = self.first[position : position + 2]
        own = [array[start:stop].numpy() for array in self.arrays]
        images: list[Any] = list(map(list, zip(*own, strict=True)))
        if not self.image.views:
            images = list(own[0])
        if self.image.return_geometry:
            places = range(start, stop)
            images = [
                Picture(image, at_image(self.geometry, place))
                for image, place in zip(images, places, strict=True)
            ]
        return images if self.is_list else images[0]

    def put(self, position: int, value: Any) -> None:
        """Take over an image that was decoded elsewhere; lists have no place for them."""
        if self.is_list or value is None:
            return
        pixels = value.pixels if self.image.return_geometry else value
        for array, each in zip(self.arrays, pixels if self.image.views else [pixels], strict=True):
            array[position] = torch.from_numpy(each)


def begin_field(
    rows: list[Row],
    field: str,
    image: ImageDecoder,
    key: tuple[int, int],
    pool: Pool,
    target: BatchMemory,
) -> FieldImages:
    """Begin to decode an image field of a batch.

    Args:
        rows: The samples.
        field: Name of the field.
        image: How to decode; it has a size.
        key: Seed and epoch, from which each sample draws.
        pool: Decodes.
        target: Where pixels go.
    """
    prefixes = dict.fromkeys(prefix for _, prefix, _ in rows)
    lists = {prefix for prefix in prefixes if field in prefix.index.schema.lists}
    plain = {prefix for prefix in prefixes if prefix.has_one_image and field in prefix.streams}
    # Of each prefix the places in the batch, and the units, of its images.
    groups: dict[Prefix, tuple[list[int], list[int]]] = {prefix: ([], []) for prefix in prefixes}
    ids: list[int] = []
    first = [0]
    for sample, prefix, row in rows:
        # A missing image of a plain shard has no bytes in the table, either.
        found = (row,) if prefix in plain else prefix.units_of(row, field)
        places, units = groups[prefix]
        for unit in found:
            places.append(len(ids))
            units.append(unit)
            ids.append(sample)
        if not found and prefix not in lists:
            ids.append(sample)  # a place for an image that is missing
        first.append(len(ids))
    # An empty stream is not decoded: an image that is missing or damaged.
    tables = [prefix.table(units) for prefix, (_, units) in groups.items()]
    table = empty_table(len(ids), max(own.shape[1] for own in tables))
    orientations = np.zeros(len(ids), np.uint8)
    for (prefix, (places, units)), own in zip(groups.items(), tables, strict=True):
        table[places, : own.shape[1]] = own
        orientations[places] = prefix.index.orientation[units]
    arrays = target.take_arrays(image.batch_shapes(len(ids)))
    decoding = image.begin(
        pool,
        table,
        [array.numpy() for array in arrays],
        draw_keys(key, ids),
        orientations=orientations,
        keep=[prefix.contents for prefix in prefixes],
    )
    return FieldImages(field, arrays, image, first, bool(lists), decoding)


def as_tensors(value: Any) -> Any:
    """Arrays as tensors: of an image, its views, its geometry, or a list of images."""
    if isinstance(value, Geometry):
        return Geometry(*map(torch.as_tensor, value))
    if isinstance(value, list):
        return list(map(as_tensors, value))
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


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
    tensors = list(map(as_tensors, values))
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
