"""PCRDataset: exact epochs, true lengths, batches as a job wants them; the same whatever starts the workers."""

import collections
import copy
import itertools
import pickle
import random
import shutil
import traceback
import warnings

import fsspec
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from pcrshard import (
    EpochOptions,
    ImageDecoder,
    PCRDataset,
    ReadOptions,
    ScanLevel,
    Shard,
    ShardWriter,
)
from pcrshard.errors import CorruptPiece, ScanUnavailable
from pcrshard.jpeg.crops import Draws
from pcrshard.testing import CountingFS, make_jpeg
from pcrshard.training.epoch_order import Geometry, Rules, epoch_order

fsspec.register_implementation("counting", CountingFS, clobber=True)
SAMPLES, ROWS = 60, 6


def write(folder, samples, rows=ROWS, **options):
    """A dataset of these samples."""
    with ShardWriter(str(folder), samples_per_shard=rows, **options) as writer:
        for sample in samples:
            writer.write(sample)
    return str(folder)


def numbered(count, first=0):
    """Small images; ``cls`` is the sample's id, and 101 of them would have the same pixels."""
    jpegs = [make_jpeg(i, 20 + i % 3, 24 - i % 4, quality=90) for i in range(12)]
    return [
        {"__key__": f"k{i:03d}", "jpg": jpegs[i % 12], "cls": i}
        for i in range(first, first + count)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """10 shards of 6."""
    return write(tmp_path_factory.mktemp("numbered"), numbered(SAMPLES))


def ids(batches):
    """The ``cls`` of all samples, batch by batch."""
    return [batch["cls"].tolist() for batch in batches]


def planned(batch, epoch=0, world=1, rank=0, **rules):
    """The ids of a rank's batches, by the plan."""
    order = epoch_order(
        [ROWS] * (SAMPLES // ROWS), Geometry(batch * world, world), Rules(**rules), epoch=epoch
    )
    rows = [order.step(step) for step in range(order.steps)]
    return [row.reshape(world, -1)[rank].tolist() for row in rows]


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))]
)
def test_copies(folder, tmp_path, duplicate):
    """A dataset that is copied, or sent to a job as submitit does, goes on where its original was, and for itself."""
    read = ReadOptions(cache_dir=str(tmp_path), cache_bytes=1 << 24)
    dataset = PCRDataset(
        folder,
        4,
        scan=ScanLevel(2),
        image=ImageDecoder(8, "random"),
        epoch=EpochOptions(seed=3),
        read=read,
    )
    dataset.set_epoch(1)
    taken = [batch["cls"].tolist() for batch in itertools.islice(dataset, 2)]
    other = duplicate(dataset)
    other.load_state_dict(dataset.state_dict(2))
    rest = ids(other)
    dataset.set_epoch(1)
    assert taken + rest == ids(dataset)
    other.set_epoch(5)
    assert (dataset.epoch, other.epoch) == (1, 5)


# --- epochs


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_the_order_is_the_plan_whatever_the_workers(folder, workers):
    """Batches come in the order of the plan for any number of workers, and the loader goes on to the next epoch by itself."""
    dataset = PCRDataset(folder, 4, epoch=EpochOptions(seed=3))
    loader = dataset.loader(workers)
    seen = []
    for epoch in range(3):
        assert (dataset.epoch, len(dataset), len(loader)) == (epoch, 15, 15)
        seen.append(ids(loader))
        assert seen[-1] == planned(4, epoch, seed=3)
        assert sorted(itertools.chain(*seen[-1])) == list(range(SAMPLES))
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_start_methods(folder, context):
    """Persistent workers of any start method know the rank of their parent, and hear of the next epoch and a new scan."""
    level = ScanLevel(1)
    dataset = PCRDataset(folder, 5, scan=level, image=ImageDecoder(8, "random"), rank=(1, 2))
    loader = dataset.loader(2, persistent_workers=True, multiprocessing_context=context)
    same = PCRDataset(folder, 5, scan=1, image=ImageDecoder(8, "random"), rank=(1, 2))
    for epoch, scan in enumerate((1, 5)):
        level.value = same.scan = scan
        batches = list(loader)
        assert ids(batches) == planned(5, epoch, 2, 1)
        same.set_epoch(epoch)
        expected = torch.cat([batch["jpg"] for batch in same])
        assert torch.equal(torch.cat([batch["jpg"] for batch in batches]), expected)
    dataset.set_epoch(7)
    assert ids(loader) == planned(5, 7, 2, 1)


