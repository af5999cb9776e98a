"""Make batches of samples: one column per field, with images decoded together where possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate, default_convert

from ..errors import FormatError, PCRError, naming
from ..format.schema import IMAGE, Field
from ..format.shard_index import State
from ..jpeg.color_profiles import profile_mode
from ..jpeg.image_decoder import Decoded, ImageDecoder
from ..jpeg.views import Picture
from ..memory import borrow_array
from ..native.pieces import Table, empty_table, join
from ..native.pool import Pool, draw_key, draw_keys, own_pool
from ..reading.field_values import INTEGER_KINDS, convert
from ..reading.prefix import OnError, Prefix
from .sequence import Key
from .shard_set import Row
from .spatial import MASK, follow

Rows = list[Row]
# Values of each sample by field.
Columns = dict[str, list[Any]]
# A size stands for a decoder of whole images at that size.
ImageChoice = Annotated[
    ImageDecoder | int | tuple[int, int] | None,
    "an ImageDecoder, a size such as 224 or (height, width), or None; functions of images go to "
    "transform=",
]


# The key of a sample is a text, too.
_KEY = Field("__key__", "text")
# The unit of an image that a sample lacks.
_MISSING = -1
_PLAIN_KINDS = ("text", "json")
# torch does not annotate it.
_as_tensors: Callable[[Any], Any] = default_convert


@dataclass(frozen=True)
class Collator:
    """Makes batches from the (id, prefix, row) of their samples.

    Attributes:
        image: Decoder of image fields; ``None`` leaves them as bytes.
        fields: Fields of a batch, which is then a tuple; by default a batch is a dict of all
            fields.
        transform: Called with each sample, a tuple or dict as without it; torch collates the
            results.
        key: Seed and epoch, which together with a sample's id determine its crops and flips.
        on_error: Called with the error of a sample that cannot be read or decoded; if it returns
            True, the sample is replaced by the next good one of its shard.
    """

    image: ImageDecoder | None
    fields: Sequence[str] | None
    transform: Callable[[Any], Any] | None
    key: Key
    on_error: OnError | None = None

    @property
    def is_random(self) -> bool:
        """Whether crops or flips are drawn."""
        return self.image is not None and self.image.is_random

    def begin(self, rows: Rows, pool: Pool, pin: bool) -> Callable[[], Any]:
        """Start a batch of these rows.

        Args:
            rows: The samples.
            pool: Threads that decode in the background.
            pin: Whether to decode into pinned memory.

        Returns:
            A function that finishes the batch and returns it.
        """
        return partial(self._finish, rows, self._begin_images(rows, pool, pin))

    def one(self, row: Row) -> Any:
        """Return one sample: ``transform``'s result, or a tuple or dict with images as tensors."""
        return self._sample(self._all_columns([row]), 0, row)

    def _begin_images(self, rows: Rows, pool: Pool, pin: bool) -> dict[str, _Images]:
        """Start decoding the image fields."""
        if self.image is None:
            return {}
        streams = dict.fromkeys([stream for _, prefix, _ in rows for stream in prefix.streams])
        return {
            name: _Images.begin(rows, name, self.image, self.key, pool, pin)
            for name in filter(self._is_read, streams)
        }

    def _finish(self, rows: Rows, images: dict[str, _Images]) -> Any:
        columns = self._columns(rows, images)
        if self.transform is not None:
            _fill(columns, images)
            samples = [self._sample(columns, place, row) for place, row in enumerate(rows)]
            return default_collate(samples)
        # Fields of which each sample has one image stay the arrays of the pool.
        batch = {name: own.collated() for name, own in images.items() if own.is_complete}
        _fill(columns, {name: own for name, own in images.items() if name not in batch})
        for name, values in columns.items():
            found = len([value for value in values if value is not None])
            if name not in batch and (found == len(rows) or (found and self.fields is None)):
                schemas = [prefix.index.schema.by_name for _, prefix, _ in rows]
                fields = [schema[name] for schema in schemas if name in schema] or [_KEY]
                batch[name] = self._column(fields[0], values)
        return self._chosen(batch, rows)

    def _sample(self, columns: Columns, place: int, row: Row) -> Any:
        """Return a sample; see :meth:`one`."""
        sample = {
            name: values[place] for name, values in columns.items() if values[place] is not None
        }
        chosen = self._chosen(_as_tensors(sample), [row])
        if self.transform is None:
            return chosen
        with naming(row[1].shard.url, columns["__key__"][place], "transform"):
            return self.transform(chosen)

    def _chosen(self, found: dict[str, Any], rows: Rows) -> Any:
        """Return the requested fields of a sample or batch; an error if one is missing."""
        if self.fields is None:
            return found
        for name in self.fields:
            if name not in found:
                for _, prefix, row in rows:
                    sample = prefix.sample(row)
                    if name not in sample:
                        break
                raise KeyError(
                    f"sample {sample['__key__']!r} has no field {name!r} at scan {prefix.scan}, it "
                    f"has {', '.join(sample)}"
                )
        return tuple(found[name] for name in self.fields)

    def _all_columns(self, rows: Rows) -> Columns:
        """Return the value of each sample in each field, decoded now."""
        images = self._begin_images(rows, own_pool(), False)
        columns = self._columns(rows, images)
        _fill(columns, images)
        return columns

    def _columns(self, rows: Rows, images: dict[str, _Images]) -> Columns:
        """Return the value of each sample in each field; ``None`` if it lacks the field.

        Values that are decoded images are ``None``, too, and completed in ``images``.
        """
        columns: Columns = {"__key__": [prefix.index.keys[row] for _, prefix, row in rows]}
        replaced: dict[int, dict[str, Any]] = {}
        for name in dict.fromkeys([name for _, prefix, _ in rows for name in prefix.names]):
            if not self._is_read(name):
                continue
            own = images.get(name)
            values = columns[name] = [None] * len(rows)
            for place, row in enumerate(rows):
                if place in replaced:
                    continue
                try:
                    if own is None or not own.complete(place):
                        values[place] = self._value(name, row)
                except PCRError as error:
                    replaced[place] = self._instead(row, error)
        for place, found in replaced.items():
            for name, values in columns.items():
                values[place] = found.get(name)
                if name in images:
                    images[name].put(place, values[place])
        return columns

    def _instead(self, row: Row, error: PCRError) -> dict[str, Any]:
        """Return the values of the next good sample of the shard, with the crops of this one."""
        number, prefix, place = row
        count = prefix.index.num_samples
        if self.on_error is None or not self.on_error(error):
            raise error
        strict = replace(self, on_error=None)
        for other in range(place + 1, place + count):
            with suppress(PCRError):
                found = strict._all_columns([(number, prefix, other % count)])
                return {name: value for name, (value,) in found.items()}
        raise error

    def _is_read(self, field: str) -> bool:
        return self.fields is None or field in self.fields

    def _value(self, name: str, row: Row) -> Any:
        """Return a field of a sample that is no decoded image."""
        number, prefix, place = row
        if name not in prefix.names:
            return None
        index = prefix.index
        key, schema, image = index.keys[place], index.schema, self.image
        value = convert(schema.by_name[name], prefix.value(place, name), key)
        is_moved = value is not None and prefix.streams and name in schema.spatial
        if not is_moved or image is None or image.return_geometry:
            return value
        with naming(prefix.shard.url, key):
            units = [unit for own in prefix.streams for unit in prefix.units_of(place, own)][:1]
            [*size] = index.upright_dims[units].ravel().tolist()
            if not any(size):
                raise FormatError(f"field {name!r} needs the size of its picture, which is unknown")
            return follow(schema, name, value, image, size, draw_key(*self.key, number))

    def _column(self, field: Field, values: list[Any]) -> Any:
        """Collate the values of a field; missing ones are ``None``."""
        # Texts and values from JSON stay as they are.
        if field.kind in _PLAIN_KINDS or (field.is_image and self.image is None):
            return values
        is_sized = field.kind == IMAGE and self.image is not None and self.image.is_sized
        has_one_each = len(set(map(type, values))) == 1
        if has_one_each and field.kind == MASK and isinstance(values[0], np.ndarray):
            is_sized = len({(mask.shape, mask.dtype) for mask in values}) == 1
        if has_one_each and (is_sized or field.kind in INTEGER_KINDS):
            return default_collate(values)
        return values if field.kind in INTEGER_KINDS else _as_tensors(values)


