"""Buckets: batches of one shape, or of a bounded number of pixels; exact, equal, resumable."""

import itertools
from functools import partial

import epoch_oracle
import numpy as np
import pytest
from numbered import flat, loader_of, through_json, write
from PIL import Image
from support import saved, write_files

from pcrshard import (
    Buckets,
    EncodeOptions,
    ImageDecoder,
    PCRDataset,
    PCRLoader,
    View,
    decode_image,
    encode,
)
from pcrshard.testing import make_jpeg, make_pixels
from pcrshard.training.order import EpochOrder, Geometry
from pcrshard.training.sequence import Rules

SAMPLES = 240
SHAPES = [(40, 40), (30, 50), (50, 30), (24, 60), (62, 20), (36, 44)]
BUCKETS = Buckets(area=32 * 32, multiple=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """12 shards of 20 images of six shapes, some of them rare; ``cls`` is the sample's id."""
    samples = []
    for i in range(SAMPLES):
        height, width = SHAPES[(0, 1, 2, 3, 4, 5, 0, 0, 1, 0)[i % 10]]
        jpeg = make_jpeg(i % 30, height + i % 3, width)
        samples.append({"__key__": f"k{i:03d}", "jpg": jpeg, "cls": i})
    return write(tmp_path_factory.mktemp("shapes"), samples, 20)


def taken(loaders, steps=None):
    """For each step the (ids, shape) of the batch of each rank."""
    each = [itertools.islice(loader, steps) for loader in loaders]
    return [
        [(batch["cls"].tolist(), tuple(getattr(batch["jpg"], "shape", ())[2:])) for batch in step]
        for step in zip(*each, strict=True)
    ]


def ranks(folder, world, batch=None, **options):
    """A loader of each rank, of 24 samples a step or as many as given."""
    options = {"scan": 1, "decoder": ImageDecoder(), "buckets": BUCKETS, "threads": 0} | options
    return [
        loader_of(folder, batch or 24 // world, rank=rank, world_size=world, **options)
        for rank in range(world)
    ]


def test_shapes_fit_in_the_area():
    """Both sides are multiples, no bucket has more pixels or a larger ratio, and there is one of
    each orientation.
    """
    assert Buckets(area=64 * 128, max_ratio=2).shapes == [(128, 64), (64, 128)]
    shapes = Buckets(area=512 * 512, multiple=64, max_ratio=2).shapes
    assert {(512, 512), (640, 384), (384, 640), (576, 448)} <= set(shapes)
    assert all(h % 64 == w % 64 == 0 and h * w <= 512 * 512 for h, w in shapes)
    assert all(max(shape) <= 2 * min(shape) for shape in shapes)
    assert {(w, h) for h, w in shapes} == set(shapes)
    ratios = [width / height for height, width in shapes]
    assert ratios == sorted(ratios)


@pytest.mark.parametrize("world", [1, 4])
def test_each_epoch_has_each_sample_once_in_batches_of_one_shape(folder, world):
    """On any number of ranks: each sample once per epoch, equal batches, as many as ``len`` says
    before, in another order each time, nearly all in the bucket of their own shape.
    """
    loaders = ranks(folder, world)
    epochs = []
    for _ in range(2):
        steps = taken(loaders)
        assert [len(loader) for loader in loaders] == [len(steps)] * world == [10] * world
        assert sorted(flat(ids for step in steps for ids, _ in step)) == list(range(SAMPLES))
        assert {len(ids) for step in steps for ids, _ in step} == {24 // world}
        assert {shape for step in steps for _, shape in step} <= set(BUCKETS.shapes)
        epochs.append(steps)
    assert epochs[0] != epochs[1]
    sizes = loaders[0].dataset.sizes
    near = 0
    for ids, (height, width) in itertools.chain(*epochs[0]):
        ratios = [np.log(w / h) for h, w in BUCKETS.shapes]
        own = np.log(sizes[ids, 1] / sizes[ids, 0])
        best = np.abs(own[:, None] - ratios).argmin(axis=1)
        near += int((best == BUCKETS.shapes.index((height, width))).sum())
    # Each slot has one batch between two buckets.
    assert near > SAMPLES * 0.6


@pytest.mark.parametrize("buckets", [BUCKETS, Buckets(pixels=12_000)])
@pytest.mark.parametrize(("world", "stop"), [(1, 3), (2, 10), (4, 3)])
def test_they_resume_exactly(folder, buckets, world, stop):
    """A job that stops in the middle of an epoch, or at its end, goes on as if it had not; another
    number of ranks gets what is left of the epoch.
    """
    how = {"buckets": buckets}
    expected = [*taken(ranks(folder, world, **how)), *taken(ranks(folder, world, epoch=1, **how))]
    first = ranks(folder, world, **how)
    seen = taken(first, stop)
    states = [through_json(loader.state_dict()) for loader in first]
    assert all(state == states[0] for state in states)
    same, other = ranks(folder, world, **how), ranks(folder, world % 4 + 1, **how)
    for loader in [*same, *other]:
        loader.load_state_dict(states[0])
    before = [] if other[0].epoch else seen
    steps = [*before, *taken(other)]
    assert sorted(flat(ids for step in steps for ids, _ in step)) == list(range(SAMPLES))
    while len(seen) < len(expected):
        seen += taken(same)
    assert seen == expected


@pytest.mark.parametrize("buckets", [BUCKETS, Buckets(pixels=12_000)])
def test_a_shard_is_read_by_one_rank_or_two(folder, buckets):
    """Samples move between the steps of a rank, not between ranks: no rank needs all shards.
    Without ``shuffle`` each epoch is the same.
    """
    how = {"buckets": buckets, "shuffle": False}
    steps = taken(ranks(folder, 4, **how))
    readers = {
        (rank, one // 20) for step in steps for rank, (ids, _) in enumerate(step) for one in ids
    }
    assert len(readers) <= 12 + 3
    assert taken(ranks(folder, 4, epoch=1, **how)) == steps


def test_workers_and_drop_last_do_not_matter(folder):
    """Workers give the same batches, and a smaller last batch has what is left."""
    how = {"batch": 7, "drop_last": False}
    expected = taken(ranks(folder, 1, **how))
    assert taken(ranks(folder, 1, num_workers=2, threads=None, **how)) == expected
    assert [len(ids) for [(ids, _)] in expected] == [7] * 34 + [2]


@pytest.mark.parametrize(
    ("samples", "stop", "world", "batch"),
    [(5, 0, 2, 4), (22, 8, 2, 4), (22, 8, 1, 7), (22, 8, 1, 8)],
)
def test_fewer_samples_than_a_batch(folder, samples, stop, world, batch):
    """A small epoch, and what is left of one for other ranks, is a short last batch."""
    dataset = PCRDataset(folder, scan=1, decoder=ImageDecoder()).subset(range(samples))

    def job(world, batch):
        how = {"world_size": world, "drop_last": False, "buckets": BUCKETS, "threads": 0}
        return [PCRLoader(dataset, batch, rank=rank, **how) for rank in range(world)]

    first = job(2, 1)
    seen = flat(ids for step in taken(first, stop) for ids, _ in step)
    for loader in job(world, batch):
        loader.load_state_dict(through_json(first[0].state_dict()))
        seen += flat(batch["cls"].tolist() for batch in loader)
    assert sorted(seen) == list(range(samples))


def test_pixels_are_boxes_of_the_bucket(folder):
    """Without a crop an image is the largest box of its bucket's shape, undistorted; the decoder's
    flip stays.
    """
    [loader] = ranks(folder, 1, decoder=ImageDecoder(return_geometry=True, flip=1.0))
    batch = next(iter(loader))
    pixels, geometry = batch["jpg"]
    height, width = pixels.shape[2:]
    for i in range(24):
        y, x, h, w = box = geometry.crop[i].tolist()
        size = geometry.size[i].tolist()
        assert h / w == pytest.approx(height / width, rel=0.06)
        assert [h, w] == size or h == size[0] or w == size[1]
        assert abs(2 * y + h - size[0]) <= 1
        assert abs(2 * x + w - size[1]) <= 1
        jpeg = PCRDataset(folder, scan=1)[int(batch["cls"][i])]["jpg"]
        whole = decode_image(jpeg, crop=tuple(box), size=(height, width), layout="chw")
        assert np.array_equal(pixels[i], np.flip(whole, 2))


def test_views_of_a_dataset_have_buckets_of_their_own(folder):
    """A subset's buckets have its samples only."""
    dataset = PCRDataset(folder, scan=1, decoder=ImageDecoder()).subset(range(50, 150))
    loader = PCRLoader(dataset, 10, buckets=BUCKETS)
    assert sorted(flat(batch["cls"].tolist() for batch in loader)) == list(range(50, 150))


# --- by pixels


@pytest.mark.parametrize("world", [1, 4])
def test_batches_have_bounded_pixels(folder, world):
    """With ``pixels`` each sample comes once per epoch at its own size, no batch has more pixels or
    images than allowed, and all ranks have as many batches, in every epoch.
    """
    how = {"buckets": Buckets(pixels=12_000), "batch": 7}
    loaders = ranks(folder, world, **how)
    orders = []
    for _ in range(2):
        each = [list(loader) for loader in loaders]
        assert {len(batches) for batches in each} == {len(loader) for loader in loaders}
        batches = list(itertools.chain(*each))
        ids = flat(batch["cls"].tolist() for batch in batches)
        assert sorted(ids) == list(range(SAMPLES))
        assert all(1 <= len(batch["jpg"]) <= 7 for batch in batches)
        pixels = [sum(image[0].numel() for image in batch["jpg"]) for batch in batches]
        assert max(pixels) <= 12_000
        orders.append(ids)
    assert orders[0] != orders[1]
    sizes = loaders[0].dataset.sizes
    assert tuple(batches[0]["jpg"][0].shape[1:]) == tuple(sizes[batches[0]["cls"][0]])


def cut_by_pixels(sizes, limit, world, batch, **how):
    """The order of batches within both bounds: each rank has one in every step."""
    regroup = partial(Buckets(pixels=int(limit)).regroup, sizes)
    geometry = Geometry(batch * world, world)
    order = EpochOrder([len(sizes)], geometry, Rules(last="short"), regroup=regroup, **how)
    ranks = [list(order.batches(rank, world)) for rank in range(world)]
    steps = list(zip(*ranks, strict=True))
    assert len(steps) == order.steps == order.num_batches(world - 1, world)
    batches = [ids for step in steps for ids in step]
    longest = max(map(len, batches))
    assert 1 <= min(map(len, batches)) <= longest <= batch
    assert max(sizes[ids].prod(axis=1).sum() for ids in batches) <= limit
    ids = np.concatenate(batches)
    assert 0 <= len(ids) - len(set(ids)) < (world if longest == 1 else 1)
    return steps


@pytest.mark.parametrize("trials", [80, pytest.param(300, marks=pytest.mark.long)])
def test_every_rank_has_a_batch_in_every_step(trials):
    """With ``pixels``, for images of any sizes, any batch size and any number of ranks: as many
    steps in each epoch, with each sample once, or if none is left for a rank's last batch, less
    than one per rank twice. A job that goes on with other ranks has what is left.
    """
    rng = np.random.default_rng(5)
    for _ in range(trials):
        count, world, other = map(int, rng.integers(1, [80, 6, 6]))
        batch, next_batch = map(int, rng.integers(1, 9, 2))
        sizes = rng.integers(1, rng.choice([2, 12, 60]), (count, 2))
        limit = sizes.prod(axis=1).max() * rng.choice([2, 2.4, 3, 9])
        steps = cut_by_pixels(sizes, limit, world, batch)
        assert set(np.concatenate(flat(steps))) == set(range(count))
        assert len(cut_by_pixels(sizes, limit, world, batch, epoch=1)) == len(steps)
        done = int(rng.integers(len(steps)))
        left = set(range(count)).difference(*flat(steps[:done]))
        history = [(batch * world, world, 4, done)]
        rest = np.concatenate(flat(cut_by_pixels(sizes, limit, other, next_batch, history=history)))
        assert left <= set(rest)
        assert len(rest) - len(left) < other


def test_large_totals_of_pixels_do_not_overflow():
    """Equal images fill their batches, also where pixels times batches do not fit 64 bits."""
    sizes = np.full((50_000, 2), 65_000)
    regroup = partial(Buckets(pixels=2 * 65_000**2).regroup, sizes)
    order = EpochOrder([len(sizes)], Geometry(2), Rules(last="short"), regroup=regroup)
    batches = list(order.batches())
    assert set(map(len, batches)) == {2}
    assert sorted(np.concatenate(batches)) == list(range(len(sizes)))


@pytest.mark.parametrize("trials", [15, pytest.param(60, marks=pytest.mark.long)])
def test_the_order_of_shapes_equals_the_one_laid_out_in_arrays(trials):
    """Sorted by bucket, any rank's batches, also of an epoch resumed with other ranks, are those of
    the order laid out in memory.
    """
    rng = np.random.default_rng(6)
    for _ in range(trials):
        shards = rng.integers(1, 400, rng.integers(1, 12))
        sizes = rng.integers(20, 80, (shards.sum(), 2))
        seed, window = int(rng.integers(1000)), int(rng.integers(0, 5))
        last = rng.choice(["drop", "pad"]).item()
        how = {"seed": seed, "shuffle_shards": window, "last": last}
        rules, expected_rules = Rules(**how), epoch_oracle.Rules(**how)
        regroup = partial(BUCKETS.regroup, sizes)
        in_memory = partial(epoch_oracle.by_shape, BUCKETS, sizes, expected_rules)
        history = []
        for _ in range(3):
            world, batch = map(int, rng.integers(1, 5, 2))
            cut = (world * batch, world, int(rng.integers(1, 5)))
            if shards.sum() < cut[0]:
                break
            how = {"epoch": 2, "history": history}
            geometry = epoch_oracle.Geometry(*cut)
            expected = epoch_oracle.epoch_order(
                shards, geometry, expected_rules, regroup=in_memory, **how
            )
            order = EpochOrder(shards, Geometry(*cut), rules, regroup=regroup, **how)
            assert order.steps == expected.steps
            for rank, workers in itertools.product(range(world), (1, 2)):
                batches = epoch_oracle.rank_batches(expected, rank, world)
                own = order.batches(rank, world, worker=workers - 1, workers=workers)
                assert list(map(list, own)) == list(map(list, batches[workers - 1 :: workers]))
            history = [*history, [*cut, int(rng.integers(order.steps + 1))]]


# --- errors


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"area": 100, "pixels": 100},
        {"area": 63, "multiple": 8},
        {"area": 64, "multiple": 0},
        {"area": 4096, "max_ratio": 0.5},
        {"area": 64 * 128, "max_ratio": 1.5},  # 64 x 128 and 128 x 64
        {"pixels": 0},
    ],
)
def test_buckets_that_make_no_sense(options):
    """Wrong numbers are refused when the buckets are made."""
    with pytest.raises(ValueError, match="expected"):
        Buckets(**options)


@pytest.mark.parametrize(
    ("buckets", "options", "message"),
    [
        (Buckets(pixels=3000), {}, "twice the largest image"),
        (Buckets(pixels=12_000), {"decoder": 16}, "without a size"),
        (Buckets(pixels=12_000), {"weights": (1,)}, "no weights"),
        (BUCKETS, {"max_world_size": 4}, "no max_world_size"),
        (BUCKETS, {"decoder": ImageDecoder(views=[View(16)])}, "one view of each image with area="),
        (BUCKETS, {"decoder": ImageDecoder(upright=False)}, "an upright decoder"),
    ],
)
def test_what_does_not_go_with_buckets(folder, buckets, options, message):
    """What cannot be combined is refused when the loader is made."""
    with pytest.raises(ValueError, match=message):
        ranks(folder, 1, batch=8, buckets=buckets, **options)


def test_a_sample_without_a_jpeg_is_named(tmp_path):
    """Buckets need the size of each image; the message says how to leave other samples out."""
    samples = [{"__key__": "a", "jpg": make_jpeg(1)}, {"__key__": "b", "png": b"kept"}]
    dataset = PCRDataset(write(tmp_path, samples))
    with pytest.raises(ValueError, match=r"none in 'b': .* dataset\.subset\(.*\.all\(1\)\)"):
        PCRLoader(dataset, 1, buckets=BUCKETS)
    assert len(PCRLoader(dataset.subset(dataset.sizes.all(1)), 1, buckets=BUCKETS)) == 1


def test_kept_files_of_other_formats_have_buckets(tmp_path):
    """A PNG that was kept has a size, too: mixed sets go into batches by shape and by pixels."""
    files = {f"{n}.jpg": make_jpeg(n, 40 + n, 60) for n in range(8)}
    files |= {
        f"{n}.png": saved(Image.fromarray(make_pixels(n, 60, 40 + n)), "PNG") for n in range(8, 12)
    }
    source = write_files(tmp_path / "source", files)
    encode(source, tmp_path / "pcr", EncodeOptions(on_error="keep"), workers=1)
    dataset = PCRDataset(tmp_path / "pcr", decoder=ImageDecoder(None), fields=("jpg",))
    for buckets in (Buckets(pixels=9000), Buckets(area=64 * 64, multiple=8)):
        batches = list(PCRLoader(dataset, 3, buckets=buckets, drop_last=False))
        assert sum(len(images) for (images,) in batches) == 12
