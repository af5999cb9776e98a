"""PCRDataset: samples by number or key, labels and sizes, views, and any DataLoader over it."""

import random
import shutil
import threading
import traceback
import warnings

import numpy as np
import pytest
import torch
from numbered import ids, write
from PIL import Image
from support import CountingFS, saved
from torch.utils.data import DataLoader, Subset

from pcrshard import (
    ImageDecoder,
    PCRDataset,
    PCRLoader,
    ScanLevel,
    Shard,
    View,
    decode_image,
    memory,
    stage,
)
from pcrshard.errors import ScanUnavailable, StorageError
from pcrshard.testing import make_jpeg

SAMPLES, ROWS = 60, 6


# --- samples


def test_samples_by_number_and_key(folder):
    """``len`` counts samples; numbers may be negative or NumPy's, keys are strings, and each sample
    is that of its shard at the dataset's scan, with its label as an int.
    """
    dataset = PCRDataset(folder, scan=2)
    assert len(dataset) == dataset.num_samples == SAMPLES
    for number in (0, 7, 59):
        sample = Shard(f"{folder}/data-{number // ROWS:06d}.tar").sample(number % ROWS, 2)
        expected = sample | {"cls": number}
        for same in (number, np.int64(number), number - SAMPLES, f"k{number:03d}"):
            assert dataset[same] == expected


@pytest.mark.parametrize(
    ("wrong", "error"),
    [(60, IndexError), (-61, IndexError), ("k060", KeyError), (1.0, TypeError), (None, TypeError)],
)
def test_samples_that_are_not_there(folder, wrong, error):
    """A missing sample raises IndexError or KeyError, like a list or a dict."""
    with pytest.raises(error):
        PCRDataset(folder)[wrong]


def test_shards_named_one_by_one(folder, tmp_path):
    """Some shards, as a brace pattern or a list, are a dataset in that order. Classes have names
    if a ``pcr.json`` is next to them; none is needed.
    """
    pattern = f"{folder}/data-{{000001..000003}}.tar"
    some = PCRDataset(pattern, scan=1)
    assert some.classes == PCRDataset(folder).classes
    assert [sample["cls"] for sample in some] == list(range(ROWS, 4 * ROWS))
    for number in (3, 1):
        shutil.copy(f"{folder}/data-{number:06d}.tar", tmp_path)
    alone = PCRDataset([tmp_path / "data-000003.tar", f"{tmp_path}/data-000001.tar"], scan=1)
    expected = [*range(3 * ROWS, 4 * ROWS), *range(ROWS, 2 * ROWS)]
    assert [sample["cls"] for sample in alone] == expected
    read = [int(label) for batch in PCRLoader(alone, 4) for label in batch["cls"]]
    assert sorted(read) == sorted(expected)
    for wrong in ("data-000099", "*"):
        with pytest.raises(StorageError, match="does not have it; name the folder"):
            PCRDataset([f"{folder}/{wrong}.tar"])


def test_a_decoder_gives_tensors(folder):
    """Images are uint8 tensors, the pixels of decode_image; random crops follow torch's seed."""
    dataset = PCRDataset(folder, scan=5, decoder=ImageDecoder(), fields=("jpg", "cls"))
    pixels, label = dataset[11]
    jpeg = PCRDataset(folder, scan=5)[11]["jpg"]
    assert np.array_equal(pixels, decode_image(jpeg, layout="chw"))
    assert label == 11
    dataset = PCRDataset(folder, decoder=ImageDecoder(12, "random", flip=0.5), fields=("jpg",))
    torch.manual_seed(1)
    first, other = dataset[3][0], dataset[3][0]
    torch.manual_seed(1)
    assert torch.equal(dataset[3][0], first)
    assert not torch.equal(first, other)