def _fill(columns: Columns, images: dict[str, _Images]) -> None:
    """Put decoded images into the columns."""
    for name, own in images.items():
        for place, value in enumerate(columns[name]):
            if value is None:
                columns[name][place] = own.value(place)


@dataclass(frozen=True, eq=False)
class _Images:
    """The images of one field of a batch.

    Attributes:
        first: (samples + 1) positions at which each sample's images begin.
        is_there: Whether each sample has images, which are decoded.
        is_list: Whether the field is a list of images.
        decoded: The images, by position.
        arrays: Their pixels as tensors, (images, 3, H, W) or in the decoder's layout; per view
            (images, V, 3, H, W). None without a size.
    """

    first: list[int]
    is_there: list[bool]
    is_list: bool
    decoded: Decoded
    arrays: list[torch.Tensor] = dataclass_field(default_factory=list)

    @classmethod
    def begin(
        cls, rows: Rows, field: str, image: ImageDecoder, key: Key, pool: Pool, pin: bool
    ) -> _Images:
        """Start decoding an image field of a batch.

        Args:
            rows: The samples.
            field: Name of the field.
            image: The decoder.
            key: Seed and epoch of the random crops and flips.
            pool: Threads that decode, if the decoder has a size.
            pin: Whether to decode into pinned memory.
        """
        is_list = any(field in prefix.index.schema.lists for _, prefix, _ in rows)
        # The sample and the unit of each image. A missing image gets space, too.
        owners: Rows = []
        units: list[int] = []
        first, is_there = [0], []
        for row in rows:
            found = row[1].units_of(row[2], field)
            is_there.append(bool(found))
            units += found or ([] if is_list else [_MISSING])
            owners += [row] * (len(units) - first[-1])
            first.append(len(units))

        def alone(place: int) -> Any:
            number, prefix, row = owners[place]
            with naming(prefix.shard.url, prefix.index.keys[row], field):
                # All images of a sample share their random numbers, whichever fields are read, so
                # that an image and its mask are cropped alike.
                jpeg = prefix.without_metadata().image(units[place])
                return image(jpeg, draw_key(*key, number))

        def profile(place: int) -> bytes | None:
            return _rgb_profile(owners[place][1], units[place], image)

        images = cls(first, is_there, is_list, Decoded(image, alone))
        if image.is_pooled:
            # torch reuses pinned memory only after pending copies from it complete.
            images.arrays.extend(
                torch.empty(shape, dtype=torch.uint8, pin_memory=True)
                if pin
                else torch.from_numpy(borrow_array(*shape))
                for shape in image.batch_shapes(len(units))
            )
            arrays = [array.numpy() for array in images.arrays]
            table, orientations = _table(owners, units)
            batch = image.begin(
                pool,
                table,
                arrays,
                draw_keys(key, [number for number, _, _ in owners]),
                orientations=orientations,
                keep=owners,
            )
            images.decoded.add(batch, arrays, profile)
        return images

    def complete(self, place: int) -> bool:
        """See to it that a sample's images are decoded; False if it has none.

        Raises:
            PCRError: One cannot be decoded.
        """
        if self.is_there[place]:
            for each in range(*self.first[place : place + 2]):
                self.decoded.complete(each)
        return self.is_there[place]

    def put(self, place: int, value: Any) -> None:
        """Take the image, or whatever it is, of the sample that replaces another one."""
        is_image = self.arrays and not self.is_list and not isinstance(value, bytes | None)
        self.is_there[place] = bool(is_image)
        if is_image:
            self.decoded.put(self.first[place], value)

    @property
    def is_complete(self) -> bool:
        """Whether each sample has one image, which is in the arrays."""
        return bool(self.arrays) and not self.is_list and all(self.is_there)

    def collated(self) -> Any:
        """Return the images of the whole batch, if it is complete."""
        image, batch = self.decoded.image, self.decoded.batch
        pixels = self.arrays if image.views else self.arrays[0]
        if batch is None or not image.return_geometry:
            return pixels
        return Picture(pixels, _as_tensors(image.geometry(batch.boxes, batch.sizes)))

    def value(self, place: int) -> Any:
        """Return the decoded image, or list of images, of a sample; ``None`` if it has none."""
        if not self.is_there[place]:
            return None
        found = [self.decoded[each] for each in range(*self.first[place : place + 2])]
        return found if self.is_list else found[0]


