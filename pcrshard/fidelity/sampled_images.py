"""Draw images at random from a few shards of a dataset."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..format.dataset_index import DatasetIndex
from ..format.scan import check_scan
from ..reading.dataset_folder import open_dataset
from ..reading.shard import Shard
from ..storage import Options

Pieces = list[memoryview]
OnImage = Callable[[int, int], None]
LABEL = "cls"


@dataclass
class ImageSample:
    """Images drawn from a dataset.

    Attributes:
        dataset: Its index.
        drawn: The shards, and the positions of the drawn images in each.
    """

    dataset: DatasetIndex
    drawn: dict[Shard, list[int]]

    def images(self, on_image: OnImage | None = None) -> Iterator[tuple[Pieces, bytes | None]]:
        """Read the drawn images of the first stream, one shard in memory at a time.

        Args:
            on_image: Called with (done, total) after each sample.

        Yields:
            The pieces of an image, one for each readable scan, and the sample's label.
        """
        total = sum(map(len, self.drawn.values()))
        done = 0
        for shard, rows in self.drawn.items():
            prefix = shard.load(self.dataset.scan or self.dataset.num_groups)
            stream = next(iter(prefix.streams), "")
            for row in rows:
                label = prefix.value(row, LABEL)
                for unit in prefix.units_of(row, stream):
                    if unit in prefix.index.whole:
                        continue  # it is the same at every scan
                    yield prefix.pieces(unit), label
                done += 1
                if on_image is not None:
                    on_image(done, total)
            del prefix  # before the next shard takes memory


def draw_images(
    url: str,
    num_images: int,
    seed: int,
    max_shards: int,
    storage_options: Options = None,
) -> ImageSample:
    """Open a dataset, and draw images from some of its shards.

    Args:
        url: The dataset's folder.
        num_images: Number of images, or all if the drawn shards hold fewer.
        seed: The same seed draws the same images.
        max_shards: Maximum number of shards to draw from.
        storage_options: fsspec storage options.

    Raises:
        StorageError, CorruptIndex: The dataset index cannot be read.
        ScanUnavailable: These are plain tars.
    """
    index, urls = open_dataset(url, storage_options=storage_options)
    check_scan(1, index.num_groups)  # plain tars have none to compare
    rng = random.Random(seed)
    shards = rng.sample(range(len(urls)), min(max_shards, len(urls)))
    images = [(i, row) for i in sorted(shards) for row in range(index.shards[i].num_samples)]
    rows: dict[int, list[int]] = {}
    for i, row in sorted(rng.sample(images, min(num_images, len(images)))):
        rows.setdefault(i, []).append(row)
    drawn = {
        Shard(urls[i], entry=index.shards[i], storage_options=storage_options): chosen
        for i, chosen in rows.items()
    }
    return ImageSample(index, drawn)
