"""Make batches of samples: one column per field, with images decoded together where possible."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from torch.utils.data import default_collate, default_convert

from ..errors import FormatError, PCRError, naming
from ..format.schema import IMAGE, Field
from ..format.shard_index import State
from ..jpeg.color_profiles import profile_mode
from ..jpeg.image_decoder import ImageDecoder
from ..jpeg.views import Picture
from ..lazy import lazy
from ..memory import borrow_array
from ..native.pieces import empty_table, join
from ..native.pool import Batch, Pool, draw_key, draw_keys
from ..reading.field_values import INTEGER_KINDS, convert
from ..reading.prefix import OnError, Prefix
from .sequence import Key
from .shard_set import Row
from .spatial import MASK, Target, move

Rows = list[Row]
Prefixes = list[Prefix]
# Images of a batch by field.
Images = dict[str, "FieldImages"]
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
_PLAIN_KINDS = (*INTEGER_KINDS, "text", "json")
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

    def begin(
        self,
        rows: Rows,
        pool: Pool | None,
        pin: bool,
    ) -> Callable[[], Any]:
        """Start a batch of these rows.

        Args:
            rows: The samples.
            pool: Threads that decode in the background.
            pin: Whether to decode into pinned memory.

        Returns:
            A function that finishes the batch and returns it.
        """
        prefixes = list(dict.fromkeys(prefix for _, prefix, _ in rows))
        images: Images = {}
        # A subclass may override decoding.
        if pool is not None and type(self.image) is ImageDecoder and self.image.is_sized:
            streams = dict.fromkeys(stream for prefix in prefixes for stream in prefix.streams)
            images = {
                name: _begin_field(rows, prefixes, name, self.image, self.key, pool, pin)
                for name in filter(self._is_read, streams)
            }
        return partial(self._finish, rows, prefixes, images)

    @property
    def is_random(self) -> bool:
        """Whether crops or flips are drawn."""
        return self.image is not None and self.image.is_random

    def one(self, row: Row) -> Any:
        """Return one sample: ``transform``'s result, or a tuple or dict with images as tensors."""
        return self._sample(self._values([row], [row[1]], {}), 0, row)

    def _finish(self, rows: Rows, prefixes: Prefixes, images: Images) -> Any:
        columns = self._values(rows, prefixes, images)
        # Fields of which each sample has one image stay the arrays of the pool.
        batch = {name: own.collated() for name, own in images.items() if own.is_complete}
        for name, own in images.items():
            if self.transform is not None or name not in batch:
                columns[name] = list(map(own.value, range(len(rows))))
        if self.transform is not None:
            samples = [self._sample(columns, place, row) for place, row in enumerate(rows)]
            return default_collate(samples)
        for name, values in columns.items():
            found = sum(value is not None for value in values)
            if name not in batch and (found == len(rows) or (found and self.fields is None)):
                fields = (each.index.schema.by_name.get(name) for each in prefixes)
                batch[name] = self._column(next(filter(None, fields), _KEY), values)
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

    def _values(self, rows: Rows, prefixes: Prefixes, images: Images) -> Columns:
        """Return the value of each sample in each field, images as arrays.

        A sample that lacks a field has ``None``. Fields that the pool decodes are completed: images
        that it cannot decode, and those of samples that are replaced.
        """
        columns: Columns = {"__key__": [prefix.index.keys[row] for _, prefix, row in rows]}
        replaced: dict[int, dict[str, Any]] = {}
        for name in dict.fromkeys(name for prefix in prefixes for name in prefix.names):
            if not self._is_read(name):
                continue
            own = images.get(name)
            values: list[Any] = []
            for place, row in enumerate(rows):
                if place in replaced or (own and own.decoded[place]):
                    values.append(None)
                    continue
                try:
                    values.append(self._value(name, row))
                except PCRError as error:
                    replaced[place] = self._instead(row, error)
                    values.append(None)
                if own and place not in replaced:
                    own.put(place, values[-1])
            columns[name] = values
        for place, found in replaced.items():
            for name, values in columns.items():
                values[place] = found.get(name)
            for name, own in images.items():
                own.put(place, found.get(name))
        return columns

    def _instead(self, row: Row, error: PCRError) -> dict[str, Any]:
        """Return the values of the next good sample of the shard, with the crops of this one."""
        number, prefix, place = row
        count = prefix.index.num_samples
        if self.on_error is None or not self.on_error(error):
            raise error
        for other in range(place + 1, place + count):
            candidate = number, prefix, other % count
            with suppress(PCRError):
                found = replace(self, on_error=None)._values([candidate], [prefix], {})
                return {name: value for name, (value,) in found.items()}
        raise error

    def _is_read(self, field: str) -> bool:
        return self.fields is None or field in self.fields

    def _value(self, name: str, row: Row) -> Any:
        """Return a field of a sample, an image decoded."""
        number, prefix, place = row
        if name not in prefix.names:
            return None
        key = prefix.index.keys[place]
        image = self.image
        field = prefix.index.schema.by_name[name]
        if image is None or not field.is_image:
            value = convert(field, prefix.value(place, name), key)
            is_moved = value is not None and name in prefix.index.schema.spatial
            return self._moved(name, value, row) if is_moved else value
        if prefix.units_of(place, name):
            prefix = prefix.without_metadata()  # which a decoder does not need

        def decode(jpeg: bytes) -> Any:
            with naming(prefix.shard.url, key, name):
                # All images of a sample share their random numbers, whichever fields are read, so
                # that an image and its mask are cropped alike.
                return image(jpeg, draw_key(*self.key, number))

        value = prefix.value(place, name)
        if isinstance(value, list):
            return list(map(decode, value))
        return None if value is None else decode(value)

    def _moved(self, name: str, value: Any, row: Row) -> Any:
        """Return a spatial value in the crop of the sample's picture; with views, lists of lists.

        With ``return_geometry``, the caller moves it.
        """
        image = self.image
        number, prefix, place = row
        if image is None or image.return_geometry or not prefix.streams:
            return value
        if not image.upright:
            raise ValueError(
                f"expected an upright decoder, because field {name!r} follows the crop: use "
                "return_geometry=True and move it in transform="
            )
        index = prefix.index
        with naming(prefix.shard.url, index.keys[place]):
            units = [unit for own in prefix.streams for unit in prefix.units_of(place, own)][:1]
            [*size] = index.upright_dims[units].ravel().tolist()
            if not any(size):
                raise FormatError(f"field {name!r} needs the size of its picture, which is unknown")
            moved = [
                [move(index.schema, name, value, Target(*own, image.min_visible)) for own in view]
                for view in image.places(size, draw_key(*self.key, number))
            ]
            return moved if image.views else moved[0][0]

    def _column(self, field: Field, values: list[Any]) -> Any:
        """Collate the values of a field; missing ones are ``None``."""
        is_sized = field.kind == IMAGE and self.image is not None and self.image.is_sized
        has_one_each = len(set(map(type, values))) == 1
        if has_one_each and field.kind == MASK and isinstance(values[0], np.ndarray):
            is_sized = len({(mask.shape, mask.dtype) for mask in values}) == 1
        if has_one_each and (is_sized or field.kind in INTEGER_KINDS):
            return default_collate(values)
        # Texts and values from JSON stay as they are.
        return values if field.kind in _PLAIN_KINDS else _as_tensors(values)


