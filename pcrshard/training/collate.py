"""Make batches of samples: one column per field, with images decoded together where possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, NoReturn

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
from .batch_images import BatchMemory, FieldImages, as_tensors, begin_field, stack_images
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
        target: BatchMemory = BatchMemory(),
    ) -> Callable[[], Any]:
        """Start a batch of these rows.

        Args:
            rows: The samples, whose prefixes must be open until the batch is finished.
            pool: Threads that decode in the background; see :meth:`open_pool`.
            target: Memory for the images.

        Returns:
            A function that finishes the batch and returns it.
        """
        images: Images = {}
        if pool is not None and self.image is not None and self.image.is_sized:
            if self.transform is not None:
                target = BatchMemory()  # torch copies a transform's results
            streams = dict.fromkeys(stream for _, prefix, _ in rows for stream in prefix.streams)
            images = {
                name: begin_field(rows, name, self.image, self.key, pool, target)
                for name in filter(self._is_read, streams)
            }
        return partial(self._finish, rows, images)

    def one(self, row: Row) -> Any:
        """Return one sample: ``transform``'s result, or a tuple or dict with images as tensors."""
        [sample] = self._samples([row], {})
        if self.transform is not None:
            return self.transform(sample)
        return self._chosen([row], {name: as_tensors(value) for name, value in sample.items()})

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
        if self.transform is not None:
            return default_collate(list(map(self.transform, self._samples(rows, images))))
        batch: dict[str, Any] = {}
        for name in self._names(rows):
            batch |= self._columns(name, rows, images)
        return self._chosen(rows, batch)

    def _names(self, rows: Rows) -> list[str]:
        """Return the fields to read for these samples."""
        prefixes = dict.fromkeys(prefix for _, prefix, _ in rows)
        streams = [name for prefix in prefixes for name in prefix.streams]
        others = [name for prefix in prefixes for name in prefix.fields]
        return list(filter(self._is_read, dict.fromkeys(("__key__", *streams, *others))))

    def _is_read(self, field: str) -> bool:
        return self._is_wanted(field) or self._is_wanted(geometry_field(field))

    def _is_wanted(self, name: str) -> bool:
        return self.fields is None or self.transform is not None or name in self.fields

    def _chosen(self, rows: Rows, found: dict[str, Any]) -> Any:
        """Select ``fields`` from a batch or a sample."""
        if self.fields is None:
            return found
        for name in self.fields:
            if name not in found:
                _refuse_missing(rows[0], name)
        return tuple(found[name] for name in self.fields)

    def _samples(self, rows: Rows, images: Images) -> list[Sample]:
        """Return the samples, with images as arrays."""
        columns: dict[str, list[Any]] = {}
        for name in self._names(rows):
            columns |= self._values(name, rows, images)
        return [
            {
                name: convert(name, own[place], prefix.index.keys[row])
                for name, own in columns.items()
                if own[place] is not None
            }
            for place, (_, prefix, row) in enumerate(rows)
        ]

    def _columns(self, name: str, rows: Rows, images: Images) -> dict[str, Any]:
        """Return the columns of a field and its geometry; empty if no sample has the field."""
        own = images.get(name)
        if own is not None and not own.is_list and all(own.decoded):
            columns = own.columns
        else:
            columns = {
                field: self._column(field, values, rows)
                for field, values in self._values(name, rows, images).items()
                if any(value is not None for value in values)
            }
        return {field: column for field, column in columns.items() if self._is_wanted(field)}

    def _values(self, name: str, rows: Rows, images: Images) -> dict[str, list[Any]]:
        """Return a field of each sample, ``None`` where absent, and the geometry of images."""
        own = images.get(name)
        values = [
            self._value(name, row) if own is None or not own.decoded[place] else own.value(place)
            for place, row in enumerate(rows)
        ]
        if self.image is None or not self.image.return_geometry:
            return {name: values}
        parts = [unfold({name: value}) for value in values]
        names = (name, geometry_field(name))
        return {field: [part.get(field) for part in parts] for field in names}

    def _value(self, name: str, row: Row) -> Any:
        """Return a field of a sample, decoding an image."""
        number, prefix, place = row
        if name == "__key__":
            return prefix.index.keys[place]
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

    def _column(self, name: str, values: list[Any], rows: Rows) -> Any:
        """Collate the values of a field by WebDataset's meaning of its last extension."""
        missing = [row for row, value in zip(rows, values, strict=True) if value is None]
        if missing and name in (self.fields or ()):
            _refuse_missing(missing[0], name)
        last = extension(name)
        if last in CONVERSIONS:
            keys = (prefix.index.keys[row] for _, prefix, row in rows)
            values = list(map(partial(convert, name), values, keys))
            return torch.tensor(values) if last in INTEGERS and not missing else values
        return values if self.image is None else stack_images(values, self.image)


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


def _refuse_missing(row: Row, name: str) -> NoReturn:
    """Raise an error that explains why a requested field is absent, or lists the present fields."""
    _, prefix, place = row
    first = dict(prefix.index.schema.late).get(name, 0)
    if first > check_scan(prefix.scan, prefix.index.num_groups, 0):
        shown = FULL if first > prefix.index.num_groups else first
        raise ScanUnavailable(
            f"field {name!r} is stored from scan {shown} on, asked for it at scan {prefix.scan}",
            url=prefix.shard.url,
        )
    sample = prefix.sample(place)
    raise KeyError(
        f"sample {sample['__key__']!r} has no field {name!r}, it has {', '.join(sample)}"
    )
