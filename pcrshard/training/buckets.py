"""``Buckets``: batches of images of similar shape, or of a bounded number of pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..arguments import Positive, check_fields
from ..lazy import lazy
from .epoch_order import BUCKETS, Geometry, Ints, Key, Layout, Rules, random_words

if TYPE_CHECKING:
    from .collate import Collator
    from .dataset import PCRDataset

# Samples of a rank to group at a time: enough for whole batches of rare shapes, and few enough for
# their shards to fit in memory. At least this many batches.
_WINDOW_SAMPLES = 8192
_WINDOW_BATCHES = 32


@dataclass(frozen=True)
class Buckets:
    """How a :class:`PCRLoader` groups images of different shapes.

    ``Buckets(area=512 * 512)``: each batch has one (height, width) of at most ``area`` pixels, both
    multiples of ``multiple``, which replaces the decoder's size. The decoder crops the largest
    centered box of this shape from each image, or with ``crop="random"`` a random box of this
    shape. The number and the size of batches are the same as without buckets. At each step the
    batches of all ranks have nearly the same number of pixels, and usually the same shape.

    ``Buckets(pixels=2_000_000)``: images keep their own sizes, and a batch has at most this many
    pixels and ``batch_size`` images. Whatever ``drop_last`` says, all ranks have the same number
    of batches, of different sizes, and every sample appears once; but if each batch has only one
    image, fewer samples than there are ranks may appear twice, to make the numbers equal.

    Both orders are pure functions of seed and epoch, and resume exactly.

    Attributes:
        area: Maximum number of pixels of an image.
        multiple: Divisor of all heights and widths.
        max_ratio: Maximum ratio of the longer to the shorter side; longer images are cropped.
        pixels: Maximum number of pixels of a batch; at least twice those of the largest image.

    Raises:
        ValueError: Not exactly one of ``area`` and ``pixels`` is given, or a value is too small.

    >>> Buckets(area=256 * 256, multiple=64).shapes
    [(320, 192), (256, 256), (192, 320)]
    """

    area: Positive | None = None
    multiple: Positive = 64
    max_ratio: float = 2.0
    pixels: Positive | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.area is None) == (self.pixels is None):
            raise ValueError(
                f"expected one of area and pixels, got area={self.area} and pixels={self.pixels}"
            )
        if self.area is not None and not self.shapes:
            raise ValueError(f"expected an area and a max_ratio that some shape fits, got {self}")

    @lazy
    def shapes(self) -> list[tuple[int, int]]:
        """(height, width) of each bucket, from the tallest to the widest."""
        area = self.area or 0
        unit = self.multiple
        sides = range(unit, area // unit + 1, unit)
        found = {(side, area // side // unit * unit) for side in sides}
        found |= {(width, height) for height, width in found}
        shapes = [shape for shape in found if max(shape) <= min(shape) * self.max_ratio]
        return sorted(shapes, key=lambda shape: (shape[1] / shape[0], shape))

    def check(
        self,
        dataset: PCRDataset,
        collator: Collator,
        weights: Sequence[float] | None,
    ) -> None:
        """Check that a dataset and options work with these buckets.

        Raises:
            ValueError: A sample has no JPEG, or an option conflicts.
        """
        image = collator.image
        if image is not None and not (image.upright and (self.area or not image.is_sized)):
            raise ValueError(
                f"expected an upright decoder, without a size for pixels=, got {image}"
            )
        if self.pixels is not None and weights is not None:
            raise ValueError("expected no weights with pixels=: the batches would not be as many")
        unknown = np.flatnonzero(dataset.sizes.min(axis=1) == 0)
        if len(unknown):
            raise ValueError(
                f"expected a JPEG in each sample, got none in {dataset.keys[unknown[0]]!r}: leave "
                "such samples out by dataset.subset(dataset.sizes.all(1))"
            )
        self.fit(collator, dataset.sizes[:1])  # raises for views

    def fit(self, collator: Collator, sizes: Ints) -> Collator:
        """Return the collator of a batch of (n, 2) sizes.

        With ``area``, it gives all images the shape of the median sample's bucket.
        """
        image = collator.image
        if image is None or self.area is None:
            return collator
        height, width = self.shapes[int(np.median(self._bucket(sizes)))]
        ratio = width / height
        # Without a random crop, the largest centered box of that shape.
        scale = image.scale if image.crop == "random" else (1.0, 1.0)
        box = replace(image, size=(height, width), crop="random", ratio=(ratio, ratio), scale=scale)
        return replace(collator, image=box)

    def _bucket(self, sizes: Ints) -> Ints:
        """Return the (n,) buckets of (n, 2) heights and widths, by nearest aspect ratio."""
        ratios = np.log([width / height for height, width in self.shapes])
        middles = (ratios[1:] + ratios[:-1]) / 2
        return np.searchsorted(middles, np.log(sizes[:, 1] / sizes[:, 0]))

    def regroup(
        self,
        sizes: Ints,
        rules: Rules,
        ids: Ints,
        cuts: Ints,
        geometry: Geometry,
        key: Key,
    ) -> Layout:
        """Move samples between steps; with sizes and rules bound, ``regroup`` of ``epoch_order``.

        With ``area``, each rank's samples are sorted by bucket, window by window, and the steps are
        shuffled. Ranks keep their samples, so each shard is still read by one rank. All ranks sort
        the same way, so most steps have one shape on all ranks.

        Args:
            sizes: (N, 2) height and width of each sample.
            rules: Seed, and whether to shuffle.
            ids: (samples,) numbers of the samples, as laid out.
            cuts: Start of each rank's batch of each step.
            geometry: How they were laid out.
            key: Epoch and stage.

        Returns: The new order of the samples, and new cuts.
        """
        sizes = sizes[ids]
        if self.pixels is not None:
            return self._by_pixels(sizes, cuts, geometry, self.pixels)
        world = geometry.max_world_size
        size = geometry.global_batch
        steps, rest = divmod(len(sizes), size)
        window = np.arange(steps) // max(_WINDOW_SAMPLES * world // size, _WINDOW_BATCHES)
        step, column = np.divmod(np.arange(steps * size), size)
        keys = self._bucket(sizes[: steps * size]), window[step], column * world // size
        order = np.lexsort(keys).reshape(world, steps, size // world)
        if rules.shuffle_shards:
            draws = random_words(steps, rules, BUCKETS, key)
            order = order[:, np.lexsort((draws, window))]
        # A short last step stays where it is.
        return np.append(order.transpose(1, 0, 2), np.arange(rest) + steps * size), cuts

    def _by_pixels(self, sizes: Ints, cuts: Ints, geometry: Geometry, limit: int) -> Layout:
        """Cut the samples of each rank into runs of nearly equal numbers of pixels.

        Raises:
            ValueError: An image has more than half of the pixels of a batch.
        """
        world = geometry.max_world_size
        batch = geometry.global_batch // world
        # Rank by rank.
        order = np.repeat(np.arange(len(cuts) - 1) % world, np.diff(cuts)).argsort(kind="stable")
        pixels = sizes[order].prod(axis=1)
        largest = int(pixels.max())
        if largest * 2 > limit:
            raise ValueError(
                f"expected pixels of at least twice the largest image, {2 * largest}, got {limit}"
            )
        # An image takes at least its fraction of a full batch.
        costs = np.maximum(pixels, -(-limit // batch))
        total = int(costs.sum())
        # The images that begin in a run of this cost fit in a batch: the last one may exceed it by
        # its pixels, or they are not more than fit if all are as large as the largest.
        width = max(limit - largest, min(limit // largest, batch) * int(costs.min()))
        steps = -(-total // (world * width))
        runs = np.arange(steps * world)
        begins = costs.cumsum() - costs
        # Python's integers: the products may need more than 64 bits.
        first = np.searchsorted(begins, [run * total // len(runs) for run in runs.tolist()])
        # A run without an image takes one from its neighbor. If there are fewer images than runs,
        # which then have one each, some are repeated.
        order = np.resize(order, max(len(order), len(runs)))
        spare = np.maximum.accumulate(first - runs)
        first = np.minimum(spare, len(order) - len(runs)) + runs
        each = np.split(order, first[1:])
        batches = [each[run] for run in runs.reshape(world, steps).T.flat]
        return np.concatenate(batches), np.cumsum([0, *map(len, batches)])