@dataclass(frozen=True, eq=False)
class FieldImages:
    """The images of one field of a batch, decoded by the native core.

    Attributes:
        arrays: The pixels of all images, (images, 3, H, W) or in the decoder's layout; per view
            (images, V, 3, H, W).
        first: (samples + 1) positions in the arrays at which each sample's images begin.
        is_list: Whether the field is a list of images.
        image: The decoder.
        batch: The images in the pool.
        profiles: With the color ``srgb``, the RGB profile of each image, ``None`` if the pool's
            pixels cannot be converted.
        others: What the pool has not decoded, by sample.
    """

    arrays: list[torch.Tensor]
    first: list[int]
    is_list: bool
    image: ImageDecoder
    batch: Batch
    profiles: list[bytes | None]
    others: dict[int, Any] = dataclass_field(default_factory=dict)

    def collated(self) -> Any:
        """Return the images of the whole batch, if it is complete."""
        image = self.image
        pixels = self.arrays if image.views else self.arrays[0]
        if not image.return_geometry:
            return pixels
        return Picture(pixels, _as_tensors(image.geometry(self.batch.boxes, self.batch.sizes)))

    @lazy
    def decoded(self) -> list[bool]:
        """For each sample, whether all of its images were decoded; waits for the decoding."""
        each = list(self.batch.wait())
        arrays = [array.numpy() for array in self.arrays]
        for place, profile in enumerate(self.profiles):
            if profile is None:
                each[place] = False
            elif each[place]:
                self.image.convert(arrays, place, profile)
        return [all(each[start:stop]) for start, stop in itertools.pairwise(self.first)]

    def put(self, position: int, value: Any) -> None:
        """Set what the pool has not decoded: the image or images of a sample, or ``None``."""
        self.others[position] = value
        if value is None or self.is_list or isinstance(value, bytes):
            return
        pixels, geometry = value if self.image.return_geometry else (value, None)
        for array, own in zip(self.arrays, pixels if self.image.views else [pixels], strict=True):
            array[self.first[position]] = torch.from_numpy(own)
        if geometry is not None:
            parts = geometry if self.image.views else [geometry]
            place, sizes, boxes = self.first[position], self.batch.sizes, self.batch.boxes
            sizes[place] = parts[0].size.reshape(-1, 2)[0]
            boxes[place, :, :4] = np.concatenate([part.crop.reshape(-1, 4) for part in parts])
            boxes[place, :, 4] = np.concatenate([part.flipped.reshape(-1) for part in parts])

    @property
    def is_complete(self) -> bool:
        """Whether each sample has one image, which is in the arrays."""
        others = self.others.values()
        return not (self.is_list or any(each is None or isinstance(each, bytes) for each in others))

    def value(self, position: int) -> Any:
        """Return the decoded image, or list of images, of a sample."""
        if position in self.others:
            return self.others[position]
        places = range(*self.first[position : position + 2])
        arrays = [array.numpy() for array in self.arrays]
        images = [self.image.decoded(arrays, self.batch, place) for place in places]
        return images if self.is_list else images[0]


