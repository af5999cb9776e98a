"""Make batches of samples: one column per field, with images decoded together where possible."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from torch.utils.data import default_collate

from ..errors import PCRError, ScanUnavailable
from ..format.scan import FULL, check_scan
from ..jpeg.image_decoder import ImageDecoder
from ..jpeg.views import Picture, geometry_field
from ..native.pool import Pool, draw_key
from ..reading.field_values import CONVERSIONS, INTEGERS, convert, extension
from ..reading.prefix import Prefix, Sample
from .batch_images import FieldImages, as_tensors, begin_field, stack_images
from .shard_set import Row

Rows = list[Row]
Prefixes = list[Prefix]
# Images of a batch by field.
Images = dict[str, FieldImages]
# Values of each sample by field.
Columns = dict[str, list[Any]]
# A size stands for a decoder of whole images at that size.
ImageChoice = Annotated[
    ImageDecoder | int | tuple[int, int] | None,
    "an ImageDecoder, a size such as 224 or (height, width), or None; functions of images go to "
    "transform=",
]


@dataclass(frozen=True)
class Collator:
    """Makes batches from the (id, prefix, row) of their samples.

    Attributes:
        image: Decoder of image fields; ``None`` leaves them as bytes.
        fields: Fields of a batch, which is then a tuple; by default a batch is a dict of all
            fields.
        transform: Called with each sample, with images as arrays; torch collates the results.
        key: Seed and epoch, which together with a sample's id determine its crops and flips.
    """

    image: ImageDecoder | None
    fields: Sequence[str] | None
    transform: Callable[[Sample], Any] | None
    key: tuple[int, int]

    def begin(
        self,
        rows: Rows,
        pool: Pool | None = None,
        pin: bool = False,
    ) -> Callable[[], Any]:
        """Start a batch of these rows.

        Args:
            rows: The samples, whose prefixes must be open until the batch is finished.
            pool: Threads that decode in the background; see :meth:`open_pool`.
            pin: Whether to decode into pinned memory.

        Returns:
            A function that finishes the batch and returns it.
        """
        prefixes = list(dict.fromkeys(prefix for _, prefix, _ in rows))
        images: Images = {}
        if pool is not None and self.image is not None and self.image.is_sized:
            pin = pin and self.transform is None  # torch copies a transform's results
            streams = dict.fromkeys(stream for prefix in prefixes for stream in prefix.streams)
            images = {
                name: begin_field(rows, prefixes, name, self.image, self.key, pool, pin)
                for name in filter(self._is_read, streams)
            }
        return partial(self._finish, rows, prefixes, images)

    def one(self, row: Row) -> Any:
        """Return one sample: ``transform``'s result, or a tuple or dict with images as tensors."""
        [sample] = self._samples(self._values([row], [row[1]], {}))
        if self.transform is not None:
            return self.transform(sample)
        return self._chosen({name: as_tensors(value) for name, value in sample.items()}, [row])

    def of_size(self, size: tuple[int, int]) -> Collator:
        """Return a collator that crops to the shape (height, width) and resizes to that size."""
        if self.image is None:
            return self
        ratio = size[1] / size[0]
        # Without a random crop, the largest centered box of that shape.
        scale = self.image.scale if self.image.crop == "random" else (1.0, 1.0)
        box = replace(self.image, size=size, crop="random", ratio=(ratio, ratio), scale=scale)
        return replace(self, image=box)

    @property
    def is_upright(self) -> bool:
        """Whether images are rotated upright; true for bytes, which the user's decoder rotates."""
        return self.image is None or self.image.upright

    def open_pool(self, threads: int) -> AbstractContextManager[Pool | None]:
        """Return threads that decode batches; ``None`` without an unmodified ImageDecoder."""
        # A subclass may override decoding.
        return Pool(threads) if type(self.image) is ImageDecoder else nullcontext()

    def _finish(self, rows: Rows, prefixes: Prefixes, images: Images) -> Any:
        batch: dict[str, Any] = {}
        if self.transform is None:
            for name, own in images.items():
                if own.is_complete:
                    batch |= own.columns(name)
        columns = self._values(rows, prefixes, images, batch)
        if self.transform is not None:
            return default_collate(list(map(self.transform, self._samples(columns))))
        for name in columns if self.fields is None else filter(columns.get, self.fields):
            has = [value is not None for value in columns[name]]
            if all(has) or (self.fields is None and any(has)):
                batch[name] = self._column(name, columns[name])
        return self._chosen(batch, rows)

    def _chosen(self, found: dict[str, Any], rows: Rows) -> Any:
        """Return the requested fields of a sample or batch; an error if one is missing."""
        if self.fields is None:
            return found
        for name in self.fields:
            if name not in found:
                raise _missing(name, rows)
        return tuple(found[name] for name in self.fields)

    def _values(
        self, rows: Rows, prefixes: Prefixes, images: Images, done: Container[str] = ()
    ) -> Columns:
        """Return the value of each sample in each field not ``done``, images as arrays.

        A sample that lacks a field has ``None``.
        """
        names = dict.fromkeys(name for prefix in prefixes for name in prefix.names)
        columns: Columns = {"__key__": [prefix.index.keys[row] for _, prefix, row in rows]}
        for name in names:
            if name in done or not self._is_read(name):
                continue
            own = images.get(name)
            column = [
                own.value(place) if own and own.decoded[place] else self._value(name, row)
                for place, row in enumerate(rows)
            ]
            if extension(name) in CONVERSIONS:
                keys = columns["__key__"]
                column = [convert(name, *pair) for pair in zip(column, keys, strict=True)]
            elif self.image is not None and self.image.return_geometry:
                columns[geometry_field(name)] = [_part(value, 1) for value in column]
                column = [_part(value, 0) for value in column]
            columns[name] = column
        return columns

    def _samples(self, columns: Columns) -> list[Sample]:
        """Return each sample, with the fields that it has."""
        return [
            {name: values[place] for name, values in columns.items() if values[place] is not None}
            for place in range(len(columns["__key__"]))
        ]

    def _is_read(self, field: str) -> bool:
        if self.fields is None or self.transform is not None:
            return True
        return field in self.fields or geometry_field(field) in self.fields

    def _value(self, name: str, row: Row) -> Any:
        """Return a field of a sample, decoding an image."""
        number, prefix, place = row
        image = self.image
        if image is None or extension(name) in CONVERSIONS:
            return prefix.value(place, name)

        def decode(pieces: list[memoryview]) -> Any:
            # All images of a sample share their random numbers, whichever fields are read, so that
            # an image and its mask are cropped alike.
            return image(pieces, draw_key(*self.key, number))

        value = prefix.value(place, name, decode)
        if not isinstance(value, bytes) or name not in prefix.passthrough_images:
            return value
        try:
            return decode([memoryview(value)])
        except PCRError as error:
            key_of = prefix.index.keys[place]
            raise type(error)(f"{name}: {error}", url=prefix.shard.url, key=key_of) from error

    def _column(self, name: str, values: list[Any]) -> Any:
        """Collate the values of a field by its last extension; missing ones are ``None``."""
        last = extension(name)
        if last in INTEGERS and None not in values:
            return torch.from_numpy(np.array(values, np.int64))  # cheaper than torch.tensor
        if last in CONVERSIONS or self.image is None:
            return values
        return stack_images(values, self.image)


def _part(value: Any, which: int) -> Any:
    """Return the pixels (0) or the geometry (1) of a picture or a list; others have pixels only."""
    if isinstance(value, list):
        return [_part(each, which) for each in value]
    if isinstance(value, Picture):
        return value[which]
    return None if which else value


def _missing(name: str, rows: Rows) -> Exception:
    """Return an error that tells why a sample lacks a requested field."""
    for _, prefix, number in rows:
        sample = prefix.sample(number)
        if name not in sample:
            break
    first = dict(prefix.index.schema.late).get(name, 0)
    if first > check_scan(prefix.scan, prefix.index.num_groups, 0):
        shown = FULL if first > prefix.index.num_groups else first
        return ScanUnavailable(
            f"field {name!r} is stored from scan {shown} on, asked for it at scan {prefix.scan}",
            url=prefix.shard.url,
        )
    return KeyError(
        f"sample {sample['__key__']!r} has no field {name!r}, it has {', '.join(sample)}"
    )
