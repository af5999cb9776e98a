"""What is known of each picture of a dataset: from the index, and from a look at a low scan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from .. import storage
from ..cpus import usable_cpus
from ..errors import PCRError, TruncatedShard
from ..format.dataset_index import DatasetIndex
from ..format.scan import FULL
from ..format.scan_script import MAX_GROUPS
from ..format.shard_index import State
from ..jpeg.color_profiles import is_wide
from ..jpeg.image_decoder import ImageDecoder
from ..jpeg.pixels import decode_image
from ..jpeg.quality import estimate_quality
from ..native.pool import Pool
from ..reading.prefetch import prefetch
from ..reading.prefix import Prefix
from ..reading.shard import Shard

Ints = NDArray[np.int64]
Progress = Callable[[int, int], None]

# A difference hash compares the means of 8 x 9 parts, each of 4 x 4 pixels.
_PARTS = (8, 9)
_SIDE = 4
_THUMBNAIL = ImageDecoder((_PARTS[0] * _SIDE, _PARTS[1] * _SIDE), layout="hwc")
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)
# Largest difference between the channels of a gray picture; conversion rounds.
_GRAY = 3
# Images decoded at a time, which bounds the memory of their thumbnails.
_CHUNK = 1024
_PREFETCH = 2
# Labels that are no number of a class.
ABSENT = -1
ILLEGAL = -2


@dataclass(frozen=True)
class Part:
    """A dataset, or some samples of it, as part of a training or a validation set.

    Attributes:
        name: Its name in messages.
        split: Name of the set; parts of one set are trained on together.
        index: Its dataset index.
        shards: Its shards.
        ids: Numbers of its samples, ascending; ``None`` for all.
    """

    name: str
    split: str
    index: DatasetIndex
    shards: Sequence[Shard]
    ids: Ints | None = None

    @property
    def starts(self) -> Ints:
        """The number of each shard's first sample, (shards + 1,)."""
        return np.cumsum([0, *self.index.shards.num_samples])

    @property
    def num_samples(self) -> int:
        """Samples in the part."""
        return self.index.num_samples if self.ids is None else len(self.ids)


@dataclass
class Pictures:
    """The P pictures of a part that samples have, one row each.

    Attributes:
        sample: (P,) int64, number of its sample in the dataset.
        unit: (P,) int64, its unit in the shard.
        label: (P,) int64, class of its sample; :data:`ABSENT`, :data:`ILLEGAL`.
        sides: (P, 2) int64, height and width of the upright picture; 0 if unknown.
        quality: (P,) int64, JPEG quality of its quantization tables; 0 if unknown.
        hash: (P,) uint64, difference hash at the scan that was looked at.
        is_gray: (P,) bool, whether it has no color there.
        is_wide: (P,) bool, whether its ICC profile is not sRGB.
        is_broken: (P,) bool, whether no decoder can decode it there.
    """

    sample: Ints
    unit: Ints
    label: Ints
    sides: Ints
    quality: Ints
    hash: NDArray[np.uint64]
    is_gray: NDArray[np.bool_]
    is_wide: NDArray[np.bool_]
    is_broken: NDArray[np.bool_]

    def take(self, which: NDArray[np.bool_]) -> Pictures:
        """Return some of the pictures."""
        return Pictures(**{each.name: getattr(self, each.name)[which] for each in fields(self)})


def common_scan(parts: Sequence[Part]) -> int:
    """Return a scan at which the same picture has nearly the same hash in all parts.

    That is scan 1 if one script has made all of them; otherwise all scans are needed.
    """
    return 1 if len({part.index.schema.groups for part in parts}) == 1 else MAX_GROUPS


def look(part: Part, scan: int, progress: Progress) -> tuple[Pictures, list[PCRError]]:
    """Read a scan of a part, or plain tars, and decode it to thumbnails of 36 x 32 pixels.

    Reads each shard's prefix in one request (at scan 1 of the standard script about a tenth of the
    bytes), and takes about 0.3 ms of CPU time per picture at scan 1; files kept whole take a full
    decode.

    Args:
        part: The part.
        scan: From :func:`common_scan`; a part that holds fewer scans is read up to its highest.
        progress: Called with (samples, total samples) after each shard.

    Returns:
        Its pictures, and the errors of shards that cannot be read.
    """
    found: list[Pictures] = []
    errors: list[PCRError] = []
    starts = part.starts
    total = len(part.shards)
    top = part.index.at_most(scan)
    with Pool(usable_cpus()) as pool:
        loads = prefetch(
            range(total),
            lambda number, cancel: part.shards[number].load(top, cancel=cancel),
            depth=_PREFETCH,
        )
        for number, load in loads:
            try:
                prefix = load.result()
                _check_length(prefix.shard)
                found.append(_look_at(prefix, int(starts[number]), pool))
            except PCRError as error:
                errors.append(error)
            progress(int(starts[number + 1]), int(starts[-1]))
    columns = {
        each.name: np.concatenate([_none(each.name), *(getattr(own, each.name) for own in found)])
        for each in fields(Pictures)
    }
    pictures = Pictures(**columns)
    if part.ids is not None:
        pictures = pictures.take(np.isin(pictures.sample, part.ids))
    return pictures, errors


