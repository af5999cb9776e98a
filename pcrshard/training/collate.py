"""Samples in memory to a batch: decoded at once where that is possible, other fields converted."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

from .. import memory, native
from ..errors import FormatError
from ..format.names import JPEG_EXTENSIONS
from ..jpeg.crops import Draws
from ..jpeg.image_decoder import ImageDecoder
from ..jpeg.pixels import Pixels
from ..reading.prefix import Prefix, Sample

_INTEGERS = ("cls", "cls2", "index", "inx", "id")
_CONVERSIONS: dict[str, Callable[[bytes], Any]] = dict.fromkeys(_INTEGERS, int) | {
    "json": json.loads,
    "jsn": json.loads,
    "txt": bytes.decode,
    "text": bytes.decode,
    "transcript": bytes.decode,
}
Row = tuple[int, Prefix, int]
Key = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Collator:
    """Makes batches of (id, prefix, row) of their samples.

    Attributes:
        image: Decodes image fields; without it they stay bytes.
        fields: Makes batches tuples of these; by default they are dicts of all fields.
        transform: Called with each sample in place of the conversions here; torch collates what it returns.
        seed: Of the draws of crops, with the epoch and the sample's id.
    """

    image: ImageDecoder | None
    fields: tuple[str, ...] | None
    transform: Callable[[Sample], Any] | None
    seed: int

    def __call__(self, rows: list[Row], epoch: int) -> Any:
        """The batch of these rows in an epoch."""
        batch = self._image_batch(rows)
        keys = [(self.seed, epoch, number) for number, _, _ in rows]
        pixels = [None] * len(rows) if batch is None else list(batch.numpy())
        decoded = (
            [False] * len(rows) if batch is None else self._decode_batch(rows, keys, batch.numpy())
        )
        samples = []
        for (_, prefix, row), key, out, done in zip(rows, keys, pixels, decoded, strict=True):
            if done:
                sample = prefix.sample(row, select=self._select_others) | {prefix.streams[0]: out}
            else:
                decode = (
                    None if self.image is None else functools.partial(_decode, self.image, key, out)
                )
                sample = prefix.sample(row, select=self._select, decode=decode)
            samples.append(sample)
        if self.transform is not None:
            return default_collate([self.transform(sample) for sample in samples])
        names = self.fields or list(dict.fromkeys(name for sample in samples for name in sample))
        columns = {name: self._column(name, samples, batch) for name in names}
        return tuple(columns.values()) if self.fields else columns

    def _decode_batch(self, rows: list[Row], keys: list[Key], out: Pixels) -> list[bool]:
        """Decode at once what the native core can and what was checked; says which."""
        groups: dict[Prefix, tuple[list[int], list[int]]] = {}
        for i, (_, prefix, row) in enumerate(rows):
            at, of = groups.setdefault(prefix, ([], []))
            at.append(i)
            of.append(row)
        asked = self._select("", next(iter(groups)).streams[0])
        if (
            type(self.image) is not ImageDecoder or not native.available or not asked
        ):  # a subclass may do more
            return [False] * len(rows)
        # An empty stream is not decoded; that is for missing images, and for what the slow way has to check.
        table = native.empty_table(len(rows), max(prefix.num_scans for prefix in groups))
        sizes = np.ones((len(rows), 2), np.int64)
        for prefix, (at, of) in groups.items():
            if not prefix.check:
                table[at, : prefix.num_scans] = prefix.table[of]
                sizes[at] = np.maximum(prefix.index.dims[of, 0], 1)
        return self.image.decode_batch(table, sizes, [Draws(*key) for key in keys], out)

    def _image_batch(self, rows: list[Row]) -> torch.Tensor | None:
        """Memory that the images of a batch are decoded into, if they have one size and each sample has one image at most."""
        streams = {prefix.streams for _, prefix, _ in rows}
        if (
            self.image is None
            or self.image.shape is None
            or self.transform is not None
            or len({*itertools.chain(*streams)}) != 1
        ):
            return None
        channels = 3 if self.image.colour == "rgb" else 1
        height, width = self.image.shape
        shape = (
            len(rows),
            *(
                (channels, height, width)
                if self.image.layout == "chw"
                else (height, width, channels)
            ),
        )
        if get_worker_info() is None:
            return torch.from_numpy(memory.borrow_array(math.prod(shape))).view(shape)
        # A worker shares memory with the loader; torch would copy there what lies elsewhere. Its own collation does the same.
        storage = torch.UntypedStorage._new_shared(math.prod(shape))  # type: ignore[no-untyped-call]  # by torch
        return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)

    def _select(self, key: str, field: str) -> bool:
        return self.fields is None or self.transform is not None or field in self.fields

    def _select_others(self, key: str, field: str) -> bool:
        return self._select(key, field) and field.rpartition(".")[2] not in JPEG_EXTENSIONS

    def _column(self, name: str, samples: list[Sample], batch: torch.Tensor | None) -> Any:
        """The values of a field, by WebDataset's meaning of its last extension."""
        extension = name.rpartition(".")[2]
        missing = [sample["__key__"] for sample in samples if name not in sample]
        if missing and self.fields:
            raise KeyError(f"sample {missing[0]!r} has no field {name!r}")
        if self.image is not None and extension in JPEG_EXTENSIONS:
            if not missing and self.image.shape is not None:
                return (
                    torch.from_numpy(np.stack([sample[name] for sample in samples]))
                    if batch is None
                    else batch
                )
            return [
                torch.from_numpy(sample[name]) if name in sample else None for sample in samples
            ]
        convert = _CONVERSIONS.get(extension)
        values = [
            _convert(convert, name, sample) if convert and name in sample else sample.get(name)
            for sample in samples
        ]
        return torch.tensor(values) if extension in _INTEGERS and not missing else values


def _decode(image: ImageDecoder, key: Key, out: Pixels | None, pieces: list[memoryview]) -> Pixels:
    # The same draws for each image of a sample, whichever others are read: an image and its mask stay together.
    return image(pieces, Draws(*key), out)


def _convert(convert: Callable[[bytes], Any], name: str, sample: Sample) -> Any:
    try:
        return convert(sample[name])
    except ValueError as error:
        raise FormatError(f"field {name!r}: {error}", key=sample["__key__"]) from error
