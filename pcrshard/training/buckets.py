"""``Buckets``: batches of images of similar shape, or of a bounded number of pixels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..arguments import Positive, check_fields
from ..lazy import lazy
from .order import Interval, StepPlan, without
from .sequence import BUCKETS, Ints, random_words

if TYPE_CHECKING:
    from .collate import Collator
    from .dataset import PCRDataset

Sizes = NDArray[np.uint16]
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
    of batches, of different sizes, and every sample appears once. The exception: if each batch has
    one image, up to ``world_size - 1`` samples appear twice, so that the numbers are equal.

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
        weights: object,
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
        if self.area is not None and image is not None and image.views:
            raise ValueError("expected one view of each image with area=, which decides its shape")
        if self.pixels is not None and weights is not None:
            raise ValueError("expected no weights with pixels=: the batches would not be as many")
        sizes = dataset.shards.sizes.take(dataset.ids, axis=0)
        unknown = np.flatnonzero(sizes.min(axis=1) == 0)
        if len(unknown):
            raise ValueError(
                f"expected a JPEG in each sample, got none in {dataset.keys[unknown[0]]!r}: leave "
                "such samples out by dataset.subset(dataset.sizes.all(1))"
            )

    def fit(self, collator: Collator, sizes: Sizes) -> Collator:
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

    def _bucket(self, sizes: Sizes) -> Ints:
        """Return the (n,) buckets of (n, 2) heights and widths, by nearest aspect ratio."""
        ratios = np.log([width / height for height, width in self.shapes])
        middles = (ratios[1:] + ratios[:-1]) / 2
        return np.searchsorted(middles, np.log(sizes[:, 1] / sizes[:, 0].astype(np.float64)))

    def regroup(self, sizes: Sizes, plan: StepPlan) -> StepPlan:
        """Move samples between steps; with sizes bound, ``regroup`` of :class:`EpochOrder`.

        With ``area``, each rank's samples are sorted by bucket, window by window, and the steps are
        shuffled. Ranks keep their samples, so each shard is still read by one rank. All ranks sort
        the same way, so most steps have one shape on all ranks.

        Args:
            sizes: (N, 2) uint16, height and width of each sample.
            plan: The steps without buckets.
        """
        if self.pixels is not None:
            return _ByPixels(plan, sizes, self.pixels)
        return _ByShape(plan, lambda ids: self._bucket(sizes[ids]))


class _ByShape(StepPlan):
    """Steps whose samples are sorted by bucket, window by window."""

    def __init__(self, plan: StepPlan, bucket: Callable[[Ints], Ints]) -> None:
        super().__init__(plan.samples, plan.geometry, plan.rules, plan.key)
        self._bucket = bucket
        batch = self.geometry.global_batch // self.geometry.max_world_size
        self._window = max(_WINDOW_SAMPLES // batch, _WINDOW_BATCHES)

    def batches(self, steps: range, rank: int, world: int) -> Iterator[Ints]:
        first = min(steps.start, self.full_steps)
        first -= first % self._window
        for step, batch in enumerate(self._sorted(first, rank, world), first):
            if step in steps:
                yield batch
                if step == steps[-1]:
                    return

    def _sorted(self, first: int, rank: int, world: int) -> Iterator[Ints]:
        """Yield all batches from the beginning of a window on; a shorter last one stays."""
        source = super().batches(range(first, self.steps), rank, world)
        for start in range(first, self.full_steps, self._window):
            count = min(self._window, self.full_steps - start)
            found = np.concatenate(list(itertools.islice(source, count)), axis=1)
            order = self._bucket(found[1]).argsort(kind="stable").reshape(count, -1)
            if self.rules.shuffle_shards:
                draws = random_words(count, self.rules, BUCKETS, self.key, start)
                order = order[draws.argsort(kind="stable")]
            yield from (found[:, own] for own in order)
        yield from source

    def _left(self, steps: int) -> Iterator[Interval | Ints]:
        start = steps - steps % self._window if steps < self.full_steps else steps
        slots = self.geometry.max_world_size
        done = [
            batch[0]
            for slot in range(slots)
            for batch in self.batches(range(start, steps), slot, slots)
        ]
        removed = np.concatenate([*done, np.zeros(0, np.int64)]) % len(self.samples)
        return without(super()._left(start), removed)


class _ByPixels(StepPlan):
    """Steps cut from the samples of each rank in runs of nearly equal numbers of pixels.

    The cuts depend on every sample's size, so all positions and ids are in memory.

    Raises:
        ValueError: An image has more than half of the pixels of a batch.
    """

    def __init__(self, plan: StepPlan, sizes: Sizes, limit: int) -> None:
        super().__init__(plan.samples, plan.geometry, plan.rules, plan.key)
        world = self.geometry.max_world_size
        batch = self.geometry.global_batch // world
        steps = range(plan.steps)
        # Rank by rank.
        found = np.concatenate(
            [own for rank in range(world) for own in plan.batches(steps, rank, world)], axis=1
        )
        pixels = sizes[found[1]].prod(axis=1, dtype=np.int64)
        largest = int(pixels.max())
        if largest * 2 > limit:
            raise ValueError(
                f"expected pixels of at least twice the largest image, {2 * largest}, got {limit}"
            )
        # An image takes at least its fraction of a full batch.
        costs = np.maximum(pixels, -(-limit // batch), out=pixels)
        total = int(costs.sum())
        # The images that begin in a run of this cost fit in a batch: the last one may exceed it by
        # its pixels, or they are not more than fit if all are as large as the largest.
        width = max(limit - largest, min(limit // largest, batch) * int(costs.min()))
        self.steps = -(-total // (world * width))
        self.full_steps = self.steps
        runs = self.steps * world
        begins = costs.cumsum()
        begins -= costs
        # Python's integers: the products may need more than 64 bits.
        first = np.searchsorted(begins, [run * total // runs for run in range(runs)])
        # A run without an image takes one from its neighbor. If there are fewer images than runs,
        # which then have one each, some are repeated.
        held = len(costs)
        count = max(held, runs)
        self._found = found if count == held else found[:, np.resize(np.arange(held), count)]
        spare = np.maximum.accumulate(first - np.arange(runs))
        self._cuts = np.append(np.minimum(spare, count - runs) + np.arange(runs), count)

    def batches(self, steps: range, rank: int, world: int) -> Iterator[Ints]:
        for step in steps:
            start, stop = self._cuts[rank * self.steps + step :][:2].tolist()
            yield self._found[:, start:stop]

    def _left(self, steps: int) -> Iterator[Interval | Ints]:
        world = self.geometry.max_world_size
        done = [
            batch[0] for rank in range(world) for batch in self.batches(range(steps), rank, world)
        ]
        removed = np.concatenate([*done, np.zeros(0, np.int64)])
        return without([(0, len(self.samples))], removed)