def _check_length(shard: Shard) -> None:
    """Check that a local shard was not truncated beyond the scan being read.

    Raises:
        TruncatedShard: It is shorter than the scans it is said to hold.
    """
    entry = shard.entry
    if entry is None or entry.index_url or not storage.is_local(shard.url):
        return
    stop = entry.prefix_stop(FULL if entry.scan is None else entry.scan)
    size = storage.file_bytes(shard.url)
    if size is not None and size < stop:
        raise TruncatedShard(f"expected {stop} bytes or more, the file has {size}", url=shard.url)


def _none(name: str) -> NDArray[np.generic]:
    """Return a column without pictures."""
    dtype = np.uint64 if name == "hash" else np.bool_ if name.startswith("is_") else np.int64
    return np.empty((0, 2) if name == "sides" else 0, dtype)


def _look_at(prefix: Prefix, start: int, pool: Pool) -> Pictures:
    """Return the pictures of a shard whose first sample has the number ``start``."""
    index = prefix.index
    units = np.flatnonzero(index.states != State.MISSING)
    owners = np.repeat(np.arange(index.num_samples), index.unit_counts.sum(axis=1))[units]
    wide = np.array([False, *map(is_wide, index.profiles)])
    hashes = np.zeros(len(units), np.uint64)
    is_gray = np.zeros(len(units), np.bool_)
    is_broken = np.zeros(len(units), np.bool_)
    for first in range(0, len(units), _CHUNK):
        part = slice(first, first + _CHUNK)
        small, is_broken[part] = _thumbnails(prefix, units[part].tolist(), pool)
        hashes[part] = difference_hashes(small)
        is_gray[part] = np.ptp(small, axis=-1).max(axis=(1, 2)) <= _GRAY
    return Pictures(
        sample=start + owners,
        unit=units,
        label=np.array(list(_labels(prefix)), np.int64)[owners],
        sides=index.upright_dims[units].astype(np.int64),
        quality=np.array([_quality(prefix, unit) for unit in units.tolist()], np.int64),
        hash=hashes,
        is_gray=is_gray & ~is_broken,
        is_wide=wide[index.profile_numbers[units]],
        is_broken=is_broken,
    )


def _labels(prefix: Prefix) -> Iterator[int]:
    for value in prefix.fields.get("cls", [None] * prefix.index.num_samples):
        if value is None:
            yield ABSENT
        else:
            yield int(value) if value.isdigit() and len(value) < 19 else ILLEGAL


def _quality(prefix: Prefix, unit: int) -> int:
    if prefix.index.states[unit] == State.UNDECODABLE or unit in prefix.damaged:
        return 0
    return estimate_quality(bytes(prefix.pieces(unit)[0])) or 0


def _thumbnails(
    prefix: Prefix, units: list[int], pool: Pool
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Return (len(units), H, W, 3) thumbnails, and which pictures cannot be decoded."""
    shape = _THUMBNAIL.batch_shapes(len(units))[0]
    small = np.zeros(shape, np.uint8)
    batch = _THUMBNAIL.begin(pool, prefix.table(units), [small], [0] * len(units), keep=prefix)
    is_broken = ~np.array(batch.wait(), np.bool_)
    for place in np.flatnonzero(is_broken).tolist():
        unit = units[place]
        if prefix.index.states[unit] == State.UNDECODABLE:
            continue
        with suppress(PCRError):
            small[place] = decode_image(prefix.pieces(unit), size=(shape[1], shape[2]))
            is_broken[place] = False
    return small, is_broken


def difference_hashes(pictures: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return a 64-bit difference hash of each (N, 32, 36, 3) thumbnail, (N,) uint64.

    A bit says whether one of 8 x 9 parts is brighter than the part to its left.
    """
    rows, columns = _PARTS
    luma = pictures.astype(np.float32) @ _LUMA
    means = luma.reshape(-1, rows, _SIDE, columns, _SIDE).mean(axis=(2, 4))
    bits = (np.diff(means, axis=2) > 0).reshape(len(pictures), rows * (columns - 1))
    return np.packbits(bits, axis=1).view(">u8").ravel().astype(np.uint64)
