"""Runs whose data change: weights by a schedule, and datasets that grow."""

import itertools
import json
import shutil

import numpy as np
import pytest
from numbered import numbered, write

from pcrshard import DatasetIndex, PCRDataset, PCRLoader, open_dataset
from pcrshard.encoding.shard_writer import write_dataset_index
from pcrshard.format.sample_columns import SampleColumns

ROWS = 4
PAIRS = [(0, (3, 1)), (32, (1, 1)), (64, (0, 1)), (96, (1, 0))]


def by_epoch(epoch):
    """The same weights as the pairs, with 16 samples an epoch."""
    return [own for start, own in PAIRS if start <= epoch * 16][-1]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Datasets of 24 and 12 samples; their ``cls`` run on."""
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    return [write(folders[0], numbered(24), ROWS), write(folders[1], numbered(12, 24), ROWS)]


def loader_of(urls, batch=4, **options):
    return PCRLoader(PCRDataset(urls, scan=0), batch, threads=0, **options)


def labels(loader, epochs=1, batches=None):
    """The ``cls`` of the batches of some epochs."""
    return [
        batch["cls"].tolist() for _ in range(epochs) for batch in itertools.islice(loader, batches)
    ]


@pytest.mark.parametrize("weights", [PAIRS, by_epoch], ids=["pairs", "function"])
def test_weights_may_change_from_epoch_to_epoch(two, weights):
    """Each epoch has exactly its weights, each dataset goes on where the last epoch left it, and a
    run that resumes anywhere, also with workers or other ranks, has the same batches.
    """
    options = {"weights": weights, "num_samples": 16, "seed": 3}
    whole = labels(loader_of(two, **options), 8)
    epochs = [list(itertools.chain(*whole[4 * n : 4 * n + 4])) for n in range(8)]
    assert [sum(label < 24 for label in own) for own in epochs] == [12, 12, 8, 8, 0, 0, 16, 16]
    # A sample comes again when all of its dataset have come.
    for first, last, size in ((0, 24, 24), (24, 36, 12)):
        drawn = [label for own in epochs for label in own if first <= label < last]
        counts = np.bincount(np.array(drawn) - first, minlength=size)
        assert counts.max() - counts.min() <= 1
    for stop in (1, 4, 13, 18, 27):
        loader = loader_of(two, **options)
        assert labels(loader, stop // 4) + labels(loader, 1, stop % 4) == whole[:stop]
        state = json.loads(json.dumps(loader.state_dict()))
        resumed = loader_of(two, **options | {"num_workers": stop % 2})
        resumed.load_state_dict(state)
        left = -(-(32 - stop) // 4)
        assert labels(resumed, left) == whole[stop:]
    shifted = [(start, own) for start, own in PAIRS[:2]] + [(64, (1, 1)), (96, (1, 0))]
    loader = loader_of(two, **options)
    labels(loader, 5)
    state = loader.state_dict()
    other = loader_of(two, **options | {"weights": shifted})
    with pytest.raises(ValueError, match=r"its (weights|drawn) is"):
        other.load_state_dict(state)
    # What has not begun may change.
    labels(begun := loader_of(two, **options), 3)
    other.load_state_dict(begun.state_dict())


def test_weights_that_are_wrong_halfway_name_the_epoch(two):
    """The epochs before are whole, and the run goes on once the weights are right."""
    weights = [(0, (1, 1)), (16, (0, 0))]
    loader = loader_of(two, weights=weights, num_samples=16)
    assert len(labels(loader)) == 4
    for _ in range(2):
        with pytest.raises(ValueError, match="weights of epoch 1: expected weights"):
            labels(loader)
    loader.weights = [(0, (1, 1)), (16, (2, 1))]
    assert len(labels(loader)) == 4
    assert loader.epoch == 2  # the next one
    for wrong in ([(8, (1, 1))], [(0, (1, 1)), (32, (1, 1)), (16, (1, 1))], lambda _: ["x", 1]):
        with pytest.raises(ValueError, match=r"expected|weights of epoch 0"):
            loader_of(two, weights=wrong, num_samples=16)


def grow(folder, samples, tmp_path):
    """Append shards of more samples to a dataset, as another run of an encoder would."""
    more = write(tmp_path / "more", samples, ROWS, name="more")
    index, added = open_dataset(folder)[0], open_dataset(more)[0]
    for entry in added.shards:
        shutil.copy(f"{more}/{entry.name}", folder)
    entries = [*index.shards, *added.shards]
    columns = SampleColumns(
        np.array([-1] * (index.num_samples + added.num_samples), "<i4"),
        np.zeros((index.num_samples + added.num_samples, 2), "<u2"),
        np.zeros(index.num_samples + added.num_samples, "u1"),
    )
    write_dataset_index(str(folder), DatasetIndex(index.schema, entries, num_classes=99), columns)
    return folder


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_grew(tmp_path, workers):
    """The epoch that had begun ends with the shards that it knew, in the same batches; the next one
    has the new ones too, and is that of a run that began with all of them.
    """
    folder = write(tmp_path / "set", numbered(24), ROWS)
    loader = loader_of(folder, seed=5)
    whole = labels(loader_of(folder, seed=5), 2)
    assert labels(loader) + labels(loader, 1, 2) == whole[:8]
    state = json.loads(json.dumps(loader.state_dict()))
    grow(folder, numbered(12, 24), tmp_path)
    resumed = loader_of(folder, seed=5, num_workers=workers)
    resumed.load_state_dict(state)
    assert labels(resumed, 1, 1) == whole[8:9]
    again = loader_of(folder, seed=5)
    again.load_state_dict(resumed.state_dict())  # saved once more in the old epoch
    assert labels(again) == whole[9:]
    fresh = loader_of(folder, seed=5)
    fresh.set_epoch(2)
    assert labels(again) == labels(fresh)
    assert again.state_dict()["shards"] == [9]


def test_shards_by_name_may_become_more(tmp_path):
    """A pattern that names more shards than when the run began."""
    folder = write(tmp_path / "set", numbered(36), ROWS)
    some, all_ = (f"{folder}/data-{{000000..00000{last}}}.tar" for last in (5, 8))
    whole = labels(loader_of(some, seed=5))
    loader = loader_of(some, seed=5)
    assert labels(loader, 1, 4) == whole[:4]
    resumed = loader_of(all_, seed=5)
    resumed.load_state_dict(loader.state_dict())
    assert labels(resumed) == whole[4:]
    assert sorted(itertools.chain(*labels(resumed))) == list(range(36))


def test_datasets_of_a_mixture_that_grew(two, tmp_path):
    """Each of several may have grown; samples keep their content, and weights hold."""
    folders = [shutil.copytree(each, tmp_path / str(i)) for i, each in enumerate(two)]
    options = {"weights": (1, 1), "num_samples": 16, "seed": 2}
    whole = labels(loader_of(folders, **options))
    loader = loader_of(folders, **options)
    assert labels(loader, 1, 1) == whole[:1]
    state = loader.state_dict()
    grow(folders[0], numbered(8, 100), tmp_path)
    resumed = loader_of(folders, **options)
    resumed.load_state_dict(state)
    assert labels(resumed) == whole[1:]
    found = itertools.chain(*labels(resumed, 8))
    assert set(found) == {*range(36), *range(100, 108)}


def test_what_is_no_growth_is_refused(tmp_path, two):
    """Fewer shards, others at the same places, and views of a dataset that grew."""
    folder = write(tmp_path / "set", numbered(24), ROWS)
    loader = loader_of(folder)
    labels(loader, 1, 1)
    state = loader.state_dict()
    view = PCRLoader(PCRDataset(folder, scan=0).subset(range(20)), 4, threads=0)
    labels(view, 1, 1)
    of_view = view.state_dict()
    grow(folder, numbered(12, 24), tmp_path)
    larger = loader_of(folder)
    labels(larger, 1, 1)
    with pytest.raises(ValueError, match="same dataset"):
        loader_of(two[0]).load_state_dict(larger.state_dict())
    for known in ([5], [10], [6, 1], "6", None, [0]):
        with pytest.raises(ValueError, match="same dataset"):
            loader_of(folder).load_state_dict(state | {"shards": known})
    with pytest.raises(ValueError, match="same dataset"):
        loader_of(folder).load_state_dict(of_view)
