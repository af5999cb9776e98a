"""Splits: subfolders that hold datasets are never mixed up, and a missing one is an error."""

import pytest
from hugging_face import datasets, huggingface, keys, load_dataset, write

import pcrshard
from pcrshard.errors import ScanUnavailable, StorageError

COUNTS = {"train": 8, "val": 4, "test": 2}
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


def write_split(folder, split, count, classes=("cat", "dog")):
    samples = [{"__key__": f"{split}{i}", "cls": b"0"} for i in range(count)]
    write(folder / split, samples, samples_per_shard=2, classes=classes)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with datasets in train, val and test."""
    folder = tmp_path_factory.mktemp("splits")
    for split, count in COUNTS.items():
        write_split(folder, split, count)
    return folder


@pytest.fixture
def load(root, tmp_path):
    """``load_dataset`` of that folder, with an Arrow cache of its own."""
    datasets.disable_progress_bars()
    return lambda **options: load_dataset(root, cache_dir=str(tmp_path / "arrow"), **options)


def keys_of(split, stop=None):
    return [f"{split}{i}" for i in range(COUNTS[split])][:stop]


@pytest.mark.parametrize("streaming", [True, False])
def test_each_split_has_its_own_samples(streaming, load):
    """A split is what lies in the folder of its name."""
    for split in COUNTS:
        rows = load(split=split, streaming=streaming)
        assert keys(rows) == keys_of(split)
        assert rows.split == split


@pytest.mark.parametrize("streaming", [True, False])
def test_without_split_there_is_a_dictionary(streaming, load):
    """All splits come by name, and several in one call in the order that was asked for."""
    found = load(streaming=streaming)
    assert isinstance(found, datasets.IterableDatasetDict if streaming else datasets.DatasetDict)
    assert {split: keys(rows) for split, rows in found.items()} == {
        split: keys_of(split) for split in COUNTS
    }
    test, train = load(split=["test", datasets.Split.TRAIN], streaming=streaming)
    assert (keys(test), keys(train)) == (keys_of("test"), keys_of("train"))
    both = load(split="test+val", streaming=streaming)
    assert keys(both) == keys_of("test") + keys_of("val")


def test_slices_are_for_map_style_datasets(load):
    """``train[:50%]`` and sums of slices; a stream has none."""
    assert keys(load(split="train[:50%]", streaming=False)) == keys_of("train", 4)
    some = load(split="val[:1]+test[:1]", streaming=False)
    assert keys(some) == ["val0", "test0"]
    part = datasets.ReadInstruction("train", to=25, unit="%")
    assert keys(load(split=part, streaming=False)) == keys_of("train", 2)
    with pytest.raises(ValueError, match="Bad split"):
        load(split="train[:50%]")


@pytest.mark.parametrize("split", ["tests", ["train", "holdout"], "train+bonus", "dev2"])
def test_a_split_that_is_not_there_is_an_error(split, load):
    """The error lists the available splits; no other split is streamed in its place."""
    with pytest.raises(ValueError, match=r"one of \['test', 'train', 'val'\]"):
        load(split=split)


def test_one_dataset_is_not_every_split(dataset):
    """A folder that is one dataset is the training set, and has no test set to stream."""
    with pytest.raises(ValueError, match=r"one of \['train'\]"):
        load_dataset(dataset, split="test")
    assert load_dataset(dataset).split == load_dataset(dataset, split="train").split == "train"


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    ("scan", "error"),
    [
        (11, ScanUnavailable),
        (-1, ScanUnavailable),
        ("5", TypeError),
        (2.0, TypeError),
        (pcrshard.ScanLevel(11), ScanUnavailable),
    ],
    ids=str,
)
def test_a_bad_scan_is_refused_at_once(scan, error, streaming, dataset, root):
    """Not after the first rows, and not in a worker."""
    for url in (dataset, root):
        with pytest.raises(error, match="expected a scan"):
            load_dataset(url, scan=scan, streaming=streaming)


def test_only_what_is_asked_for_is_copied(root, tmp_path):
    """A map-style test set does not make an Arrow copy of the training set."""
    load_dataset(root, split="test", streaming=False, cache_dir=str(tmp_path))
    assert [path.name for path in tmp_path.rglob("*.arrow")] == ["pcrshard-test.arrow"]


def test_the_builder_has_all_splits(root):
    """Who uses `datasets`' own steps finds the same splits."""
    builder = huggingface.PcrBuilder(data_dir=str(root))
    assert set(builder.as_streaming_dataset()) == set(COUNTS)


def test_what_contradicts_itself_is_refused(tmp_path):
    """Other classes in one of the splits, or no dataset at all, are errors that name them."""
    write_split(tmp_path, "train", 2)
    write_split(tmp_path, "test", 2, ["bird"])
    with pytest.raises(ValueError, match=r"same classes.*'test': \['bird'\]"):
        load_dataset(tmp_path)
    with pytest.raises(StorageError, match="nowhere"):
        load_dataset(tmp_path / "nowhere")
