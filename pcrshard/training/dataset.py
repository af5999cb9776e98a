"""``PCRDataset``: random access to the samples of a dataset, by number or key."""

from __future__ import annotations

import copy
import itertools
import math
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from .. import storage
from ..arguments import ByteSize, Natural, checked, num_bytes
from ..checking.check import CheckReport, check_parts
from ..checking.pictures import Part
from ..checksum import crc32c
from ..errors import FormatError, StorageError
from ..format.sample_columns import UNDECODABLE
from ..format.scan import FULL, Scan
from ..format.schema import Field
from ..jpeg.image_decoder import ImageDecoder
from ..lazy import lazy
from ..reading.field_values import convert
from ..reading.options import ReadOptions
from ..reading.prefix_cache import CacheStats
from ..reading.scan_level import ScanOrFraction, current_scan, highest_scan
from ..redaction import redact_url
from ..storage.retry import Retry
from .bad_samples import BadSamples, OnError, report
from .collate import Collator, ImageChoice
from .mixture import share_out
from .sequence import SPLIT, Ints, Rules, random_words
from .shard_set import RecentPrefixes, ShardSet
from .spatial import check_kinds

_LABEL = Field("cls", "class")


class PCRDataset(Dataset[Any]):
    """A map-style torch dataset of the samples of a PCR dataset, by number or key.

    It keeps no position. :class:`PCRLoader` makes batches from it, shard by shard, in an exact and
    resumable order. Any ``torch.utils.data.DataLoader`` with any sampler works too, by random
    access: recently used prefixes stay in memory.

    Args:
        urls: Dataset folder or its ``pcr.json``, or several of them; local paths or any fsspec
            URLs. Opening costs one request each. Or some shards of a folder, as a brace pattern
            (``"shards/data-{000000..000003}.tar"``) or a list; without a ``pcr.json`` next to them
            they cost one small request each, and the classes have no names.
        scan: Highest scan to read, 1-based; ``"full"``; 0 for labels without pixels; a fraction in
            (0, 1) for the highest scan that takes at most this fraction of the full bytes; or a
            :class:`ScanLevel`, which is consulted at each shard.
        quality: Least mean MS-SSIM, such as 0.95, in place of a scan: of each dataset, the lowest
            scan that has it by the estimate in its ``pcr.json``. So datasets that are encoded
            differently can be mixed.
        decoder: Decoder of image fields; by default they stay JPEG bytes. A size, such as 224 or
            (height, width), stands for ``ImageDecoder(size)``: the whole image at that size,
            without crop or flip. Each epoch uses the decoder that the attribute has when it
            begins.
        fields: Fields of a sample, which is then a tuple; by default a sample is a dict of all
            fields.
        transform: Called with each sample, exactly as it is without ``transform``: a dict, or a
            tuple of ``fields``, whose images are uint8 tensors if ``decoder`` is given.
        on_error: What happens to a sample that cannot be read or decoded. "raise" raises its error.
            "replace" takes the next good sample of its shard, and for a whole shard the next one
            that can be read, so that batches keep their shapes and their order, on all ranks; each
            is logged once and listed in ``PCRLoader.stats()``. If that happens to more than a
            quarter of an epoch, the error is raised. A function is called with each error and
            returns whether to replace the sample.
        cache_dir: Local folder that caches the prefixes read.
        cache_bytes: Upper bound of that folder, in bytes, or a size such as ``"50GB"``.
        storage_options: fsspec storage options.
        retry: Retry policy for failed requests.
        held_bytes: Upper bound of the memory of the prefixes that random access keeps, per process,
            written like ``cache_bytes``.

    Attributes:
        classes: Names of the classes, indexed by ``cls``.
        num_classes: The number of classes, of several datasets the largest; 0 if the dataset index
            does not tell.

    Raises:
        ScanUnavailable: The dataset has no such scan.
        StorageError: The dataset does not exist or cannot be read.
        TypeError: An argument is unknown or of another type.
        ValueError: An argument is out of range, or the datasets name different classes.
    """

    @checked(
        batch_size="PCRLoader(dataset, batch_size)",
        shuffle="PCRLoader(dataset, batch_size, shuffle=)",
    )
    def __init__(
        self,
        urls: storage.Urls,
        *,
        scan: ScanOrFraction = FULL,
        quality: float | None = None,
        decoder: ImageChoice = None,
        fields: Sequence[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        on_error: OnError = "raise",
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: ByteSize | None = None,
        storage_options: storage.Options = None,
        retry: Retry | None = None,
        held_bytes: ByteSize = 1 << 29,
    ) -> None:
        options = ReadOptions(
            storage_options=storage_options,
            retry=retry,
            cache_dir=cache_dir,
            cache_bytes=cache_bytes,
        )
        self.shards = ShardSet(urls, options)
        self.classes = self.shards.classes
        self.num_classes = self.shards.num_classes
        self.scan = self.shards.check_scan(scan, fields, quality)
        self.decoder = decoder
        # The last decoder that stood for a size.
        self._sized: tuple[ImageChoice, ImageDecoder | None] = (None, None)
        self.fields = fields
        self.transform = transform
        self.on_error = on_error
        self._replaced: dict[str, str] = {}
        # Ids of the samples of a subset, ascending; ``None`` for all of them.
        self._ids: Ints | None = None
        self._recent = RecentPrefixes(self.shards, num_bytes("held_bytes", held_bytes))
        self.collator(0)  # validates the decoder and the fields

    def collator(self, seed: int, epoch: int = 0, bad: BadSamples | None = None) -> Collator:
        """Return the collator of an epoch's rows; crops and flips are drawn from this seed."""
        choice = self.decoder
        if choice is None or isinstance(choice, ImageDecoder):
            image = choice
        else:
            if choice is not self._sized[0]:
                self._sized = choice, ImageDecoder(choice)
            image = self._sized[1]
        if image is not None and image.is_random and not image.return_geometry:
            check_kinds(self.shards.schemas, self.fields)
        return Collator(image, self.fields, self.transform, (seed, epoch), bad)

    @property
    def num_samples(self) -> int:
        """The number of samples of this dataset or subset."""
        return int(self.shards.starts[-1]) if self._ids is None else len(self._ids)

    @property
    def ids(self) -> Ints:
        """The number of each sample in the whole dataset, ascending, (len,) int64."""
        return np.arange(len(self)) if self._ids is None else self._ids

    def ids_of(self, numbers: Ints) -> Ints:
        """Return the numbers in the whole dataset of (n,) samples, ``0 <= number < len``."""
        return numbers if self._ids is None else self._ids[numbers]

    @property
    def max_scan(self) -> Scan:
        """The highest readable scan: ``"full"``, or for a staged copy the highest it holds."""
        return highest_scan(self.shards.entries)

    def cache_stats(self) -> CacheStats:
        """Return the bytes read from ``cache_dir`` and the bytes fetched, including workers."""
        cache = self.shards.options.cache
        return CacheStats(0, 0) if cache is None else cache.stats

    @lazy
    def keys(self) -> tuple[str, ...]:
        """The key of each sample. Reads the index of each shard once, in parallel."""
        found = self.shards.metadata.keys
        return tuple(found) if self._ids is None else tuple(found[each] for each in self._ids)

    @lazy
    def labels(self) -> Ints:
        """The ``cls`` of each sample, (N,) int64. Costs one request for a whole dataset.

        Raises:
            ValueError: A sample has no integer ``cls``.
        """
        labels = self.shards.labels.take(self.ids)
        if (labels >= 0).all():
            return labels.astype(np.int64)
        keys, found, _ = self.shards.metadata
        expected = "expected an integer cls in each sample, or split(stratify=False)"
        missing = next((keys[each] for each in self.ids if found[each] is None), None)
        if missing is not None:
            raise ValueError(f"{expected}: no label (key={missing})")
        try:
            numbers = [convert(_LABEL, found[each], keys[each]) for each in self.ids]
        except ValueError as error:
            raise ValueError(f"{expected}: {error}") from None
        return np.array(numbers, np.int64)

    @property
    def sizes(self) -> Ints:
        """The height and width in pixels of first images, upright, (N, 2) int64; 0, 0 if unknown.

        Costs one request for a whole dataset.
        """
        return self.shards.sizes.take(self.ids, axis=0).astype(np.int64)

    @property
    def decodable(self) -> NDArray[np.bool_]:
        """Whether a decoder could decode each image of each sample, (N,) bool, when encoded.

        ``dataset.subset(dataset.decodable)`` leaves out the files that ``encode --on-error keep``
        kept although nothing could decode them. Costs one request for a whole dataset.
        """
        return ~np.bitwise_and(self.shards.flags.take(self.ids), UNDECODABLE).astype(np.bool_)

    def rows_of(self, shard: int) -> Ints | None:
        """Return the positions of a subset's samples in a shard; ``None`` for all of them."""
        if self._ids is None:
            return None
        start, stop = self.shards.starts[shard : shard + 2]
        first, last = np.searchsorted(self._ids, (start, stop))
        rows: Ints = self._ids[first:last] - start
        return rows

    @property
    def shard_sizes(self) -> Ints:
        """The number of samples of this dataset or subset in each shard, (shards,) int64."""
        starts = self.shards.starts
        return np.diff(starts if self._ids is None else np.searchsorted(self._ids, starts))

    @lazy
    def fingerprint(self) -> int:
        """A checksum of the shards and the samples; if it differs, so do sample numbers."""
        whole = self.shards.fingerprint
        return whole if self._ids is None else crc32c(self._ids, whole)

    def __repr__(self) -> str:
        return (
            f"<PCRDataset: {len(self)} of {self.shards}, scan {self.scan!r} of {self.max_scan!r}>"
        )

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, sample: Any) -> Any:
        """Return a sample by its number, which may be negative, or by its key.

        If several samples have the key, it stands for the last one.

        Random crops and flips use torch's generator, as in torchvision.

        Returns: The result of ``transform``; otherwise a tuple of ``fields``, or a dict: images as
            uint8 tensors, or bytes without a decoder; ``cls`` an int, ``json`` parsed, ``txt`` a
            str.

        Raises:
            IndexError, KeyError: The sample, or one of its ``fields``, does not exist.
            TypeError: The argument is neither an integer nor a key.
            FormatError, StorageError: The sample cannot be read.
        """
        number = self._numbers[sample] if isinstance(sample, str) else operator.index(sample)
        count = len(self)
        if not -count <= number < count:
            raise IndexError(f"expected a number of {count} samples, got {number}")
        [(sample_id, shard, row)] = self.shards.places(self.ids_of(np.array([number % count])))
        scan = current_scan(self.scan)
        bad = BadSamples(self.on_error, count)
        try:
            prefix = self._recent.get(shard, scan, row)
        except (FormatError, StorageError) as error:
            if not bad(error):
                raise
            prefix = self.shards.neighbor(shard, lambda n: self._recent.get(n, scan, 0), error)
            row %= prefix.index.num_samples
        collator = self.collator(0, bad=bad)
        if collator.is_random:
            # Not for labels alone: the generator is that of the training.
            seed = int(torch.empty((), dtype=torch.int64).random_())
            collator = replace(collator, key=(seed, 0))
        found = collator.one((sample_id, prefix, row))
        report(bad.take(), self._replaced)
        return found

    @lazy
    def _numbers(self) -> dict[str, int]:
        return {key: number for number, key in enumerate(self.keys)}

    @checked()
    def at(self, scan: ScanOrFraction = FULL, *, quality: float | None = None) -> Self:
        """Return the same samples at another scan, or at a quality.

        Raises:
            ScanUnavailable: The dataset has no such scan.
            TypeError: The scan is neither an integer, nor a fraction, nor ``"full"``.
        """
        other = copy.copy(self)
        other.scan = self.shards.check_scan(scan, self.fields, quality)
        return other

    @checked()
    def subset(self, numbers: Iterable[int]) -> Self:
        """Return a subset of the samples, in the order of this dataset; it shares the shards.

        Args:
            numbers: (n,) sample numbers, or a (len,) mask of True and False.

        Raises:
            IndexError: A number is out of range, or not an integer.
            ValueError: A sample appears twice, or the selection is empty.
        """
        chosen = np.asarray(numbers if hasattr(numbers, "__array__") else list(numbers))
        picked = self.ids[chosen] if chosen.size else chosen
        ids = np.sort(picked)  # np.unique takes twenty times as long
        num_samples = np.count_nonzero(np.diff(ids)) + min(len(ids), 1)
        if not 0 < num_samples == len(picked):
            raise ValueError(
                f"expected one or more samples, each once, got {len(picked)} numbers of "
                f"{num_samples} samples"
            )
        subset = copy.copy(self)
        for name in ("fingerprint", "keys", "labels", "_numbers"):
            vars(subset).pop(name, None)
        subset._ids = None if len(ids) == self.shards.starts[-1] else ids
        return subset

    def check(self, *others: PCRDataset, near: bool = False) -> CheckReport:
        """Look for what makes results wrong, in this training set and in sets that you measure on.

        A subset is checked like a dataset. Reads scan 1 of every picture, and all of the shards
        that may hold duplicates: see ``pcrshard check``.

        Args:
            others: Validation and test sets.
            near: Whether to report pictures that look the same but have other pixels, too.

        Returns:
            The findings; it is true if none of them makes results wrong, and ``print(report)``
            shows them.

        Raises:
            StorageError, FormatError: A dataset cannot be read any more.
        """
        parts = self._as_parts("train")
        for number, other in enumerate(others, 1):
            if not isinstance(other, PCRDataset):
                raise TypeError(f"expected PCRDatasets to compare with, got {other!r}")
            parts += other._as_parts("validation" if len(others) == 1 else f"validation {number}")
        return check_parts(parts, near=near)

    def _as_parts(self, split: str) -> list[Part]:
        """Return the datasets of this one, each with its samples in this subset."""
        own, parts = self.shards, []
        for index, (first, stop) in zip(own.indexes, itertools.pairwise(own.datasets), strict=True):
            low, high = own.starts[first], own.starts[stop]
            ids = None
            if self._ids is not None:
                ids = self._ids[(self._ids >= low) & (self._ids < high)] - low
            name = redact_url(storage.parent(own.urls[first]))
            parts.append(Part(name, split, index, [own.open(n) for n in range(first, stop)], ids))
        return parts

    @checked(lengths="fractions", generator="seed")
    def split(
        self,
        fractions: Sequence[float],
        *,
        stratify: bool = True,
        seed: Natural = 0,
    ) -> list[Self]:
        """Split the samples at random into subsets, for example for training and validation.

        Args:
            fractions: Fraction of the samples of each subset; they sum to 1.
            stratify: Whether to split each class by these fractions, as nearly as possible.
            seed: The same seed always gives the same subsets.

        Raises:
            ValueError: The fractions do not sum to 1, a subset would be empty, or with ``stratify``
                a sample has no label.
        """
        if not math.isclose(sum(fractions), 1):
            raise ValueError(f"expected fractions that sum to 1, got {list(fractions)}")
        draws = random_words(len(self), Rules(seed), SPLIT, (0, 0))
        labels = self.labels if stratify else np.zeros(len(self), np.int64)
        # Sorted by class and shuffled within; each subset then takes its samples at even spacing.
        order = np.lexsort((draws, labels))
        counts = share_out(fractions, len(self))
        due = [(np.arange(count) + 0.5) / count for count in counts]
        owners = np.repeat(np.arange(len(counts)), counts)
        owners = owners[np.argsort(np.concatenate(due), kind="stable")]
        return [self.subset(order[owners == owner]) for owner in range(len(counts))]
