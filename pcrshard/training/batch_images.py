"""Images of a batch for the native core to decode, and the memory they are decoded into."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from ..jpeg.image_decoder import Decoding, ImageDecoder
from ..jpeg.views import Geometry, geometry_field
from ..memory import borrow_array
from ..native.pieces import empty_table
from ..native.pool import Pool, draw_keys
from ..reading.prefix import Prefix
from .shard_set import Row


@dataclass(frozen=True, eq=False)
class FieldImages:
    """The images of one field of a batch, decoded by the native core.

    Attributes:
        arrays: The pixels of all images, (images, 3, H, W) or in the
            decoder's layout; per view (images, V, 3, H, W).
        first: (samples + 1) positions in the arrays at which each sample's images begin.
        is_list: Whether the field is a list of images.
        decoding: The pending decoding into these arrays.
    """

    arrays: list[torch.Tensor]
    first: list[int]
    is_list: bool
    decoding: Decoding

    @property
    def is_complete(self) -> bool:
        """Whether each sample has one image, and all were decoded."""
        return not self.is_list and all(self.decoded)

    def columns(self, name: str) -> dict[str, Any]:
        """Return the columns of the field and its geometry, if it is complete."""
        decoder = self.decoding.decoder
        found: dict[str, Any] = {name: self.arrays if decoder.views else self.arrays[0]}
        if decoder.return_geometry:
            batch = self.decoding.batch
            geometry = decoder.geometry(batch.boxes, batch.sizes)
            found[geometry_field(name)] = as_tensors(geometry)
        return found

    @cached_property
    def decoded(self) -> list[bool]:
        """For each sample, whether all of its images were decoded; waits for the decoding."""
        each = self.decoding.decoded
        return [all(each[start:stop]) for start, stop in itertools.pairwise(self.first)]

    def value(self, position: int) -> Any:
        """Return the decoded image, or list of images, of a sample."""
        start, stop = self.first[position : position + 2]
        images = [self.decoding[place] for place in range(start, stop)]
        return images if self.is_list else images[0]


def begin_field(
    rows: list[Row],
    prefixes: Iterable[Prefix],
    field: str,
    image: ImageDecoder,
    key: tuple[int, int],
    pool: Pool,
    pin: bool,
) -> FieldImages:
    """Start decoding an image field of a batch.

    Args:
        rows: The samples.
        prefixes: The prefix of each sample, once.
        field: Name of the field.
        image: The decoder; must have a size.
        key: Seed and epoch of the random crops and flips.
        pool: Threads that decode.
        pin: Whether to decode into pinned memory.
    """
    # The positions in the batch of each prefix's images, and their units.
    images: dict[Prefix, tuple[list[int], list[int]]] = {prefix: ([], []) for prefix in prefixes}
    lists = {prefix for prefix in prefixes if field in prefix.index.schema.lists}
    ids: list[int] = []
    first = [0]
    for sample, prefix, row in rows:
        places, units = images[prefix]
        found = prefix.units_of(row, field)
        for unit in found:
            places.append(len(ids))
            units.append(unit)
            ids.append(sample)
        if not found and prefix not in lists:
            ids.append(sample)  # a missing image gets space, too
        first.append(len(ids))
    # An empty stream stands for a missing or damaged image and is not decoded.
    tables = [prefix.table(units) for prefix, (_, units) in images.items()]
    table = empty_table(len(ids), max(own.shape[1] for own in tables))
    orientations = np.zeros(len(ids), np.uint8)
    for own, (prefix, (places, units)) in zip(tables, images.items(), strict=True):
        table[places, : own.shape[1]] = own
        orientations[places] = prefix.index.orientation[units]
    # torch reuses pinned memory only after pending copies from it complete.
    arrays = [
        torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        if pin
        else torch.from_numpy(borrow_array(math.prod(shape)).reshape(shape))
        for shape in image.batch_shapes(len(ids))
    ]
    decoding = image.begin(
        pool,
        table,
        [array.numpy() for array in arrays],
        draw_keys(key, ids),
        orientations=orientations,
        keep=[prefix.contents for prefix in prefixes],
    )
    return FieldImages(arrays, first, bool(lists), decoding)


def as_tensors(value: Any) -> Any:
    """Convert arrays to tensors: an image, its views, its geometry, or a list of images."""
    if isinstance(value, Geometry):
        return Geometry(*map(torch.as_tensor, value))
    if isinstance(value, list):
        return list(map(as_tensors, value))
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def stack_images(values: list[Any], image: ImageDecoder) -> Any:
    """Collate the pixels or the geometry of a field.

    Args:
        values: The value of each sample, ``None`` if it has none.
        image: The decoder.

    Returns: A tensor or a Geometry, or one per view, if each sample has one image and all have the
        same size; otherwise a list of tensors. Other values are unchanged.
    """
    shown = [value and value[0] for value in values] if image.views else values
    is_geometry = all(isinstance(value, Geometry) for value in shown)
    one_size = image.is_sized and all(isinstance(value, np.ndarray) for value in shown)
    return default_collate(values) if is_geometry or one_size else as_tensors(values)
