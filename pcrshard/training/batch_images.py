"""Images of a batch for the native core to decode, and the memory they are decoded into."""

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


@dataclass(frozen=True, eq=False)
class FieldImages:
    """The images of one field of a batch, decoded by the native core.

    Attributes:
        name: Name of the field.
        arrays: The pixels of all images, (images, 3, H, W) or in the
            decoder's layout; per view (images, V, 3, H, W).
        image: The decoder.
        first: (samples + 1) positions in the arrays at which each sample's images begin.
        is_list: Whether the field is a list of images.
        decoding: The pending decoding.
    """

    name: str
    arrays: list[torch.Tensor]
    image: ImageDecoder
    first: list[int]
    is_list: bool
    decoding: Batch

    @cached_property
    def geometry(self) -> Any:
        """The geometry of the images, if requested: a Geometry, or one per view."""
        return self.image.geometry(self.decoding.boxes, self.decoding.sizes)

    @property
    def columns(self) -> dict[str, Any]:
        """Return the columns of the field and its geometry."""
        found: dict[str, Any] = {self.name: self.arrays if self.image.views else self.arrays[0]}
        if self.image.return_geometry:
            found[geometry_field(self.name)] = as_tensors(self.geometry)
        return found

    @cached_property
    def decoded(self) -> list[bool]:
        """For each sample, whether all of its images were decoded; waits for the decoding."""
        each = self.decoding.wait()
        if not self.is_list:
            return each
        return [all(each[start:stop]) for start, stop in itertools.pairwise(self.first)]

    def value(self, position: int) -> Any:
        """Return the decoded image, or list of images, of a sample."""
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


def begin_field(
    rows: list[Row],
    field: str,
    image: ImageDecoder,
    key: tuple[int, int],
    pool: Pool,
    pin: bool,
) -> FieldImages:
    """Start decoding an image field of a batch.

    Args:
        rows: The samples.
        field: Name of the field.
        image: The decoder; must have a size.
        key: Seed and epoch of the random crops and flips.
        pool: Threads that decode.
        pin: Whether to decode into pinned memory.
    """
    # For each prefix, the positions in the batch and the units of its images.
    groups: dict[Prefix, tuple[list[int], list[int]]] = {prefix: ([], []) for _, prefix, _ in rows}
    is_list = any(field in prefix.index.schema.lists for prefix in groups)
    ids: list[int] = []
    first = [0]
    for sample, prefix, row in rows:
        places, units = groups[prefix]
        found = prefix.units_of(row, field)
        places.extend(range(len(ids), len(ids) + len(found)))
        units.extend(found)
        # A missing image gets space, too, unless this shard has a list here.
        has_list = field in prefix.index.schema.lists
        ids.extend([sample] * (len(found) if has_list else 1))
        first.append(len(ids))
    # An empty stream stands for a missing or damaged image and is not decoded.
    tables = [prefix.table(units) for prefix, (_, units) in groups.items()]
    table = empty_table(len(ids), max(own.shape[1] for own in tables))
    orientations = np.zeros(len(ids), np.uint8)
    for (prefix, (places, units)), own in zip(groups.items(), tables, strict=True):
        table[places, : own.shape[1]] = own
        orientations[places] = prefix.index.orientation[units]
    arrays = _batch_memory(image.batch_shapes(len(ids)), pin)
    decoding = image.begin(
        pool,
        table,
        [array.numpy() for array in arrays],
        draw_keys(key, ids),
        orientations=orientations,
        keep=[prefix.contents for prefix in groups],
    )
    return FieldImages(field, arrays, image, first, is_list, decoding)


def _batch_memory(shapes: Sequence[tuple[int, ...]], pin: bool) -> list[torch.Tensor]:
    """Return consecutive uint8 tensors of these shapes, in memory that is reused later."""
    sizes = list(map(math.prod, shapes))
    total = sum(sizes)
    if get_worker_info() is not None:
        # A worker passes tensors through shared memory, and torch would copy any that lie
        # elsewhere. torch's own collation does the same.
        new_shared: Any = torch.UntypedStorage._new_shared
        block = torch.empty(0, dtype=torch.uint8).set_(new_shared(total))
    elif pin:
        # torch reuses it only after pending copies from it complete.
        block = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    else:
        block = torch.from_numpy(memory.borrow_array(total))
    parts = torch.split(block, sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def as_tensors(value: Any) -> Any:
    """Convert arrays to tensors: an image, its views, its geometry, or a list of images."""
    if isinstance(value, Geometry):
        return Geometry(*map(torch.as_tensor, value))
    if isinstance(value, list):
        return list(map(as_tensors, value))
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def stack_images(values: Sequence[Any], image: ImageDecoder) -> Any:
    """Collate the pixels or the geometry of a field.

    Args:
        values: The value of each sample, ``None`` if it has none.
        image: The decoder.

    Returns: A tensor or a Geometry, or one per view, if each sample has one image and all have the
        same size; otherwise a list of tensors. Other values are unchanged.
    """
    tensors = list(map(as_tensors, values))
    shown = tensors if not image.views else [value and value[0] for value in tensors]
    is_geometry = all(isinstance(value, Geometry) for value in shown)
    one_size = image.is_sized and all(isinstance(value, torch.Tensor) for value in shown)
    return _stack(tensors) if is_geometry or one_size else tensors


def _stack(values: Sequence[Any]) -> Any:
    """Stack along a new first dimension, view by view."""
    if isinstance(values[0], torch.Tensor):
        return torch.stack(list(values))
    parts = [_stack(part) for part in zip(*values, strict=True)]
    return Geometry(*parts) if isinstance(values[0], Geometry) else parts