@pytest.mark.parametrize(("world", "size", "last", "batches"), [(1, 7, "drop", 8), (2, 7, "drop", 4), (3, 7, "drop", 2), (4, 7, "drop", 2), (2, 7, "pad", 5), (4, 7, "pad", 3), (4, 9, "pad", 2)])  # fmt: skip
def test_ranks_have_equal_batches(folder, world, size, last, batches):
    """Every rank gets as many batches as the others, all of one size; with ``drop`` no sample comes twice, with ``pad`` each comes."""
    options = EpochOptions(seed=1, last=last)
    parts = [PCRDataset(folder, size, epoch=options, rank=(rank, world)) for rank in range(world)]
    seen = [ids(part) for part in parts]
    assert [len(part) for part in parts] == [len(one) for one in seen] == [batches] * world
    assert {len(batch) for one in seen for batch in one} == {size}
    counts = collections.Counter(number for one in seen for batch in one for number in batch)
    assert max(counts.values()) == 1 if last == "drop" else len(counts) == SAMPLES
    assert sum(counts.values()) == batches * world * size


@pytest.mark.parametrize(("world", "size"), [(1, 7), (2, 7), (3, 19), (4, 14), (7, 60)])
def test_short_epochs_have_each_sample_once(folder, world, size):
    """For evaluation: each sample exactly once over the ranks, in the dataset's order if wanted, and the length is true on each."""
    parts = [
        PCRDataset(
            folder,
            size,
            epoch=EpochOptions(last="short", shuffle_shards=0, phases=1),
            rank=(rank, world),
        )
        for rank in range(world)
    ]
    seen = [ids(part) for part in parts]
    assert [len(part) for part in parts] == list(map(len, seen))
    assert sorted(number for one in seen for batch in one for number in batch) == list(
        range(SAMPLES)
    )
    if world == 1:
        assert list(itertools.chain(*seen[0])) == list(range(SAMPLES))


def test_a_stock_dataloader_does_too(folder):
    """``DataLoader(dataset, batch_size=None)`` gives the same; ``set_epoch`` is then the caller's."""
    dataset = PCRDataset(folder, 4)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    for epoch in (0, 4):
        dataset.set_epoch(epoch)
        assert len(loader) == 15
        assert ids(loader) == planned(4, epoch)


def test_the_same_epoch_twice_is_told(folder):
    """Who forgets ``set_epoch`` is told that the order is the same again."""
    dataset = PCRDataset(folder, 4)
    list(dataset)
    with pytest.warns(UserWarning, match=r"epoch 0 is read again.*set_epoch\(1\)"):
        list(dataset)
    dataset.set_epoch(1)
    list(dataset)
    dataset.set_epoch(0)
    list(dataset)


def test_no_warning_where_the_same_is_wanted(folder):
    """Evaluation in the dataset's order, and an epoch that was left early, may be read again."""
    evaluation = PCRDataset(folder, 4, epoch=EpochOptions(shuffle_shards=0))
    assert ids(evaluation) == ids(evaluation)
    training = PCRDataset(folder, 4)
    first = ids(itertools.islice(training, 3))
    assert ids(training)[:3] == first


