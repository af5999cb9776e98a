"""Make a batch of samples: images decoded at once where possible, other fields converted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch.utils.data import default_collate

from ..arguments import is_integer
from ..errors import PCRError, ScanUnavailable
from ..format.scan import FULL, Scan, check_scan
from ..jpeg.image_decoder import ImageDecoder
from ..jpeg.views import geometry_field, unfold
from ..native.pool import Pool, draw_key
from ..reading.field_values import (
    CONVERSIONS,
    INTEGERS,
    Convert,
    convert,
    convert_all,
    extension,
)
from ..reading.prefix import Decode, Prefix, Sample
from .batch_images import (
    BatchMemory,
    FieldImages,
    as_tensors,
    begin_images,
    has_pictures,
    picture_column,
)
from .shard_set import Row

Key = tuple[int, int, int]
Rows = list[Row]
# The images of a batch, by field.
Images = dict[str, FieldImages]
# A size is a decoder of whole images.
OneImage = ImageDecoder | int | tuple[int, int] | None
ImageChoice = Annotated[
    OneImage | Callable[[int], OneImage],
    "an ImageDecoder, a size such as 224 or (height, width), a function of the epoch's number that "
    "returns one of them, or None; functions of images go to transform=",
]


@dataclass(frozen=True)
class Collator:
    """Makes batches of (id, prefix, row) of their samples.

    Attributes:
        image: Decodes image fields; without it they stay bytes.
        fields: Fields of a batch, which is then a tuple; by default a batch is a dict of all.
        transform: Called with each sample, whose images are arrays; torch collates what it returns.
        seed: Seed of the draws of crops, with the epoch and the sample's id.
        image_of: Tells the decoder of each epoch; ``image`` is that of epoch 0 then.
    """

    image: ImageDecoder | None
    fields: Sequence[str] | None
    transform: Callable[[Sample], Any] | None
    seed: int
    image_of: Callable[[int], OneImage] | None = None

    def of_epoch(self, epoch: int) -> Collator:
        """What makes the batches of an epoch."""
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
        """Begin the batch of these rows in an epoch.

        Args:
            rows: The samples, whose prefixes must be open until the batch is finished.
            epoch: Number of the epoch.
            pool: Decodes images meanwhile; see :meth:`open_pool`.
            target: Where images go.

        Returns:
            What finishes it, and returns it.
        """
        key = (self.seed, epoch)
        if self.transform is not None:
            target = BatchMemory()  # torch copies what a transform returns
        fields = self._image_fields(rows)
        images: Images = {}
        if self.image is not None and fields:
            images = begin_images(rows, fields, self.image, key, pool, target)
        return partial(self._finish, rows, key, images)

    def begin_scans(
        self,
        rows: Rows,
        scans: Sequence[Scan],
        epoch: int,
        pool: Pool | None,
    ) -> Callable[[], dict[Scan, Any]]:
        """Begin the batch of these rows at several scans."""
        begun = {}
        for scan in scans:
            lower = [(sample, prefix.at(scan), row) for sample, prefix, row in rows]
            begun[scan] = self.begin(lower, epoch, pool)
        return lambda: {scan: finish() for scan, finish in begun.items()}

    def one(self, row: Row, epoch: int = 0) -> Any:
        """One sample: what ``transform`` makes of it, or a tuple or dict with images as tensors."""
        sample = convert_all(self._sample(row, (self.seed, epoch)))
        if self.transform is not None:
            return self.transform(sample)
        self._check_fields([row], [sample], {})
        found = {
            name: as_tensors(value) if has_pictures(value) else value
            for name, value in sample.items()
        }
        return tuple(found[name] for name in self.fields) if self.fields else found

    def of_size(self, size: tuple[int, int]) -> Collator:
        """What makes batches of images of (height, width): boxes of that shape, at that size."""
        if self.image is None:
            return self
        height, width = size
        shape = (width / height, width / height)
        box: dict[str, Any] = {"crop": "random", "ratio": shape}
        if self.image.crop != "random":
            box["scale"] = (1.0, 1.0)  # the largest box of that shape, in the middle
        return replace(self, image=replace(self.image, size=size, **box))

    @property
    def is_upright(self) -> bool:
        """Whether images are turned upright; bytes are, by whoever decodes them."""
        return self.image is None or self.image.upright

    def open_pool(self, threads: int) -> AbstractContextManager[Pool | None]:
        """Threads that decode the images of batches; ``None`` where there is no plain decoder."""
        # A subclass may do more than decode.
        return Pool(threads) if type(self.image) is ImageDecoder else nullcontext()

    def _finish(
        self,
        rows: Rows,
        key: tuple[int, int],
        images: Images,
    ) -> Any:
        decoded = [field.decoded() for field in images.values()]
        done = list(map(all, zip(*decoded, strict=True))) if images else [False] * len(rows)
        # Where everything is decoded, nobody looks at the pixels of a sample.
        whole = all(done) and self.transform is None and not any(map(_is_list, images.values()))
        columns: dict[str, Any] = {}
        if whole:
            for name, field in images.items():
                columns |= {k: v for k, v in field.columns(name).items() if self._is_wanted(k)}
            samples = [prefix.other_fields(row, self._select) for _, prefix, row in rows]
        else:
            samples = self._samples(rows, key, images, done)
        if self.transform is not None:
            return default_collate([self.transform(convert_all(sample)) for sample in samples])
        return self._collate(rows, samples, columns, images)

    def _samples(
        self,
        rows: Rows,
        key: tuple[int, int],
        images: Images,
        done: list[bool],
    ) -> list[Sample]:
        """The samples of a batch; what the core could not decode is decoded here."""
        samples = []
        for position, row in enumerate(rows):
            if done[position]:
                samples.append(self._decoded(row, position, images))
                continue
            sample = self._sample(row, key)
            for name, field in images.items():
                field.put(position, sample.get(name))
            samples.append(sample)
        return samples

    def _collate(
        self,
        rows: Rows,
        samples: list[Sample],
        columns: dict[str, Any],
        images: Images,
    ) -> Any:
        """A batch of samples, and of columns that they do not hold."""
        self._check_fields(rows, samples, columns)
        names: Iterable[str] = itertools.chain(("__key__",), columns, *samples)
        batch = {
            name: columns[name]
            if name in columns
            else self._column(name, samples, images.get(name))
            for name in dict.fromkeys(self.fields or names)
        }
        return tuple(batch[name] for name in self.fields) if self.fields else batch

    def _decoded(
        self,
        row: Row,
        position: int,
        images: Images,
    ) -> Sample:
        """A sample whose images the native core has decoded."""
        _, prefix, place = row
        others = prefix.other_fields(place, self._select)
        pixels: Sample = {}
        for name, field in images.items():
            pixels |= field.of_sample(name, position)
        return {"__key__": others["__key__"], **pixels, **others}

    def _sample(self, row: Row, key: tuple[int, int]) -> Sample:
        """A sample with its images decoded here, one by one."""
        number, prefix, place = row
        decode: Decode | None = None
        if self.image is not None:
            decode = partial(_decode, self.image, (*key, number))
        sample = prefix.sample(place, select=self._select, decode=decode)
        if self.image is None or decode is None:
            return sample
        sample = _decode_kept(prefix, sample, decode)
        return unfold(sample) if self.image.return_geometry else sample

    def _image_fields(self, rows: Rows) -> list[str]:
        """The image fields of a batch whose images have one size."""
        if self.image is None or not self.image.is_sized:
            return []
        streams = dict.fromkeys(stream for _, prefix, _ in rows for stream in prefix.streams)
        return [stream for stream in streams if self._select("", stream)]

    def _select(self, key: str, field: str) -> bool:
        return self._is_wanted(field) or self._is_wanted(geometry_field(field))

    def _is_wanted(self, name: str) -> bool:
        return self.fields is None or self.transform is not None or name in self.fields

    def _check_fields(
        self,
        rows: Rows,
        samples: list[Sample],
        columns: dict[str, Any],
    ) -> None:
        """Name a field that is asked for and not there, and those that are."""
        wanted = [name for name in self.fields or () if name not in columns]
        for (_, prefix, place), sample in zip(rows, samples, strict=True):
            for name in wanted:
                if name not in sample:
                    _refuse_late(prefix, name)
                    there = ", ".join(prefix.sample(place))
                    raise KeyError(
                        f"sample {sample['__key__']!r} has no field {name!r}, it has {there}"
                    )

    def _column(
        self,
        name: str,
        samples: list[Sample],
        images: FieldImages | None,
    ) -> Any:
        """The values of a field, by WebDataset's meaning of its last extension."""
        missing = any(name not in sample for sample in samples)
        if images is not None and not (missing or images.is_list):
            return images.pixels
        values: list[Any] = [sample.get(name) for sample in samples]
        last = extension(name)
        if self.image is not None and last not in CONVERSIONS:
            pictures = picture_column(values, self.image)
            if pictures is not None:
                return pictures
        to_value = CONVERSIONS.get(last)
        if to_value is not None:
            values = _convert(to_value, name, samples)
        return torch.tensor(values) if last in INTEGERS and not missing else values