def same(one, other):
    """Whether two samples or batches are equal, types included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("fields", [None, ("cls", "jpg")], ids=str)
@pytest.mark.parametrize(
    "decoder",
    [
        None,
        8,
        ImageDecoder(),
        ImageDecoder(views=[View(8, 2, crop="center"), View(4, crop=None)]),
        ImageDecoder(8, return_geometry=True),
    ],
    ids=["bytes", "8", "own size", "views", "geometry"],
)
def test_a_transform_gets_the_sample(folder, fields, decoder):
    """``transform`` gets exactly what the sample is without it, here and in a loader: tensors, in a
    dict or a tuple of the fields.
    """
    plain = PCRDataset(folder, decoder=decoder, fields=fields)
    seen = []

    def transform(sample):
        seen.append(sample)
        return sample["cls"] if fields is None else sample[0]

    dataset = PCRDataset(folder, decoder=decoder, fields=fields, transform=transform)
    assert dataset[4] == 4
    assert same(seen, [plain[4]])
    for options in ({"threads": 0}, {"threads": 1}):
        seen.clear()
        batch = next(iter(PCRLoader(dataset, 5, shuffle=False, **options)))
        assert batch.tolist() == [0, 1, 2, 3, 4]
        assert same(seen[:5], [plain[number] for number in range(5)])


def test_a_transform_with_fields_reads_no_others(folder):
    """With ``fields``, a ``transform`` costs nothing for the other ones: no image is decoded."""

    class Refusing(ImageDecoder):
        def __call__(self, jpeg, rng=None):
            raise AssertionError

    dataset = PCRDataset(
        folder, decoder=Refusing(8), fields=("cls",), transform=lambda sample: sample[0] + 1
    )
    assert dataset[3] == 4
    assert next(iter(PCRLoader(dataset, 5, shuffle=False))).tolist() == [1, 2, 3, 4, 5]


def test_a_transform_of_torchvision_changes_the_pixels(folder):
    """A transform of torchvision's v2 works unmodified."""
    v2 = pytest.importorskip("torchvision.transforms.v2")
    plain = PCRDataset(folder, decoder=8)
    dataset = PCRDataset(folder, decoder=8, transform=v2.RandomInvert(p=1))
    assert torch.equal(dataset[3]["jpg"], 255 - plain[3]["jpg"])


@pytest.mark.parametrize("how", [None, {"threads": 1}, {"num_workers": 1}], ids=str)
def test_an_error_of_a_transform_names_the_sample(folder, how):
    """Among a million samples, the traceback says for which one the user's function failed."""

    def transform(sample):
        return sample["box" if sample["cls"] == 7 else "cls"]

    dataset = PCRDataset(folder, decoder=8, transform=transform)
    with pytest.raises(KeyError) as raised:
        dataset[7] if how is None else list(PCRLoader(dataset, 5, **how))
    text = "".join(traceback.format_exception(raised.value))
    assert "data-000001.tar, key=k007)" in text
    traceback.clear_frames(raised.tb)  # otherwise torch takes seconds to end the workers


def test_views_and_geometry_of_one_sample(folder):
    """A decoder with views gives a list of tensors, and its geometry beside them."""
    decoder = ImageDecoder(views=[View(8, 2), View(4, 3)], return_geometry=True)
    sample = PCRDataset(folder, decoder=decoder)[2]
    pixels, geometry = sample["jpg"]
    assert [tuple(each.shape) for each in pixels] == [(2, 3, 8, 8), (3, 3, 4, 4)]
    assert [tuple(each.crop.shape) for each in geometry] == [(2, 4), (3, 4)]


def test_scan_zero_is_labels_without_pixels(folder):
    """At scan 0 a sample has no image, and nothing but indexes is read."""
    dataset = PCRDataset(f"counting://{folder}", scan=0)
    CountingFS.requests.clear()
    assert dataset[1] == {"__key__": "k001", "cls": 1}
    assert ids(PCRLoader(dataset, 60, shuffle=False)) == [list(range(60))]
    stops = {entry.prefix_stop(0) for entry in dataset.shards.entries}
    assert {stop for _, _, stop in CountingFS.requests} <= stops


@pytest.mark.parametrize("scan", [11, ScanLevel(11), "5", 2.0, lambda: 11])
def test_bad_scans_are_refused_at_construction(folder, scan):
    """A bad scan is refused at construction, not by the first worker that reads."""
    with pytest.raises((ScanUnavailable, TypeError, ValueError), match=r"expected .*'full'"):
        PCRDataset(folder, scan=scan)


def test_a_level_is_read_at_each_sample(folder):
    """A changed ScanLevel applies from the next sample on, up or down."""
    level = ScanLevel(1)
    dataset = PCRDataset(folder, scan=level)
    for scan in (2, "full", 1):
        level.value = scan
        assert dataset[5] == PCRDataset(folder, scan=scan)[5]


def test_staged_copies(folder, tmp_path):
    """A staged copy says what it holds, and a level that was not set is at its highest scan."""
    stage(folder, tmp_path / "staged", 5)
    level = ScanLevel()
    staged = PCRDataset(tmp_path / "staged", scan=level)
    assert (staged.max_scan, level.value, PCRDataset(folder).max_scan) == (5, 5, "full")
    assert staged[3] == PCRDataset(folder, scan=5)[3]


