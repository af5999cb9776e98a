"""Options of datasets and loaders drawn at random: whatever is accepted keeps every promise."""

import io
import itertools
import json
import random

import numpy as np
import pytest
import torch
import webdataset as wds
from PIL import Image
from support import run_encode

from pcrshard import Buckets, ImageDecoder, IndexOptions, PCRDataset, PCRLoader, View, index_tars
from pcrshard.errors import ScanUnavailable
from pcrshard.testing import make_jpeg

KINDS = {"mask.png": "mask", "json:boxes": "boxes:xyxy"}
FIELDS = (None, ("jpg", "cls"), ("__key__", "jpg", "mask.png"), ("cls",), ("txt", "jpg", "json"))
VIEWS = [View(16, 2), View((8, 12), crop="center")]
CHANGING = [(0, (1, 1)), (60, (1, 4))]


def samples(name, count, bad):
    """Pictures of four shapes with masks, boxes, texts and classes; some cut off."""
    for number in range(count):
        height, width = ((40, 60), (60, 40), (48, 48), (33, 70))[number % 4]
        jpeg, mask = make_jpeg(number, height, width), io.BytesIO()
        Image.fromarray(np.arange(height * width).reshape(height, width).astype("u1")).save(
            mask, "PNG"
        )
        boxes = [[1, 1, 20, 20], [5, 5, width - 2, height - 2]]
        yield {
            "__key__": f"{name}{number:04d}",
            "jpg": jpeg[: len(jpeg) // 3] if number in bad else jpeg,
            "mask.png": mask.getvalue(),
            "json": json.dumps({"boxes": boxes, "n": number}).encode(),
            "cls": str(number % 3).encode(),
            "txt": f"text {number}".encode(),
        }


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two datasets as shards, and the same as plain tars with an index."""
    root = tmp_path_factory.mktemp("combinations")
    for name, count, bad in (("a", 53, (7, 30)), ("b", 31, ())):
        (root / "tars" / name).mkdir(parents=True)
        with wds.TarWriter(str(root / f"{name}.tar")) as one:
            for sample in samples(name, count, bad):
                one.write(sample)
        with wds.ShardWriter(f"{root}/tars/{name}/x-%06d.tar", maxcount=7, verbose=0) as many:
            for sample in samples(name, count, bad):
                many.write(sample)
        run_encode(
            root / f"{name}.tar",
            root / "shards" / name,
            kinds=KINDS,
            samples_per_shard=7,
            on_error="keep",
        )
        index_tars(str(root / "tars" / name), options=IndexOptions(kinds=KINDS))
    return root


def drawn(choose, folders):
    """A function that makes the loader of a rank, and the number of ranks."""
    form = choose(["shards", "tars"])
    decoder = choose([None, 16, "own"])
    size = choose([16, (16, 24), None])
    how = {
        "flip": choose([0, 0.5]),
        "return_geometry": choose([False, True]),
        "color": choose(["rgb", "rgb", "gray", "srgb"]),
        "layout": choose(["chw", "hwc"]),
    }
    if decoder == "own" and choose([True, False, False]):
        decoder = ImageDecoder(views=VIEWS, **how)
    elif decoder == "own":
        decoder = ImageDecoder(size, choose(["random", "center"]) if size else None, **how)
    words = {
        "decoder": decoder,
        "fields": choose(FIELDS),
        "on_error": "replace",
        "scan": choose(["full", "full", 0] if form == "tars" else ["full", 0, 1, 3]),
        "cache_dir": choose([None, folders / "cache"]),
    }
    if words["cache_dir"]:
        words["cache_bytes"] = choose([10_000, 10**8])
    is_mixed = choose([True, False, False])
    world = choose([1, 1, 2, 3])
    options = {
        "batch_size": choose([1, 2, 5, 8]),
        "shuffle": choose([True, False, 3]),
        "seed": choose(range(100)),
        "drop_last": choose([None, True, False, "pad"]),
        "threads": choose([0, 1, 2]),
        "num_workers": choose([0] * 9 + [2]),
        "lanes_per_rank": choose([None, 1, 2]),
        "max_world_size": choose([None, None, 2 * world]),
        "world_size": world,
    }
    if is_mixed:
        options |= {"weights": choose([(1, 1), (3, 1), CHANGING]), "num_samples": choose([40, 64])}
    else:
        options["buckets"] = choose(
            [None, None, None, Buckets(24 * 24, multiple=8), Buckets(pixels=6000)]
        )
    folder = folders / form

    def loader(rank):
        urls = [str(folder / "a"), str(folder / "b")] if is_mixed else str(folder / "a")
        return PCRLoader(PCRDataset(urls, **words), rank=rank, **options)

    return loader, world, (form, words, options)


def same(one, other):
    """Whether two batches are equal, bit for bit."""
    if isinstance(one, torch.Tensor | np.ndarray):
        return one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(20, 400))]
)
def test_whatever_is_accepted_is_whole_equal_on_ranks_and_resumes(folders, seed):
    """Options either are refused when the loader is made, with a reason, or give as many batches as
    ``len`` says, as many on each rank, and the same batches after a restart anywhere.
    """
    choose = random.Random(seed).choice
    loader, world, words = drawn(choose, folders)
    try:
        loaders = [loader(rank) for rank in range(world)]
    except ValueError as error:
        assert "expected" in str(error) or "got" in str(error)
        return
    except ScanUnavailable as error:
        assert "begins at scan" in str(error)
        return
    counts = set()
    for rank, whole in enumerate(loaders):
        batches = list(whole)
        assert len(batches) == len(loader(rank)), words
        counts.add(len(batches))
        stopped, resumed = loader(rank), loader(rank)
        first = list(itertools.islice(stopped, choose(range(len(batches)))))
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        assert same(first + list(resumed), batches), words
    assert len(counts) == 1, words