def test_leaving_early_and_going_on(folder):
    """An epoch that is left early begins anew; with ``set_epoch`` nothing of it remains."""
    dataset = PCRDataset(folder, 4)
    loader = dataset.loader(2)
    for _, _batch in zip(range(5), loader, strict=False):
        pass
    dataset.set_epoch(2)
    assert loader.state_dict() == PCRDataset(folder, 4).state_dict() | {"epoch": 2}
    assert ids(loader) == planned(4, 2)
    assert dataset.epoch == 3


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
)
def test_a_loop_that_stops_after_the_last_batch_goes_on_to_the_next_epoch(folder, options):
    """Lightning asks for len() batches and no more; its epochs are those of a plain loop, and a state saved behind the last batch is good."""
    plain, counted = (
        PCRDataset(folder, 4, epoch=EpochOptions(seed=7)).loader(**options) for _ in range(2)
    )
    expected = [ids(plain) for _ in range(3)]
    assert expected[0] != expected[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [ids(itertools.islice(counted, len(counted))) for _ in range(3)] == expected
    other = PCRDataset(folder, 4, epoch=EpochOptions(seed=7)).loader(**options)
    other.load_state_dict(counted.state_dict())
    assert ids(other) == []
    assert ids(other) == ids(plain)


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_that_contradict_are_refused(folder, monkeypatch, workers):
    """A dataset made before the launcher's rank was known raises where it is read, unless its rank was given."""
    early = PCRDataset(folder, 4)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="make it after init_process_group"):
        list(early.loader(workers))
    assert ids(PCRDataset(folder, 4).loader(workers)) == planned(4, world=2, rank=1)
    assert ids(PCRDataset(folder, 4, rank=(0, 1)).loader(workers)) == planned(4)


def test_a_contradiction_is_seen_before_workers_are_spawned(folder, monkeypatch):
    """A spawned worker knows nothing of its parent's process group, so the parent looks."""
    early = PCRDataset(folder, 4)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="make it after init_process_group"):
        next(iter(early.loader(1, multiprocessing_context="spawn")))


# --- mixtures


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Datasets of 24 and 12 samples; their ``cls`` run on."""
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    return [write(folders[0], numbered(24)), write(folders[1], numbered(12, 24))]


def test_weighted_mixing(two):
    """Weights are shares of each epoch, and over epochs a dataset's samples come equally often."""
    dataset = PCRDataset(two, 5, epoch=EpochOptions(weights=(1, 3), samples=40))
    counts = collections.Counter()
    for epoch in range(6):
        dataset.set_epoch(epoch)
        seen = list(itertools.chain(*ids(dataset.loader(epoch % 3))))
        assert len(seen) == 40
        assert sum(number < 24 for number in seen) == 10
        counts.update(seen)
    assert {counts[number] for number in range(24)} <= {2, 3}
    assert {counts[number] for number in range(24, 36)} == {15}


def test_several_datasets_without_weights(two):
    """Without weights the datasets are one: each sample comes once."""
    assert sorted(itertools.chain(*ids(PCRDataset(two, 4)))) == list(range(36))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": (1,)}, "as many weights as datasets"),
        ({"weights": (1, -1)}, "expected weights"),
        ({"weights": (0, 0)}, "expected weights"),
        ({"weights": (1, 1), "samples": 0}, "samples"),
        ({"samples": 10}, "weights"),
        ({"slots": 3}, "multiple of slots"),
        ({"slots": 0}, "slots"),
        ({"phases": 0}, "phases"),
        ({"last": "keep"}, "expected last"),
        ({"seed": -1}, "expected seed"),
        ({"shuffle_shards": -1}, "expected shuffle_shards"),
    ],
)
def test_options_that_make_no_sense(two, options, message):
    """Wrong options are refused when the dataset is made."""
    with pytest.raises(ValueError, match=message):
        PCRDataset(two, 4, epoch=EpochOptions(**options))


@pytest.mark.parametrize("size", [0, -1, 37, 2.5])
def test_batch_sizes_that_make_no_sense(two, size):
    """So is a batch that the dataset cannot fill."""
    with pytest.raises(ValueError, match="expected"):
        PCRDataset(two, size)


@pytest.mark.parametrize("scan", [0, 11, -1])
def test_scans_that_are_not_there(folder, scan):
    """So is a scan that the shards do not have."""
    with pytest.raises((ScanUnavailable, ValueError), match="scan"):
        PCRDataset(folder, 4, scan=scan)


# --- batches