@pytest.mark.parametrize("decoder", ["224", True, 2.5, (1, 2, 3), lambda jpeg: "jpeg"])
def test_what_is_no_decoder_is_refused(folder, decoder):
    """An invalid decoder is refused at once, not in a worker."""
    with pytest.raises(TypeError, match="a size such as 224"):
        PCRDataset(folder, decoder=decoder)


def test_a_dataset_describes_itself(folder, dataset):
    """In one line: how much of which shards, and at which scan."""
    made = PCRDataset(dataset, scan=ScanLevel(2))
    shards = f"{dataset}: 24 samples in 4 shards, scan ScanLevel(2) of 'full'>"
    assert repr(made) == f"<PCRDataset: 24 of {shards}"
    assert made.num_classes == len(made.classes) == 2
    assert made.cache_stats() == (0, 0)
    assert repr(made.subset([1, 2])) == f"<PCRDataset: 2 of {shards}"


# --- labels, sizes, keys


def test_datasets_of_different_classes_are_not_mixed(tmp_path):
    """Labels of several datasets mean the same classes: other names are refused, naming the
    datasets; labels without names mix with any, and the largest number of classes counts.
    """

    def made(name, label, classes=()):
        sample = {"__key__": name, "jpg": make_jpeg(1), "cls": label}
        return write(tmp_path / name, [sample], classes=classes)

    numbers = made("numbers", 7)
    pets, dogs = made("pets", 0, ("cat", "dog")), made("dogs", 1, ("dog", "cat"))
    mixed = PCRDataset([numbers, pets, made("more", 1, ("cat", "dog"))])
    assert (mixed.classes, mixed.num_classes) == (("cat", "dog"), 8)
    with pytest.raises(ValueError, match=r"same classes.*pets.* and .*dogs"):
        PCRDataset([pets, numbers, dogs])


def test_labels_sizes_and_keys(folder):
    """They are those of the samples; labels and sizes cost one request, keys one per shard."""
    dataset = PCRDataset(f"counting://{folder}", scan=5)
    CountingFS.requests.clear()
    assert dataset.labels.tolist() == list(range(SAMPLES))
    assert dataset.labels.dtype == np.int64
    assert dataset.keys == tuple(f"k{i:03d}" for i in range(SAMPLES))
    assert dataset.sizes.tolist() == [[20 + i % 3, 24 - i % 4] for i in range(SAMPLES)]
    view = dataset.subset([5, 50, 8])
    assert view.labels.tolist() == [5, 8, 50]
    assert view.keys == ("k005", "k008", "k050")
    assert view.sizes.tolist() == dataset.sizes[[5, 8, 50]].tolist()
    stop = max(entry.prefix_stop(0) for entry in dataset.shards.entries)
    assert len(CountingFS.requests) == 1 + SAMPLES // ROWS
    assert all(b <= stop for _, _, b in CountingFS.requests)


def test_samples_without_labels_or_images(tmp_path):
    """A missing label raises a clear error where labels are needed; a sample without an image has
    the size 0, 0, and a PNG its own.
    """
    samples = [
        {"__key__": "a", "jpg": make_jpeg(1, 30, 20), "cls": -1},
        {"__key__": "b", "png": saved(Image.new("RGB", (5, 4)), "PNG")},
        {"__key__": "c", "jpg": make_jpeg(2, 10, 12), "cls": 2},
    ]
    dataset = PCRDataset(write(tmp_path, samples))
    assert dataset.sizes.tolist() == [[30, 20], [4, 5], [10, 12]]
    assert dataset.subset([0, 2]).labels.tolist() == [-1, 2]
    with pytest.raises(ValueError, match=r"or split\(stratify=False\): .*\(key=b\)"):
        dataset.labels
    assert sorted(map(len, dataset.split([0.4, 0.6], stratify=False))) == [1, 2]
    lists = [{"__key__": f"{i}", "views.jpg": [make_jpeg(1, 30, 20)] * (i % 2)} for i in range(3)]
    sizes = PCRDataset(write(tmp_path / "lists", lists)).sizes
    assert sizes.tolist() == [[0, 0], [30, 20], [0, 0]]


# --- views