def make_collator(
    image: ImageChoice,
    fields: Sequence[str] | None,
    transform: Callable[[Sample], Any] | None,
    seed: int,
) -> Collator:
    """A collator of these fields, this transform and this seed.

    Raises:
        TypeError: ``image`` is neither a decoder, nor a size, nor ``None``, nor a function that
            gives such a thing for an epoch.
    """
    if isinstance(image, ImageDecoder) or not callable(image):
        return Collator(as_decoder(image), fields, transform, seed)
    return Collator(as_decoder(image(0)), fields, transform, seed, image)


def as_decoder(image: OneImage) -> ImageDecoder | None:
    """The decoder that ``decoder=`` stands for.

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


def _refuse_late(prefix: Prefix, name: str) -> None:
    """Say so where a field is missing because the scan is too low for it."""
    first = dict(prefix.index.schema.late).get(name, 0)
    if first > check_scan(prefix.scan, prefix.index.num_groups, 0):
        shown = FULL if first > prefix.index.num_groups else first
        raise ScanUnavailable(
            f"field {name!r} is stored from scan {shown} on, asked for it at scan {prefix.scan}",
            url=prefix.shard.url,
        )


def _decode_kept(
    prefix: Prefix,
    sample: Sample,
    decode: Decode,
) -> Sample:
    """A sample with the images decoded that are stored as files."""
    for field in prefix.kept_images & sample.keys():
        if isinstance(sample[field], bytes):
            try:
                sample[field] = decode([memoryview(sample[field])])
            except PCRError as error:
                key = sample["__key__"]
                raise type(error)(f"{field}: {error}", url=prefix.shard.url, key=key) from error
    return sample


def _decode(
    image: ImageDecoder,
    key: Key,
    pieces: list[memoryview],
) -> Any:
    # Each image of a sample has the same draws, whichever others are read: an image and its mask
    # are cropped alike.
    return image(pieces, draw_key(*key))


def _convert(
    to_value: Convert,
    name: str,
    samples: list[Sample],
) -> list[Any]:
    """The values of a field by a conversion; an error names the sample."""
    with suppress(KeyError, TypeError, ValueError, RecursionError):
        return [to_value(sample[name]) for sample in samples]
    return [convert(to_value, name, sample) for sample in samples]


def _is_list(images: FieldImages) -> bool:
    return images.is_list
