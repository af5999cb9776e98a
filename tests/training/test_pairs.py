"""Features of datasets and loaders that a job uses together, from end to end."""

import json

import numpy as np
import pytest
import servers
import torch
from numbered import write
from torch.utils.data import DataLoader, WeightedRandomSampler

from pcrshard import ImageDecoder, PCRDataset, PCRLoader
from pcrshard.jpeg.orientation import with_orientation
from pcrshard.testing import make_jpeg


@pytest.fixture(scope="module")
def turned(tmp_path_factory):
    """A dataset of photographs in all eight EXIF orientations, of two classes."""
    samples = [
        {
            "__key__": f"{number:02}",
            "jpg": with_orientation(make_jpeg(number, 40, 56), number % 8 + 1),
            "cls": number % 2,
        }
        for number in range(48)
    ]
    return write(tmp_path_factory.mktemp("turned"), samples, rows=8)


FIELDS = ("jpg", "cls", "__key__")


def test_a_weighted_sampler_with_workers_over_http_with_a_cache(turned, tmp_path):
    """Random access by workers gives the pixels of a local read, and no byte is fetched twice."""
    how = {"scan": 0.6, "decoder": ImageDecoder(24, "center"), "fields": FIELDS}
    local = PCRDataset(turned, **how)
    with servers.nginx(turned) as server:
        dataset = PCRDataset(server.url(""), cache_dir=tmp_path, cache_bytes="1GB", **how)
        weights = (1 / np.bincount(dataset.labels))[dataset.labels]
        for _ in range(2):
            sampler = WeightedRandomSampler(weights, len(dataset))
            for images, labels, keys in DataLoader(dataset, 8, sampler=sampler, num_workers=2):
                for image, label, key in zip(images, labels, keys, strict=True):
                    pixels, expected, _ = local[key]
                    assert torch.equal(image, pixels)
                    assert label == expected
    stops = sum(entry.prefix_stop(dataset.scan) for entry in dataset.shards.entries)
    assert dataset.cache_stats().fetched_bytes <= stops


def test_a_weighted_part_of_a_split_resumes_on_more_ranks(turned, tmp_path):
    """A subset of a stratified split, mixed by weights, goes on with the same global batches."""
    train, val = PCRDataset([turned, turned], scan=0, fields=("__key__",)).split([0.75, 0.25])
    assert len(train) == 3 * len(val)
    part = train.subset(np.arange(0, len(train), 2))

    def loader(world=1, rank=0):
        how = {"weights": (3, 1), "num_samples": 32, "max_world_size": 4, "seed": 9}
        return PCRLoader(part, 8 // world, rank=rank, world_size=world, **how)

    whole = loader()
    expected = [[keys for (keys,) in whole] for _ in range(2)]
    stopped = loader()
    assert next(iter(stopped))[0] == expected[0][0]
    state = json.loads(json.dumps(stopped.state_dict()))
    ranks = [loader(2, rank) for rank in range(2)]
    for each in ranks:
        each.load_state_dict(state)
    for left in (expected[0][1:], expected[1]):
        found = [left_keys + right_keys for (left_keys,), (right_keys,) in zip(*ranks, strict=True)]
        assert list(map(sorted, found)) == list(map(sorted, left))