def test_a_batch_is_a_dict(dataset):
    """Fields come by their extension: images uint8 NCHW, classes int64, the rest in lists; classes have names."""
    data = PCRDataset(str(dataset), 6, scan=3, image=ImageDecoder((20, 24), "center"))
    assert data.classes == ("cat", "dog")
    assert data.num_samples == 24
    for batch in data:
        assert set(batch) == {"__key__", "jpg", "cls"}
        assert (batch["jpg"].shape, batch["jpg"].dtype) == ((6, 3, 20, 24), torch.uint8)
        assert (batch["cls"].shape, batch["cls"].dtype) == ((6,), torch.int64)
        names = [data.classes[number] for number in batch["cls"]]
        assert [key.split("/")[0] for key in batch["__key__"]] == names


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (6, 3, 16, 16)),
        ({"layout": "hwc"}, (6, 16, 16, 3)),
        ({"colour": "gray"}, (6, 1, 16, 16)),
        ({"colour": "gray", "layout": "hwc"}, (6, 16, 16, 1)),
    ],
)
def test_pixels_are_the_decoders(dataset, options, shape):
    """A batch holds what the decoder gives for each image alone, gray and CMYK ones too, in every layout."""
    decoder = ImageDecoder(16, "center", **options)
    for batch in PCRDataset(str(dataset), 6, scan=4, image=decoder):
        assert batch["jpg"].shape == shape
        for key, pixels in zip(batch["__key__"], batch["jpg"], strict=True):
            assert np.array_equal(pixels, decoder(stored(dataset, key, 4)["jpg"], random.Random(0)))


def stored(folder, key, scan):
    """A sample as stored."""
    return PCRDataset(str(folder), 1).sample(key, scan)


def test_ragged_images_come_in_a_list(dataset):
    """Without a size each image keeps its own."""
    batch = next(iter(PCRDataset(str(dataset), 6, image=ImageDecoder())))
    for key, pixels in zip(batch["__key__"], batch["jpg"], strict=True):
        number = int(key.split("/")[1])
        assert pixels.shape == (3, 40 + number, 64 - number)


def test_without_a_decoder_images_stay_jpegs(dataset):
    """Whoever decodes elsewhere gets the bytes of the scan."""
    batch = next(iter(PCRDataset(str(dataset), 6, scan=2)))
    assert batch["jpg"] == [stored(dataset, key, 2)["jpg"] for key in batch["__key__"]]


def test_a_batch_may_be_a_tuple(dataset):
    """``fields`` picks and orders; what is not named is not decoded."""
    calls = []
    decoder = Counting(calls)
    for images, classes, keys in PCRDataset(
        str(dataset), 8, image=decoder, fields=("jpg", "cls", "__key__")
    ):
        assert (images.shape, classes.shape, len(keys)) == ((8, 3, 8, 8), (8,), 8)
    assert len(calls) == 24
    assert [len(batch) for batch in PCRDataset(str(dataset), 8, image=decoder, fields=["cls"])] == [
        1,
        1,
        1,
    ]
    assert len(calls) == 24


class Counting(ImageDecoder):
    """Counts what it decodes."""

    def __init__(self, calls):
        super().__init__(8, "center")
        object.__setattr__(self, "calls", calls)

    def __call__(self, *args, **options):
        self.calls.append(1)
        return super().__call__(*args, **options)


def test_a_field_that_is_not_there(dataset):
    """A field that no sample has is an error that names it."""
    with pytest.raises(KeyError, match="caption"):
        next(iter(PCRDataset(str(dataset), 6, fields=("jpg", "caption"))))
    with pytest.raises(TypeError, match=r"write \('jpg',\)"):
        PCRDataset(str(dataset), 6, fields="jpg")


