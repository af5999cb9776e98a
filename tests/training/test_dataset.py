"""PCRDataset: exact epochs, true lengths, batches as a job wants them.

The same whatever starts the workers.
"""

import collections
import contextlib
import copy
import itertools
import pickle
import shutil
import traceback
import tracemalloc

import fsspec
import numpy as np
import pytest
import torch
from support import pieces
from torch.utils.data import DataLoader

from pcrshard import (
    EpochOptions,
    ImageDecoder,
    PCRDataset,
    ReadOptions,
    ScanLevel,
    Shard,
    ShardWriter,
    stage,
)
from pcrshard.errors import CorruptPiece, ScanUnavailable
from pcrshard.native.pool import draw_key
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
    """Small images; ``cls`` is the sample's id, and no two samples of a dataset look alike."""
    numbers = range(first, first + count)
    jpegs = [make_jpeg(i, 20 + i % 3, 24 - i % 4, quality=90) for i in numbers]
    assert len(set(jpegs)) == count
    return [
        {"__key__": f"k{i:03d}", "jpg": jpeg, "cls": i}
        for i, jpeg in zip(numbers, jpegs, strict=True)
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
    """A dataset that is copied, or sent to a job as submitit does, goes on where its original was,
    and for itself.
    """
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
    """Batches come in the order of the plan for any number of workers.

    And the loader goes on to the next epoch by itself.
    """
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
    """Persistent workers of any start method know the rank of their parent.

    And hear of the next epoch and a new scan.
    """
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


@pytest.mark.parametrize(
    ("world", "size", "last", "batches"),
    [
        (1, 7, "drop", 8),
        (2, 7, "drop", 4),
        (3, 7, "drop", 2),
        (4, 7, "drop", 2),
        (2, 7, "pad", 5),
        (4, 7, "pad", 3),
        (4, 9, "pad", 2),
    ],
)
def test_ranks_have_equal_batches(folder, world, size, last, batches):
    """Every rank gets as many batches as the others, all of one size.

    With ``drop`` no sample comes twice, with ``pad`` each comes.
    """
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
    """For evaluation: each sample exactly once over the ranks, in the dataset's order if wanted,
    and the length is true on each.
    """
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
    """``DataLoader(dataset, batch_size=None)`` gives the same.

    ``set_epoch`` is then the caller's.
    """
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


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_that_contradict_are_refused(folder, monkeypatch, workers):
    """A dataset made before the launcher's rank was known raises where it is read, unless its rank
    was given.
    """
    early = PCRDataset(folder, 4)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="make it after init_process_group"):
        list(early.loader(workers))
    assert ids(PCRDataset(folder, 4).loader(workers)) == planned(4, world=2, rank=1)
    assert ids(PCRDataset(folder, 4, rank=(0, 1)).loader(workers)) == planned(4)


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


KEPT = EpochOptions(shuffle_shards=0, phases=1)


def decode(decoder, jpeg, number, seed=0, epoch=0):
    """What the dataset's promise says: draws depend on seed, epoch and sample only."""
    return decoder(jpeg, draw_key(seed, epoch, number))


# --- augmentation


@pytest.mark.parametrize("scan", [1, 5, "full"])
def test_draws_depend_on_seed_epoch_and_sample_only(folder, scan):
    """Crops and flips are the same for any workers, ranks, batch size and scan.

    And other ones in another epoch or for another seed.
    """
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
    offset = int(pieces(Shard(str(path))).starts[1, 2, 0])
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    return str(tmp_path)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("image", [None, ImageDecoder(8)])
def test_damage_is_named(damaged, workers, image):
    """A damaged sample ends the epoch with an error that names shard, key and scan, out of a worker
    too; a lower scan is unharmed.
    """
    with pytest.raises(CorruptPiece, match=r"data-000001\.tar") as caught:
        list(PCRDataset(damaged, 4, scan=2, image=image).loader(workers))
    traceback.clear_frames(
        caught.tb
    )  # or torch takes five seconds to end the workers of a loader that is garbage
    assert "k008" in str(caught.value)
    assert "scan=2" in str(caught.value)
    assert str(caught.value).splitlines()[-1].count("shard=") == 1
    assert len(list(PCRDataset(damaged, 4, scan=1, image=image).loader(workers))) == 15