def _table(owners: Rows, units: Sequence[int]) -> tuple[Table, NDArray[np.uint8]]:
    """Return the addresses and the orientations of images for the native core.

    An empty stream stands for a missing or damaged image and is not decoded.
    """
    # The places of each prefix's images, and their units.
    images: dict[Prefix, tuple[list[int], list[int]]] = {
        prefix: ([], []) for _, prefix, _ in owners
    }
    for place, ((_, prefix, _), unit) in enumerate(zip(owners, units, strict=True)):
        if unit != _MISSING:
            images[prefix][0].append(place)
            images[prefix][1].append(unit)
    tables = [prefix.table(own) for prefix, (_, own) in images.items()]
    whole = empty_table(len(units), max((own.shape[1] for own in tables), default=1))
    orientations = np.zeros(len(units), np.uint8)
    for table, (prefix, (places, own)) in zip(tables, images.items(), strict=True):
        whole[places, : table.shape[1]] = table
        orientations[places] = prefix.index.orientation[own]
    return whole, orientations


def _rgb_profile(prefix: Prefix, unit: int, image: ImageDecoder) -> bytes | None:
    """Return the profile of pixels that the pool decodes; ``None`` if it does not know it."""
    index = prefix.index
    if index.states[unit] >= State.WHOLE:  # the file itself has it
        return image.profile_of(join(prefix.table([unit])[0]).data)
    profile = index.profile(unit)
    return profile if profile_mode(profile) in ("", "RGB") else None