def test_transform_takes_samples(dataset):
    """``transform`` has each sample as a dict, fields as stored and images decoded; torch collates what it makes."""

    def transform(sample):
        assert isinstance(sample["cls"], bytes)
        return sample["jpg"].astype(np.float32) / 255, int(sample["cls"]), len(sample["__key__"])

    for images, classes, lengths in PCRDataset(
        str(dataset), 6, image=ImageDecoder(8, "center"), transform=transform
    ).loader(1):
        assert (images.shape, images.dtype, float(images.max()) <= 1) == (
            (6, 3, 8, 8),
            torch.float32,
            True,
        )
        assert classes.shape == lengths.shape == (6,)


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Samples with other fields, some missing; the dataset's order."""
    samples = [
        {
            "__key__": f"s{i}",
            "jpg": make_jpeg(i, 16, 16),
            "meta.json": {"i": i},
            "txt": f"text {i}",
            "count.cls": i,
            "npy": b"raw",
        }
        for i in range(4)
    ]
    for name in ("txt", "count.cls", "meta.json"):
        del samples[1][name]
    del samples[2]["jpg"]
    samples[2]["txt"] = "no image"
    return write(tmp_path_factory.mktemp("odd"), samples, rows=2)


KEPT = EpochOptions(shuffle_shards=0, phases=1)


def test_missing_fields_are_none(odd):
    """Where samples lack a field the batch has a list with None there, the others converted as always."""
    first, second = PCRDataset(odd, 2, image=ImageDecoder(8), epoch=KEPT)
    assert first["meta.json"] == [{"i": 0}, None]
    assert first["txt"] == ["text 0", None]
    assert first["count.cls"] == [0, None]
    assert first["jpg"].shape == (2, 3, 8, 8)
    assert second["jpg"][0] is None
    assert (second["jpg"][1].shape, second["jpg"][1].dtype) == ((3, 8, 8), torch.uint8)
    assert second["count.cls"].tolist() == [2, 3]
    assert second["txt"] == ["no image", "text 3"]
    assert first["npy"] == second["npy"] == [b"raw", b"raw"]


def test_missing_fields_of_a_tuple_are_an_error(odd):
    """A tuple promises its fields; the sample that lacks one is named."""
    with pytest.raises(KeyError, match=r"s1.*'txt'"):
        list(PCRDataset(odd, 2, fields=("txt",), epoch=KEPT))


def test_values_that_do_not_fit_are_named(tmp_path):
    """A class that is no number is an error that names the sample and the field."""
    samples = [
        sample | {"cls": b"cat"} if sample["__key__"] == "k002" else sample
        for sample in numbered(4)
    ]
    with pytest.raises(ValueError, match=r"(k002.*cls|cls.*k002)"):
        list(PCRDataset(write(tmp_path / "d", samples), 4))


def test_several_images_a_sample(tmp_path):
    """Two image fields are two tensors, each with its own pixels, and the same crop."""
    samples = [
        {
            "__key__": f"s{i}",
            "left.jpg": make_jpeg(i, 16, 16),
            "right.jpg": make_jpeg(i + 50, 16, 16),
            "cls": i,
        }
        for i in range(6)
    ]
    folder = write(tmp_path / "stereo", samples, rows=3)
    decoder = ImageDecoder(8, "random", flip=0.5)
    for batch in PCRDataset(folder, 2, image=decoder):
        for field in ("left.jpg", "right.jpg"):
            expected = [
                decode(decoder, stored(folder, key, "full")[field], int(key[1:]))
                for key in batch["__key__"]
            ]
            assert np.array_equal(batch[field], np.stack(expected))
    only = PCRDataset(folder, 2, image=decoder, fields=("right.jpg", "cls"))
    assert all(images.shape == (2, 3, 8, 8) for images, _ in only)


def decode(decoder, jpeg, number, seed=0, epoch=0):
    """What the dataset's promise says: draws depend on seed, epoch and sample only."""
    return decoder(jpeg, Draws(seed, epoch, number))


@pytest.mark.parametrize("seed", range(4))
def test_datasets_of_other_fields_mix(tmp_path, folder, seed):
    """In a batch of samples with one image and with two, every image is its own."""
    samples = [
        {"__key__": f"s{i}", "jpg": make_jpeg(i, 16, 16), "mask.jpg": make_jpeg(i + 50, 16, 16)}
        for i in range(6)
    ]
    urls = [folder, write(tmp_path / "masks", samples, rows=3)]
    data = PCRDataset(
        urls,
        6,
        image=ImageDecoder(8),
        epoch=EpochOptions(seed, weights=(1, 1), samples=12, phases=1),
    )
    seen = 0
    for batch in data:
        for i, key in enumerate(batch["__key__"]):
            sample = stored(urls[key[0] == "s"], key, "full")
            for field in ("jpg", "mask.jpg"):
                found = batch.get(field, [None] * 6)[i]
                assert (found is None) == (field not in sample)
                assert found is None or np.array_equal(
                    found, ImageDecoder(8)(sample[field], random.Random(0))
                )
                seen += found is not None
    assert seen == 6 + 2 * 6


