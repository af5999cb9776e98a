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
from ..format.scan import FULL, Scan, check_scan
from ..jpeg.image_decoder import ImageDecoder
from ..jpeg.views import geometry_field, unfold
from ..native.pool import Pool, draw_key
from ..reading.field_values import CONVERSIONS, INTEGERS, convert, extension
from ..reading.prefix import Sample
from .batch_images import BatchMemory, FieldImages, as_tensors, begin_field, picture_column
from .shard_set import Row

# Seed and epoch.
Key = tuple[int, int]
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
        seed: Seed of crops and flips, combined with the epoch and the sample's id.
        image_of: Function from an epoch's number to its decoder; ``image`` is then the decoder of
            epoch 0.
    """

    image: ImageDecoder | None
    fields: Sequence[str] | None
    transform: Callable[[Sample], Any] | None
    seed: int
    image_of: Callable[[int], OneImage] | None = None

    def of_epoch(self, epoch: int) -> Collator:
        """Return the collator of an epoch."""
        if self.image_of is None:
            return self
        return replace(self, image=as_decoder(self.image_of(epoch)), image_of=None)

    def begin(
        self,
        rows: Rows,
        epoch: int,
        pool: Pool | None = None,
        target: BatchMemory = BatchMemory(),
    ) -> Callable[[], Any]:
        """Start a batch of these rows.

        Args:
            rows: The samples, whose prefixes must be open until the batch is finished.
            epoch: Number of the epoch.
            pool: Threads that decode in the background; see :meth:`open_pool`.
            target: Memory for the images.

        Returns:
            A function that finishes the batch and returns it.
        """
        key = (self.seed, epoch)
        images: Images = {}
        if pool is not None and self.image is not None and self.image.is_sized:
            if self.transform is not None:
                target = BatchMemory()  # torch copies a transform's results
            streams = dict.fromkeys(stream for _, prefix, _ in rows for stream in prefix.streams)
            images = {
                name: begin_field(rows, name, self.image, key, pool, target)
                for name in filter(self._is_read, streams)
            }
        return partial(self._finish, rows, key, images)

    def begin_scans(
        self,
        rows: Rows,
        scans: Sequence[Scan],
        epoch: int,
        pool: Pool | None,
    ) -> Callable[[], dict[Scan, Any]]:
        """Start a batch of these rows at several scans."""
        begun = {}
        for scan in scans:
            lower = [(sample, prefix.at(scan), row) for sample, prefix, row in rows]
            begun[scan] = self.begin(lower, epoch, pool)
        return lambda: {scan: finish() for scan, finish in begun.items()}

    def one(self, row: Row, epoch: int = 0) -> Any:
        """Return one sample: ``transform``'s result, or a tuple or dict with images as tensors."""
        [sample] = self._samples([row], (self.seed, epoch), {})
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

    def _finish(self, rows: Rows, key: Key, images: Images) -> Any:
        if self.transform is not None:
            return default_collate(list(map(self.transform, self._samples(rows, key, images))))
        batch: dict[str, Any] = {}
        for name in self._names(rows):
            batch |= self._columns(name, rows, key, images.get(name))
        return self._chosen(rows, batch)

    def _names(self, rows: Rows) -> list[str]:
        """Return the fields to read for these samples."""
        prefixes = dict.fromkeys(prefix for _, prefix, _ in rows)
        found = dict.fromkeys(("__key__",))
        for prefix in prefixes:
            found |= dict.fromkeys(prefix.streams)
        for prefix in prefixes:
            found |= dict.fromkeys(prefix.fields)
        return list(filter(self._is_read, found))

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

    def _samples(self, rows: Rows, key: Key, images: Images) -> list[Sample]:
        """Return the samples, with images as arrays."""
        columns: dict[str, list[Any]] = {}
        for name in self._names(rows):
            columns |= self._values(name, rows, key, images.get(name))
        return [
            {
                name: convert(name, own[place], prefix.index.keys[row])
                for name, own in columns.items()
                if own[place] is not None
            }
            for place, (_, prefix, row) in enumerate(rows)
        ]

    def _values(
        self, name: str, rows: Rows, key: Key, images: FieldImages | None
    ) -> dict[str, list[Any]]:
        """Return a field of each sample, ``None`` where absent, and the geometry of images."""
        if images is None:
            values = [self._value(name, row, key) for row in rows]
        else:
            values = []
            for place, is_decoded in enumerate(images.decoded):
                if is_decoded:
                    values.append(images.value(place))
                else:
                    values.append(self._value(name, rows[place], key))
                    images.put(place, values[-1])
        if self.image is None or not self.image.return_geometry:
            return {name: values}
        parts = [unfold({name: value}) for value in values]
        names = (name, geometry_field(name))
        return {field: [part.get(field) for part in parts] for field in names}

    def _value(self, name: str, row: Row, key: Key) -> Any:
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
            return image(pieces, draw_key(*key, number))

        value = prefix.value(place, name, decode)
        if not (is_passthrough and isinstance(value, bytes)):
            return value
        try:
            return decode([memoryview(value)])
        except PCRError as error:
            key_of = prefix.index.keys[place]
            raise type(error)(f"{name}: {error}", url=prefix.shard.url, key=key_of) from error

    def _columns(
        self, name: str, rows: Rows, key: Key, images: FieldImages | None
    ) -> dict[str, Any]:
        """Return the columns of a field and its geometry; empty if no sample has the field."""
        columns: dict[str, Any]
        if images is not None and not images.is_list and all(images.decoded):
            columns = images.columns
        else:
            columns = {
                field: self._column(field, values, rows, images if field == name else None)
                for field, values in self._values(name, rows, key, images).items()
                if any(value is not None for value in values)
            }
        return {field: column for field, column in columns.items() if self._is_wanted(field)}

    def _column(self, name: str, values: list[Any], rows: Rows, images: FieldImages | None) -> Any:
        """Collate the values of a field by WebDataset's meaning of its last extension."""
        missing = [row for row, value in zip(rows, values, strict=True) if value is None]
        if missing and self.fields is not None and name in self.fields:
            _refuse_missing(missing[0], name)
        if images is not None and not missing and not images.is_list:
            return images.pixels
        last = extension(name)
        if self.image is not None and last not in CONVERSIONS:
            pictures = picture_column(values, self.image)
            if pictures is not None:
                return pictures
        if last in CONVERSIONS:
            keys = (prefix.index.keys[row] for _, prefix, row in rows)
            values = list(map(partial(convert, name), values, keys))
        return torch.tensor(values) if last in INTEGERS and not missing else values


def make_collator(
    image: ImageChoice,
    fields: Sequence[str] | None,
    transform: Callable[[Sample], Any] | None,
    seed: int,
) -> Collator:
    """Return a collator of these fields, this transform and this seed.

    Raises:
        TypeError: ``image`` is neither a decoder, nor a size, nor ``None``, nor a function from an
            epoch's number to one of these.
    """
    if isinstance(image, ImageDecoder) or not callable(image):
        return Collator(as_decoder(image), fields, transform, seed)
    return Collator(as_decoder(image(0)), fields, transform, seed, image)


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
