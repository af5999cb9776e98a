"""Draw images at random from a few shards of a dataset, and process their pieces."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from ..format.dataset_index import DatasetIndex
from ..format.scan import FULL, Scan
from ..reading.dataset_folder import open_dataset
from ..reading.prefix import Prefix, Sample
from ..reading.shard import Shard
from ..storage import Options
from ..training.shard_set import check_same_shards

T = TypeVar("T")
Pieces = list[memoryview]
OnImage = Callable[[int, int], None]


class ImageSample(NamedTuple):
    """Images drawn from a dataset.

    Attributes:
        dataset: Its index.
        top: The highest readable scan, which the others are compared with: ``"full"``, or for a
            staged copy without ``reference``, the highest scan that it holds.
        drawn: The shards, and the positions of the images in each.
    """

    dataset: DatasetIndex
    top: Scan
    drawn: list[tuple[Shard, list[int]]]

    def look(
        self,
        look: Callable[[Pieces], T],
        on_image: OnImage | None = None,
        fields: Sequence[str] = (),
    ) -> Iterator[tuple[T, Sample]]:
        """Call ``look`` with the pieces of each image in the first stream.

        Args:
            look: Called with one piece for each scan up to ``top``.
            on_image: Called with (done, total) after each image.
            fields: Additional fields to read.

        Yields:
            The result of ``look``, and the sample, which has these fields.
        """
        total = sum(len(positions) for _, positions in self.drawn)
        done = 0
        for shard, positions in self.drawn:
            with shard.load(shard.num_groups if self.top == FULL else self.top) as prefix:
                for row in positions:
                    yield from _look_at(prefix, row, look, fields)
                    done += 1
                    if on_image is not None:
                        on_image(done, total)


def _look_at(
    prefix: Prefix, row: int, look: Callable[[Pieces], T], fields: Sequence[str]
) -> Iterator[tuple[T, Sample]]:
    """Process a sample's first stream; yield nothing if it is stored without scans."""
    schema = prefix.index.schema
    image = schema.streams[0][0] if schema.streams else None
    sample = prefix.sample(row, select=lambda _, name: name in (image, *fields), decode=look)
    seen = sample.pop(str(image), None)
    for one in seen if image in schema.lists else [seen]:
        # A passthrough image arrives as plain bytes.
        if not isinstance(one, bytes | None):
            yield one, sample


def draw_images(
    url: str,
    num_images: int,
    seed: int,
    max_shards: int,
    *,
    reference: str | None = None,
    storage_options: Options = None,
) -> ImageSample:
    """Open a dataset, and draw images from some of its shards.

    Args:
        url: The dataset's folder.
        num_images: Number of images.
        seed: The same seed draws the same images.
        max_shards: Maximum number of shards to draw from.
        reference: Original dataset if ``url`` is a staged copy; images are read from there.
        storage_options: fsspec storage options for both datasets.

    Raises:
        ValueError: ``reference`` has different shards.
        StorageError, CorruptIndex: A dataset index cannot be read.
    """
    index, urls = open_dataset(url, storage_options=storage_options)
    source = index
    if reference is not None:
        source, urls = open_dataset(reference, storage_options=storage_options)
        check_same_shards(index.shards, source.shards, reference)
    sizes = [entry.num_samples for entry in source.shards]
    picked = pick(random.Random(seed), sizes, num_images, max_shards)
    drawn = [
        (Shard(urls[i], entry=source.shards[i], storage_options=storage_options), positions)
        for i, positions in picked.items()
    ]
    return ImageSample(index, source.scan or FULL, drawn)


def pick(
    rng: random.Random,
    sizes: Sequence[int],
    num_images: int,
    max_shards: int,
) -> dict[int, list[int]]:
    """Choose images at random from a few shards.

    Args:
        rng: Source of the random numbers.
        sizes: Samples of each shard.
        num_images: Number of images, or all if the chosen shards hold fewer.
        max_shards: Maximum number of shards to choose.

    Returns:
        Sorted sample positions for each chosen shard.

    >>> pick(random.Random(0), [3, 3, 3, 3], 4, 2)
    {1: [0, 1, 2], 3: [0]}
    """
    shards = rng.sample(range(len(sizes)), min(max_shards, len(sizes)))
    images = [(shard, i) for shard in sorted(shards) for i in range(sizes[shard])]
    chosen = sorted(rng.sample(images, min(num_images, len(images))))
    by_shard = itertools.groupby(chosen, key=operator.itemgetter(0))
    return {shard: [i for _, i in group] for shard, group in by_shard}