# --- augmentation


@pytest.mark.parametrize("scan", [1, 5, "full"])
def test_draws_depend_on_seed_epoch_and_sample_only(folder, scan):
    """Crops and flips are the same for any workers, ranks, batch size and scan, and other ones in another epoch or for another seed."""
    decoder = ImageDecoder(12, "random", flip=0.5)
    seen = collections.defaultdict(list)
    for size, workers, world, seed, epoch in (
        (4, 0, 1, 0, 0),
        (10, 2, 1, 0, 0),
        (5, 1, 2, 0, 0),
        (4, 0, 1, 1, 0),
        (4, 0, 1, 0, 1),
    ):
        for rank in range(world):
            data = PCRDataset(
                folder,
                size,
                scan=scan,
                image=decoder,
                epoch=EpochOptions(seed=seed),
                rank=(rank, world),
            )
            data.set_epoch(epoch)
            for batch in data.loader(workers):
                for number, pixels in zip(batch["cls"].tolist(), batch["jpg"].numpy(), strict=True):
                    seen[seed, epoch, number].append(pixels)
    whole = PCRDataset(folder, SAMPLES, scan=scan, epoch=KEPT)
    jpegs = next(iter(whole))["jpg"]
    for (seed, epoch, number), found in seen.items():
        expected = decode(decoder, jpegs[number], number, seed, epoch)
        assert all(np.array_equal(pixels, expected) for pixels in found)
    assert {len(found) for (seed, epoch, _), found in seen.items() if (seed, epoch) == (0, 0)} == {
        3
    }
    for other in ((1, 0), (0, 1)):
        same = sum(
            np.array_equal(seen[(*other, number)][0], seen[0, 0, number][0])
            for number in range(SAMPLES)
        )
        assert same < SAMPLES / 10


# --- errors, random access


@pytest.fixture
def damaged(folder, tmp_path):
    """A copy with one flipped bit in scan 2 of k008."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "data-000001.tar"
    with Shard(str(path)).load(2) as prefix:
        offset = prefix.starts[2][1] + prefix.base
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    return str(tmp_path)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("image", [None, ImageDecoder(8)])
def test_damage_is_named(damaged, workers, image):
    """A damaged sample ends the epoch with an error that names shard, key and scan, out of a worker too; a lower scan is unharmed."""
    with pytest.raises(CorruptPiece, match=r"data-000001\.tar") as caught:
        list(PCRDataset(damaged, 4, scan=2, image=image).loader(workers))
    traceback.clear_frames(
        caught.tb
    )  # or torch takes five seconds to end the workers of a loader that is garbage
    assert "k008" in str(caught.value)
    assert "scan=2" in str(caught.value)
    assert len(list(PCRDataset(damaged, 4, scan=1, image=image).loader(workers))) == 15


def test_a_missing_shard_is_named(folder, tmp_path):
    """A shard that is gone ends the epoch; it is never a shorter one."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "data-000003.tar").unlink()
    with pytest.raises(Exception, match=r"data-000003\.tar"):
        list(PCRDataset(str(tmp_path), 4))