def _begin_field(
    rows: Rows,
    prefixes: Prefixes,
    field: str,
    image: ImageDecoder,
    key: Key,
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
    is_list = any(field in prefix.index.schema.lists for prefix in prefixes)
    ids: list[int] = []
    first = [0]
    for sample, prefix, row in rows:
        places, units = images[prefix]
        found = prefix.units_of(row, field)
        for unit in found:
            places.append(len(ids))
            units.append(unit)
            ids.append(sample)
        if not found and not is_list:
            ids.append(sample)  # a missing image gets space, too
        first.append(len(ids))
    # An empty stream stands for a missing or damaged image and is not decoded.
    tables = [prefix.table(units) for prefix, (_, units) in images.items()]
    table = empty_table(len(ids), max(own.shape[1] for own in tables))
    orientations = np.zeros(len(ids), np.uint8)
    profiles: list[bytes | None] = [b""] * len(ids) if image.color == "srgb" else []
    for own, (prefix, (places, units)) in zip(tables, images.items(), strict=True):
        table[places, : own.shape[1]] = own
        orientations[places] = prefix.index.orientation[units]
        if profiles:
            for place, unit in zip(places, units, strict=True):
                profiles[place] = _rgb_profile(prefix, unit, image)
    # torch reuses pinned memory only after pending copies from it complete.
    arrays = [
        torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        if pin
        else torch.from_numpy(borrow_array(*shape))
        for shape in image.batch_shapes(len(ids))
    ]
    batch = image.begin(
        pool,
        table,
        [array.numpy() for array in arrays],
        draw_keys(key, ids),
        orientations=orientations,
        keep=prefixes,
    )
    return FieldImages(arrays, first, is_list, image, batch, profiles)


def _rgb_profile(prefix: Prefix, unit: int, image: ImageDecoder) -> bytes | None:
    """Return the profile of pixels that the pool decodes; ``None`` if it does not know it."""
    index = prefix.index
    if index.states[unit] >= State.WHOLE:  # the file itself has it
        return image.profile_of(join(prefix.table([unit])[0]).data)
    profile = index.profile(unit)
    return profile if profile_mode(profile) in ("", "RGB") else None
