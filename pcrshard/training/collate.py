"""Make batches of samples: one column per field, with images decoded together where possible."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch.utils.data import default_collate

from ..arguments import is_integer
from ..errors import PCRError, ScanUnavailable
from ..format.scan import FULL, check_scan
from ..jpeg.image_decoder import ImageDecoder
from ..jpeg.views import geometry_field, unfold
from ..native.pool import Pool, draw_key
from ..reading.field_values import CONVERSIONS, INTEGERS, convert, extension
from ..reading.prefix import Sample
from .batch_images import FieldImages, as_tensors, begin_field, stack_images
from .shard_set import Row

Rows = list[Row]
# Images of a batch by field.
Images = dict[str, FieldImages]
# A size stands for a decoder of whole images at that size.
OneImage = ImageDecoder | int | tuple[int, int] | None
ImageChoice = Annotated[
    OneImage | Callable[[int], OneImage],
    "an ImageDecoder, a size such as 224 or (height, width), a function of the epoch's number that "
    "returns one of them, or None; functions of images go to transform=",
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
        images: Images = {}
        if pool is not None and self.image is not None and self.image.is_sized:
            pin = pin and self.transform is None  # torch copies a transform's results
            streams = dict.fromkeys(stream for _, prefix, _ in rows for stream in prefix.streams)
            images = {
                name: begin_field(rows, name, self.image, self.key, pool, pin)
                for name in filter(self._is_read, streams)
            }
        return partial(self._finish, rows, images)

    def one(self, row: Row) -> Any:
        """Return one sample: ``transform``'s result, or a tuple or dict with images as tensors."""
        sample = self._sample(row, {})
        if self.transform is not None:
            return self.transform(sample)
        sample = {name: as_tensors(value) for name, value in sample.items()}
        if self.fields is None:
            return sample
        return tuple(_requested(sample, name, row) for name in self.fields)

    def of_size(self, size: tuple[int, int]) -> Collator:
        """Return a collator that crops to the shape (height, width) and resizes to that size."""
        if self.image is None:
            return self
        height, width = size
        shape = (width / height, width / height)
        box: dict[str, Any] = {"crop": "random", "ratio": shape}
        if self.image.crop != "random":
            box["scale"] = (1.0, 1.0)  # the largest centered box of that shape
        return replace(self, image=replace(self.image, size=size, **box))

    @property
    def is_upright(self) -> bool:
        """Whether images are rotated upright; true for bytes, which the user's decoder rotates."""
        return self.image is None or self.image.upright

    def open_pool(self, threads: int) -> AbstractContextManager[Pool | None]:
        """Return threads that decode batches; ``None`` without an unmodified ImageDecoder."""
        # A subclass may override decoding.
        return Pool(threads) if type(self.image) is ImageDecoder else nullcontext()

    def _finish(self, rows: Rows, images: Images) -> Any:
        # Images that were decoded straight into one tensor.
        columns: dict[str, Any] = {}
        if self.transform is None:
            for name, own in list(images.items()):
                if not own.is_list and all(own.decoded):
                    columns |= images.pop(name).columns
        samples = [self._sample(row, images, columns, place) for place, row in enumerate(rows)]
        if self.transform is not None:
            return default_collate(list(map(self.transform, samples)))
        if self.fields is None:
            names = dict.fromkeys(itertools.chain(*samples))
            found = {
                name: self._column(name, [sample.get(name) for sample in samples]) for name in names
            }
            return found | columns
        for name in self.fields:
            if name not in columns:
                values = [
                    _requested(sample, name, row) for sample, row in zip(samples, rows, strict=True)
                ]
                columns[name] = self._column(name, values)
        return tuple(columns[name] for name in self.fields)

    def _sample(
        self,
        row: Row,
        images: Images,
        columns: Container[str] = (),
        place: int = 0,
    ) -> Sample:
        """Return the fields of a sample that are not in ``columns``, with images as arrays."""
        _, prefix, number = row
        key = prefix.index.keys[number]
        sample: Sample = {"__key__": key}
        for name in dict.fromkeys((*prefix.streams, *prefix.fields)):
            if name in columns or not self._is_read(name):
                continue
            own = images.get(name)
            is_decoded = own is not None and own.decoded[place]
            value = own.value(place) if own and is_decoded else self._value(name, row)
            if value is not None:
                sample[name] = convert(name, value, key)
        return unfold(sample)

    def _is_read(self, field: str) -> bool:
        if self.fields is None or self.transform is not None:
            return True
        return field in self.fields or geometry_field(field) in self.fields

    def _value(self, name: str, row: Row) -> Any:
        """Return a field of a sample, decoding an image."""
        number, prefix, place = row
        image = self.image
        is_passthrough = name in prefix.passthrough_images
        if image is None or not (is_passthrough or name in prefix.streams):
            return prefix.value(place, name)

        def decode(pieces: list[memoryview]) -> Any:
            # All images of a sample share their random numbers, whichever fields are read, so that
            # an image and its mask are cropped alike.
            return image(pieces, draw_key(*self.key, number))

        value = prefix.value(place, name, decode)
        if not (is_passthrough and isinstance(value, bytes)):
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
            return torch.tensor(values)
        if last in CONVERSIONS or self.image is None:
            return values
        return stack_images(values, self.image)


def as_decoder(image: OneImage) -> ImageDecoder | None:
    """Return the decoder for an argument ``decoder=``.

    Raises:
        TypeError: It is neither a decoder, nor a size, nor ``None``.
    """
    if image is None or isinstance(image, ImageDecoder):
        return image
    sides: Sequence[Any] = image if isinstance(image, tuple | list) else (image,)
    if len(sides) not in (1, 2) or not all(is_integer(side) for side in sides):
        raise TypeError(
            "expected decoder to be an ImageDecoder, a size such as 224 or (height, width), or "
            f"None, got {image!r}; functions of your own go to transform="
        )
    return ImageDecoder((int(sides[0]), int(sides[-1])))


def _requested(sample: Sample, name: str, row: Row) -> Any:
    """Return a requested field; if it is absent, raise an error that tells why."""
    if name in sample:
        return sample[name]
    _, prefix, number = row
    first = dict(prefix.index.schema.late).get(name, 0)
    if first > check_scan(prefix.scan, prefix.index.num_groups, 0):
        shown = FULL if first > prefix.index.num_groups else first
        raise ScanUnavailable(
            f"field {name!r} is stored from scan {shown} on, asked for it at scan {prefix.scan}",
            url=prefix.shard.url,
        )
    whole = prefix.sample(number)
    raise KeyError(f"sample {whole['__key__']!r} has no field {name!r}, it has {', '.join(whole)}")