def test_samples_by_id_and_key(folder):
    """Any sample by its id or key, as stored, at the dataset's scan or another; one prefix is read, and for a key indexes."""
    dataset = PCRDataset(f"counting://{folder}", 4, scan=2)
    entries = dataset.shards.entries
    for number, scan in ((0, None), (59, None), (30, 5), (7, "full")):
        CountingFS.requests.clear()
        sample = dataset.sample(number, scan)
        assert (sample["__key__"], int(sample["cls"])) == (f"k{number:03d}", number)
        assert [(a, b) for _, a, b in CountingFS.requests] == [
            (0, entries[number // ROWS].prefix_stop(scan or 2))
        ]
        CountingFS.requests.clear()
        assert dataset.sample(f"k{number:03d}", scan) == sample
        assert sum(b - a > 4096 for _, a, b in CountingFS.requests) <= 1
        assert (
            sample["jpg"]
            == Shard(f"{folder}/data-{number // ROWS:06d}.tar").sample(number % ROWS, scan or 2)[
                "jpg"
            ]
        )
    assert dataset.sample(np.int64(12)) == dataset.sample(12)
    level = ScanLevel(3)
    assert PCRDataset(folder, 4, scan=level).sample(5) == PCRDataset(folder, 4).sample(5, 3)


@pytest.mark.parametrize(("key", "error"), [(60, IndexError), (-1, IndexError), ("k060", KeyError)])
def test_samples_that_are_not_there(folder, key, error):
    """What is not there is an IndexError or a KeyError, as of a list and a dict."""
    with pytest.raises(error, match=str(key)):
        PCRDataset(folder, 4).sample(key)
    with pytest.raises(TypeError):
        PCRDataset(folder, 4).sample(1.0)


def test_a_scan_of_zero_is_no_default(folder):
    """A wrong scan is an error for one sample, too."""
    with pytest.raises((ScanUnavailable, ValueError), match="scan"):
        PCRDataset(folder, 4).sample(1, 0)


def test_shards_by_position_and_key(folder):
    """``Shard[i]`` and ``Shard[key]`` are full samples, ``len`` counts them, and iteration ends."""
    shard = Shard(f"{folder}/data-000002.tar")
    assert len(shard) == ROWS
    assert [int(sample["cls"]) for sample in shard] == list(range(12, 18))
    assert shard[0] == shard["k012"] == shard[-6]
    assert shard[-1]["__key__"] == "k017"
    for wrong, error in (
        (6, IndexError),
        (-7, IndexError),
        ("k018", KeyError),
        (1.5, TypeError),
        (slice(2), TypeError),
    ):
        with pytest.raises(error):
            shard[wrong]


def test_read_options_arrive(folder, tmp_path):
    """Cache and prefetch work in workers: a second epoch reads no shard from its source."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    read = ReadOptions(cache_dir=str(tmp_path / "cache"), cache_bytes=1 << 30, prefetch=1)
    dataset = PCRDataset(str(copy), 4, scan=2, read=read)
    loader = dataset.loader(2)
    list(loader)
    for path in copy.glob("*.tar"):
        path.write_bytes(b"")
    assert ids(loader) == planned(4, 1)


def test_batches_out_of_order_are_refused(folder):
    """A loader that gives batches as they come could not be resumed exactly."""
    with pytest.raises(ValueError, match="in_order"):
        PCRDataset(folder, 4).loader(2, in_order=False)


def test_no_warning_about_lengths(folder):
    """A length that was asked for in a resumed epoch does not hold for the next, and torch does not complain."""
    loader = PCRDataset(folder, 4).loader()
    state = [loader.state_dict() for _ in loader][9]
    loader = PCRDataset(folder, 4).loader()
    loader.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(loader) == 5
        # Not list(loader), which asks for the length.
        assert [sum(1 for _ in loader), sum(1 for _ in loader)] == [5, 15]


@pytest.mark.parametrize("workers", [0, 1])
def test_setting_the_loaded_epoch_keeps_its_place(folder, workers):
    """The usual loop sets the epoch also where it resumes: that must not begin the epoch anew, but a second call does."""
    reference = [batch["__key__"] for batch in PCRDataset(folder, 4).loader()]
    first = PCRDataset(folder, 4).loader()
    for _ in zip(range(2), first, strict=False):
        pass
    dataset = PCRDataset(folder, 4)
    dataset.load_state_dict(first.state_dict())
    dataset.set_epoch(0)
    assert [batch["__key__"] for batch in dataset.loader(workers)] == reference[2:]
    dataset.set_epoch(0)
    assert [batch["__key__"] for batch in dataset.loader(workers)] == reference