def test_views_share_shards_and_keep_exact_epochs(folder):
    """A subset has its samples only, by number, key and in exact shuffled epochs; a view of a view
    numbers its own samples.
    """
    dataset = PCRDataset(folder, scan=1)
    view = dataset.subset(np.arange(60) % 3 == 1)
    assert len(view) == 20
    assert [view[number]["cls"] for number in range(20)] == list(range(1, 60, 3))
    assert view["k004"]["cls"] == 4
    with pytest.raises(KeyError):
        view["k005"]
    inner = view.subset([19, 0])
    assert [inner[0]["cls"], inner[-1]["cls"]] == [1, 58]
    loader = PCRLoader(view, 4)
    epochs = [ids(loader) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert all(sorted(sum(epoch, [])) == list(range(1, 60, 3)) for epoch in epochs)
    assert len(dataset) == 60
    assert view.shards is dataset.shards


@pytest.mark.parametrize(
    ("numbers", "error"),
    [([1, 1], ValueError), ([], ValueError), ([60], IndexError), ([1.5], IndexError)],
)
def test_views_that_make_no_sense(folder, numbers, error):
    """A view with a duplicate sample, a missing sample, or none at all raises an error."""
    with pytest.raises(error):
        PCRDataset(folder).subset(numbers)


def test_splits_divide_each_class(tmp_path):
    """A split has each sample once, in equal fractions per class, and depends only on its seed."""
    jpeg = make_jpeg(1, 16, 16)
    samples = [{"__key__": f"{i}", "jpg": jpeg, "cls": int(i >= 150)} for i in range(200)]
    dataset = PCRDataset(write(tmp_path, samples, 25))
    train, val, test = dataset.split([0.8, 0.1, 0.1], seed=1)
    assert [np.bincount(view.labels).tolist() for view in (train, val, test)] == [
        [120, 40],
        [15, 5],
        [15, 5],
    ]
    keys = [*train.keys, *val.keys, *test.keys]
    assert sorted(keys) == sorted(dataset.keys)
    again, other = (dataset.split([0.8, 0.1, 0.1], seed=seed)[1] for seed in (1, 2))
    assert again.keys == val.keys != other.keys
    default = dataset.split([0.8, 0.1, 0.1])[1]
    assert default.ids[:5].tolist() == [1, 5, 22, 24, 25], "with every release"
    plain = dataset.split([0.5, 0.5], stratify=False)
    assert [len(view) for view in plain] == [100, 100]
    with pytest.raises(ValueError, match="sum to 1"):
        dataset.split([0.8, 0.1])


def test_another_scan_of_the_same_samples(folder):
    """``at(scan)`` reads the same samples at another scan; the first one stays as it is."""
    low = PCRDataset(folder, scan=1)
    high = low.at("full")
    assert high[9] == PCRDataset(folder)[9]
    assert low[9] == PCRDataset(folder, scan=1)[9]
    with pytest.raises(ScanUnavailable):
        low.at(11)


# --- any DataLoader


def test_spawned_workers_read_it(folder):
    """A dataset, or torch's Subset of it, works in workers that are spawned."""
    dataset = Subset(PCRDataset(folder, scan=ScanLevel(2)), range(10, 20))
    loader = DataLoader(dataset, 5, num_workers=1, multiprocessing_context="spawn")
    assert ids(loader) == [list(range(10, 15)), list(range(15, 20))]


def test_torchdata_resumes_over_it(folder):
    """torchdata's StatefulDataLoader over a dataset resumes at its next batch."""
    reason = "TORCHDATA IS NOT INSTALLED: pip install torchdata"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stateful = pytest.importorskip("torchdata.stateful_dataloader", reason=reason)
        made = [
            stateful.StatefulDataLoader(PCRDataset(folder, scan=1), 6, num_workers=2)
            for _ in range(2)
        ]
        batches = iter(made[0])
        seen = [next(batches)["cls"].tolist() for _ in range(3)]
        made[1].load_state_dict(made[0].state_dict())
        assert seen + ids(made[1]) == [list(range(start, start + 6)) for start in range(0, 60, 6)]


def test_neighbors_cost_one_read(folder, monkeypatch):
    """Threads that read samples of a shard at once cost one request for it; what is held stays
    below its bound, and is what was used last.
    """
    dataset = PCRDataset(f"counting://{folder}", scan=2)
    CountingFS.requests.clear()
    barrier = threading.Barrier(8)

    def read():
        barrier.wait()
        for number in random.sample(range(SAMPLES), SAMPLES):
            assert dataset[number]["cls"] == number

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(CountingFS.requests) == SAMPLES // ROWS
    # Buffers that are used again may be longer.
    monkeypatch.setattr(memory, "borrow_array", memory.BufferPool(0).borrow_array)
    most = max(dataset.shards.open(shard).load(2).memory_bytes for shard in range(SAMPLES // ROWS))
    for bound, numbers, reads in ((1, (0, 1, 59), 2), (2 * most, (0, 59, 1, 30, 2, 58), 4)):
        tight = PCRDataset(f"counting://{folder}", scan=2, held_bytes=bound)
        CountingFS.requests.clear()
        assert tuple(tight[number]["cls"] for number in numbers) == numbers
        assert len(CountingFS.requests) == reads
