"""The images of a batch that the native core decodes: where they are, and the memory they go to."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from .. import memory, native
from ..jpeg.crops import Draws
from ..jpeg.image_decoder import ImageDecoder
from ..jpeg.pixels import Pixels
from ..native.pool import Batch, Pool
from ..reading.prefix import Prefix
from .shard_set import Row
from .shared_ring import RingPixels, SharedRing

# An image that a sample does not have, or that is stored as a file.
_NO_UNIT = -1


@dataclass(frozen=True)
class BatchMemory:
    """Memory for batches, which is used again when nothing refers to it any more.

    Attributes:
        pin: Whether batches are to be copied to a GPU.
        ring: In a child process, what its parent can see.
    """

    pin: bool = False
    ring: SharedRing | None = None

    def take(
        self,
        shape: tuple[int, ...],
        *,
        is_list: bool = False,
    ) -> tuple[torch.Tensor, RingPixels | None]:
        """Memory of a shape, and what to send in its place; nothing of a list is sent so."""
        if self.ring is not None and not is_list and (found := self.ring.take(shape)):
            return found
        size = math.prod(shape)
        if get_worker_info() is not None:
            # A worker shares memory with the loader, and torch would copy there what lies
            # elsewhere. torch's own collation does the same.
            new_shared: Any = torch.UntypedStorage._new_shared
            return torch.empty(0, dtype=torch.uint8).set_(new_shared(size)).view(shape), None
        if self.pin:
            # torch uses it again only after the copies that it began from it.
            return torch.empty(shape, dtype=torch.uint8, pin_memory=True), None
        return torch.from_numpy(memory.borrow_array(size)).view(shape), None


@dataclass(frozen=True, eq=False)
class FieldImages:
    """The images of one field of a batch.

    Attributes:
        pixels: All of them, one after the other, (images, 3, H, W) or as the decoder's layout says.
        first: (samples + 1) positions in ``pixels``: where those of each sample begin.
        is_list: Whether the field has a list of images in each sample.
        decoding: Their decoding, if the native core does it.
        sent: What a child process sends in place of the pixels, if its parent can see them.
    """

    pixels: torch.Tensor
    first: list[int]
    is_list: bool
    decoding: Batch | None
    sent: RingPixels | None

    @property
    def column(self) -> Any:
        """The pixels in a batch."""
        return self.pixels if self.sent is None else self.sent

    def decoded(self) -> list[bool]:
        """For each sample whether all of its images were decoded; waits for them."""
        if self.decoding is None:
            return [False] * (len(self.first) - 1)
        each: list[bool] = self.decoding.wait().tolist()
        if not self.is_list:
            return each
        return [all(each[start:stop]) for start, stop in itertools.pairwise(self.first)]

    def of_sample(self, position: int) -> Pixels | list[Pixels]:
        """The pixels of a sample: of one image, or of a list of them."""
        start, stop = self.first[position : position + 2]
        own: Pixels = self.pixels[start:stop].numpy()
        return list(own) if self.is_list else own[0]

    def put(self, position: int, pixels: Any) -> None:
        """Take over what was decoded elsewhere; what does not fit stays where it is."""
        if not self.is_list and isinstance(pixels, np.ndarray):
            self.pixels[position] = torch.from_numpy(pixels)


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
    pixels, sent = target.take(image.batch_shape(first[-1]), is_list=is_list)
    decoding = None
    if pool is not None:
        decoding = _decode(rows, units, image, key, pool, pixels.numpy())
    return FieldImages(pixels, first, is_list, decoding, sent)


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
    out: Pixels,
) -> Batch:
    ids = np.array([row[0] for row in rows], np.int64)
    groups = _group(rows, units)
    # An empty stream is not decoded: an image that is missing or damaged.
    table = native.empty_table(len(out), 1)
    sizes = np.ones((len(out), 2), np.int32)
    for prefix, (places, wanted) in groups.items():
        table[places] = prefix.table(wanted)
        sizes[places] = np.maximum(prefix.index.dims[wanted], 1)
    return pool.decode(
        table,
        out,
        boxes=image.draw_boxes(Draws(*key).state, ids.repeat(list(map(len, units))), sizes),
        layout=image.layout,
        colour=image.colour,
        keep=[prefix.images for prefix in groups],
    )


def _group(
    rows: list[Row],
    units: list[list[int]],
) -> dict[Prefix, tuple[list[int], list[int]]]:
    """By prefix, the place of each image in the batch, and its unit."""
    groups: dict[Prefix, tuple[list[int], list[int]]] = {}
    place = 0
    for (_, prefix, _), own in zip(rows, units, strict=True):
        places, wanted = groups.setdefault(prefix, ([], []))
        for unit in own:
            if unit != _NO_UNIT:
                places.append(place)
                wanted.append(unit)
            place += 1
    return groups