def test_a_missing_shard_is_named(folder, tmp_path):
    """A shard that is gone ends the epoch; it is never a shorter one."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "data-000003.tar").unlink()
    with pytest.raises(Exception, match=r"data-000003\.tar"):
        list(PCRDataset(str(tmp_path), 4))


def test_samples_by_id_and_key(folder):
    """Any sample by its id or key, as stored, at the dataset's scan or another.

    One prefix is read, and for a key indexes.
    """
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
    """Scan 0 is labels without pixels, and a wrong scan is an error, for one sample, too."""
    dataset = PCRDataset(folder, 4)
    assert dataset.sample(1, 0).keys() == dataset.sample(1, 1).keys() - {"jpg"}
    with pytest.raises((ScanUnavailable, ValueError), match="scan"):
        dataset.sample(1, -1)


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


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_batches_are_refused(folder, workers):
    """A DataLoader that was not told batch_size=None would give (1, N, ...)."""
    dataset = PCRDataset(folder, 4)
    loader = DataLoader(dataset, num_workers=workers)
    with pytest.raises(TypeError, match="batch_size=None"):
        next(iter(loader))
    assert len(next(iter(DataLoader(dataset, batch_size=None, num_workers=workers)))["cls"]) == 4


@pytest.mark.parametrize("size", [24, (16, 32), [16, 32], np.int64(24)])
def test_a_size_is_a_decoder(folder, size):
    """The whole image at that size, as by ImageDecoder(size)."""
    made = PCRDataset(folder, 4, image=size, fields=("jpg",))
    decoder = ImageDecoder(tuple(size) if isinstance(size, tuple | list) else int(size))
    [(images,)] = list(itertools.islice(made, 1))
    [(expected,)] = list(itertools.islice(PCRDataset(folder, 4, image=decoder, fields=("jpg",)), 1))
    assert torch.equal(images, expected)


@pytest.mark.parametrize("image", ["224", True, 2.5, (1, 2, 3), lambda jpeg: "jpeg"])
def test_what_is_no_decoder_is_refused(folder, image):
    """At once, and not in a worker."""
    with pytest.raises(TypeError, match="ImageDecoder, a size such as 224"):
        PCRDataset(folder, 4, image=image)


@pytest.mark.parametrize("scan", [11, ScanLevel(11), "5", 2.0, lambda: 11])
def test_bad_scans_are_refused_at_construction(folder, scan):
    """Not by the first worker that reads."""
    with pytest.raises((ScanUnavailable, TypeError), match="1 to 10 or 'full'"):
        PCRDataset(folder, 4, scan=scan)


def test_a_level_beyond_the_dataset_is_refused(folder):
    """The message names the dataset and its scans."""
    level = ScanLevel(1)
    PCRDataset(folder, 4, scan=level)
    with pytest.raises(ScanUnavailable, match=f"1 to 10 or 'full' for {folder}, got 12"):
        level.value = 12


def test_a_staged_copy_says_what_it_holds(folder, tmp_path):
    """Loops and tuners ask for no more, and a level that nobody set is at its highest scan."""
    stage(folder, str(tmp_path), 5)
    level = ScanLevel()
    copy = PCRDataset(str(tmp_path), 4, scan=level)
    assert (copy.max_scan, level.value) == (5, 5)
    assert PCRDataset(folder, 4).max_scan == "full"
    assert len(list(copy)) == len(copy)
    assert copy.shards.origin(folder).scans.highest == "full"


def test_another_dataset_is_no_origin(folder, dataset):
    """Sample ids would mean other samples."""
    with pytest.raises(ValueError, match="that the staged copy comes from"):
        PCRDataset(folder, 4).shards.origin(str(dataset))


def test_a_dataset_describes_itself(folder, dataset):
    """In three lines: what it is, what it reads, what comes next."""
    made = PCRDataset(str(dataset), 4, scan=ScanLevel(2), rank=(1, 2))
    first, second, third = repr(made).splitlines()
    assert first == f"<PCRDataset {dataset}: 24 samples in 4 shards, 2 classes"
    assert second == " reads scan ScanLevel(2), has up to 'full' of 10 scans"
    assert third == " 3 batches of 4 in epoch 0 on rank 1 of 2>"
    assert made.num_classes == len(made.classes) == 2


HUGE = 10**8


@pytest.mark.parametrize(
    "segment",
    [
        [HUGE, 1, 1, 0],
        [HUGE, HUGE, HUGE, 0],
        [24, 1, HUGE, 0],
        [24, 24, (1 << 31) - 1, 0],
        [1 << 40, 1 << 40, 1 << 40, 0],
        [8, 1, 4, 4],
        [8, 3, 4, 0],
        [0, 1, 4, 0],
        [8, 1, 4],
    ],
    ids=str,
)
def test_a_state_that_was_never_one_changes_nothing(dataset, segment):
    """Numbers that no job had are refused at once or harmless; the dataset goes on as it was."""
    loaded = PCRDataset(str(dataset), 8)
    loaded.set_epoch(1)
    expected = [batch["__key__"] for batch in loaded]
    loaded.set_epoch(1)
    state = loaded.state_dict()
    tracemalloc.start()
    with contextlib.suppress(ValueError):
        loaded.load_state_dict(state | {"epoch": 2, "segments": [segment]})
        loaded.set_epoch(1)  # of other numbers it was a state
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20
    assert loaded.state_dict() == state
    assert [batch["__key__"] for batch in loaded] == expected


@pytest.mark.parametrize("state", [None, [], "state", {"epoch": 1}], ids=str)
def test_what_is_no_state_is_refused(dataset, state):
    """Anything else than a state is a ValueError."""
    with pytest.raises(ValueError, match="expected a state"):
        PCRDataset(str(dataset), 8).load_state_dict(state)
