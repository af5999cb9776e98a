"""Make a batch of samples: images decoded at once where possible, other fields converted."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

from .. import memory, native
from ..errors import PCRError, ScanUnavailable
from ..format.names import JPEG_EXTENSIONS
from ..format.scan import FULL, check_scan, is_integer
from ..jpeg.crops import Draws
from ..jpeg.image_decoder import ImageDecoder
from ..jpeg.pixels import Pixels
from ..reading.field_values import CONVERSIONS, INTEGERS, Convert, convert, extension
from ..reading.prefix import Decode, Prefix, Sample
from .shard_set import Row

Key = tuple[int, int, int]
Rows = list[Row]
# Positions in a batch.
Positions = dict[Prefix, list[int]]
# A size is a decoder of whole images.
ImageChoice = ImageDecoder | int | tuple[int, int] | None


@dataclass(frozen=True)
class Collator:
    """Makes batches of (id, prefix, row) of their samples.

    Attributes:
        image: Decodes image fields; without it they stay bytes.
        fields: Fields of a batch, which is then a tuple; by default a batch is a dict of all.
        transform: Called with each sample in place of the conversions here; torch collates what it
            returns.
        seed: Seed of the draws of crops, with the epoch and the sample's id.
    """

    image: ImageDecoder | None
    fields: Sequence[str] | None
    transform: Callable[[Sample], Any] | None
    seed: int

    def __post_init__(self) -> None:
        if isinstance(self.fields, str):
            raise TypeError(
                f"expected a sequence of field names, got {self.fields!r}; write ({self.fields!r},)"
            )

    def __call__(self, rows: Rows, epoch: int) -> Any:
        """The batch of these rows in an epoch."""
        keys = [(self.seed, epoch, number) for number, _, _ in rows]
        batch = self._image_batch(rows)
        decoded = [False] * len(rows)
        out: Iterable[Pixels | None] = [None] * len(rows)
        if batch is not None:
            out = batch.numpy()
            decoded = self._decode_batch(rows, keys, batch.numpy())
        samples = list(map(self._sample, rows, keys, out, decoded))

        if self.transform is not None:
            return default_collate([self.transform(sample) for sample in samples])
        self._check_fields(rows, samples)
        names = self.fields or dict.fromkeys(name for sample in samples for name in sample)
        columns = {name: self._column(name, samples, batch) for name in names}
        return tuple(columns.values()) if self.fields else columns

    def _sample(
        self,
        row: Row,
        key: Key,
        out: Pixels | None,
        decoded: bool,
    ) -> Sample:
        """A sample with its images decoded, into ``out`` if given, unless that was done."""
        _, prefix, place = row
        if decoded:
            return prefix.sample(place, select=self._select_others) | {prefix.streams[0]: out}
        decode: Decode | None = None
        if self.image is not None:
            decode = partial(_decode, self.image, key, out)
        sample = prefix.sample(place, select=self._select, decode=decode)
        return sample if decode is None else _decode_kept(prefix, sample, decode)

    def _decode_batch(
        self,
        rows: Rows,
        keys: list[Key],
        out: Pixels,
    ) -> list[bool]:
        """Decode at once what the native core can; says which."""
        # A subclass may do more than decode.
        if type(self.image) is not ImageDecoder or not native.available:
            return [False] * len(rows)

        # An empty stream is not decoded: an image that is missing or damaged.
        table = native.empty_table(len(rows), 1)
        sizes = np.ones((len(rows), 2), np.int64)
        for prefix, at in _by_prefix(rows).items():
            places = [rows[position][2] for position in at]
            table[at] = prefix.table(places)
            sizes[at] = np.maximum(prefix.index.dims[places], 1)
        return self.image.decode_batch(table, sizes, list(itertools.starmap(Draws, keys)), out)

    def _image_batch(self, rows: Rows) -> torch.Tensor | None:
        """Memory for the images of a batch, if all have one size and a sample has one at most."""
        image = self.image
        streams = {stream for _, prefix, _ in rows for stream in prefix.streams}
        if image is None or image.shape is None or self.transform:
            return None
        alone = len(streams) == 1 and all(prefix.has_one_image for _, prefix, _ in rows)
        if not alone or not self._select("", *streams):
            return None
        shape = image.batch_shape(len(rows))
        if get_worker_info() is None:
            return torch.from_numpy(memory.borrow_array(math.prod(shape))).view(shape)
        # A worker shares memory with the loader, and torch would copy there what lies elsewhere.
        # torch's own collation does the same.
        new_shared: Any = torch.UntypedStorage._new_shared
        storage = new_shared(math.prod(shape))
        return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)

    def _select(self, key: str, field: str) -> bool:
        return self.fields is None or self.transform is not None or field in self.fields

    def _select_others(self, key: str, field: str) -> bool:
        return self._select(key, field) and extension(field) not in JPEG_EXTENSIONS

    def _check_fields(self, rows: Rows, samples: list[Sample]) -> None:
        """Name a field that is asked for and not there, and those that are."""
        for (_, prefix, place), sample in zip(rows, samples, strict=True):
            for name in self.fields or ():
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
        batch: torch.Tensor | None,
    ) -> Any:
        """The values of a field, by WebDataset's meaning of its last extension."""
        missing = any(name not in sample for sample in samples)
        last = extension(name)
        value = samples[0].get(name)
        is_image = last in JPEG_EXTENSIONS or isinstance(value, np.ndarray)
        image = self.image if is_image else None
        if image and batch is not None and not missing:
            return batch
        to_value: Convert | None = torch.from_numpy if image else CONVERSIONS.get(last)
        values = [convert(to_value, name, sample) for sample in samples]
        if missing:
            return values
        if image and image.shape and not isinstance(value, list):
            return torch.stack(values)
        return torch.tensor(values) if last in INTEGERS else values


def as_decoder(image: ImageChoice) -> ImageDecoder | None:
    """The decoder that ``image=`` stands for.

    Raises:
        TypeError: It is neither a decoder, nor a size, nor ``None``.
    """
    if image is None or isinstance(image, ImageDecoder):
        return image
    sides: Sequence[Any] = image if isinstance(image, tuple | list) else (image,)
    if len(sides) not in (1, 2) or not all(is_integer(side) for side in sides):
        raise TypeError(
            "expected image to be an ImageDecoder, a size such as 224 or (height, width), or None, "
            f"got {image!r}; functions of your own go to transform="
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


def _by_prefix(rows: Rows) -> Positions:
    """The positions in a batch of each prefix's samples."""
    groups = collections.defaultdict(list)
    for position, (_, prefix, _) in enumerate(rows):
        groups[prefix].append(position)
    return groups


def _decode(
    image: ImageDecoder,
    key: Key,
    out: Pixels | None,
    pieces: list[memoryview],
) -> Pixels:
    # Each image of a sample has the same draws, whichever others are read: an image and its mask
    # are cropped alike.
    return image(pieces, Draws(*key), out)
