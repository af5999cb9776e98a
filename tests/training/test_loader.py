"""PCRLoader: exact epochs, true lengths, and jobs that continue at the exact next batch.

With other workers, ranks and scans, after ``break``, after SIGKILL.
"""

import collections
import copy
import itertools
import multiprocessing
import pickle
import shutil

import numpy as np
import pytest
import torch
from numbered import flat, ids, loader_of, numbered, write

from pcrshard import ImageDecoder, PCRDataset, PCRLoader, ScanLevel
from pcrshard.native.pool import draw_key
from pcrshard.training.order import EpochOrder, Geometry
from pcrshard.training.sequence import Rules

SAMPLES, ROWS = 60, 6


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Datasets of 24 and 12 samples; their ``cls`` run on."""
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    return [write(folders[0], numbered(24)), write(folders[1], numbered(12, 24))]


def planned(batch, epoch=0, world=1, rank=0, lanes=4, **rules):
    """The ids of a rank's batches, by the plan."""
    order = EpochOrder(
        [ROWS] * (SAMPLES // ROWS),
        Geometry(batch * world, world, lanes),
        Rules(**rules),
        epoch=epoch,
    )
    return [ids.tolist() for ids in order.batches(rank, world)]


# --- a cursor


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    "options", [{}, {"threads": 0}, {"threads": 2}, {"threads": 1, "num_workers": 2}], ids=str
)
@pytest.mark.parametrize("taken", [0, 14])
def test_each_loop_is_the_next_epoch(folder, options, taken):
    """``for i, batch in enumerate(loader): if i == N: break`` has other batches in each epoch, also
    if it breaks at the last batch: three loops are three orders, those of epochs 0 to 2.
    """
    loader = loader_of(folder, 4, seed=7, **options)
    for epoch in range(3):
        assert len(loader) == 15
        seen = []
        for batch in loader:
            seen.append(batch["cls"].tolist())
            assert loader.epoch == epoch
            if len(seen) > taken:
                break
        assert seen == planned(4, epoch, seed=7)[: taken + 1]


def test_looking_changes_nothing(folder):
    """Calling ``iter()`` without taking a batch, ``len``, or ``state_dict`` starts no epoch."""
    loader = loader_of(folder, 4)
    for _ in range(3):
        iter(loader)
    len(loader)
    loader.state_dict()
    assert (loader.epoch, ids(loader)) == (0, planned(4))
    assert (loader.epoch, ids(loader)) == (1, planned(4, 1))


def test_two_loaders_do_not_disturb_each_other(folder):
    """Two loaders over one dataset have a position each, and so has one that resumes."""
    dataset = PCRDataset(folder, scan=1)
    first, second = PCRLoader(dataset, 4), PCRLoader(dataset, 4)
    ones = iter(first)
    seen = [next(ones)["cls"].tolist() for _ in range(5)]
    assert ids(second) == planned(4)
    state = first.state_dict()
    third = PCRLoader(dataset, 4)
    third.load_state_dict(state)
    assert seen + ids(third) == planned(4)
    assert seen + ids(ones) == planned(4)
    assert (first.epoch, second.epoch, third.epoch) == (1, 1, 1)


def test_an_older_iteration_counts_no_more(folder):
    """Of two iterations over one loader, the newer one determines the loader's position."""
    loader = loader_of(folder, 4)
    old = iter(loader)
    next(old)
    new = iter(loader)
    assert next(new)["cls"].tolist() == planned(4, 1)[0]
    state = loader.state_dict()
    next(old)
    assert loader.state_dict() == state
    list(old)
    assert loader.state_dict() == state


def test_set_epoch_and_loaded_states(folder):
    """``set_epoch`` restarts an epoch, except that it keeps the position of a state just loaded for
    that epoch; if the state had finished the epoch, no batches remain.
    """
    loader = loader_of(folder, 4)
    for _ in zip(range(2), loader, strict=False):
        pass
    state = loader.state_dict()
    loader.set_epoch(0)
    assert ids(loader) == planned(4)
    finished = loader.state_dict()
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert ids(loader) == planned(4)[2:]
    loader.load_state_dict(state)
    loader.set_epoch(3)
    assert ids(loader) == planned(4, 3)
    loader.load_state_dict(finished)
    loader.set_epoch(0)
    assert ids(loader) == []
    assert ids(loader) == planned(4, 1)
    with pytest.raises(ValueError, match="epoch"):
        loader.set_epoch(-1)


def test_lengths_are_those_of_whole_epochs(folder):
    """``len`` stays the same in an epoch that was resumed, in the middle of one, and afterwards."""
    loader = loader_of(folder, 4)
    states = [loader.state_dict() for _ in loader]
    loader.load_state_dict(states[9])
    assert len(loader) == 15
    assert [sum(1 for _ in loader), sum(1 for _ in loader)] == [5, 15]
    assert len(loader) == 15


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))]
)
def test_copies(folder, duplicate):
    """A loader that is copied, or sent to a job as submitit does, goes on where its original was,
    and for itself.
    """
    loader = loader_of(folder, 4, scan=ScanLevel(2), seed=3, epoch=1)
    taken = ids(itertools.islice(loader, 2))
    other = duplicate(loader)
    other.load_state_dict(loader.state_dict())
    assert taken + ids(other) == planned(4, 1, seed=3)
    other.set_epoch(5)
    assert (loader.epoch, other.epoch) == (1, 5)


@pytest.mark.parametrize(("threads", "ahead"), [(0, 0), (1, 3)])
def test_prefetch_is_how_many_batches_are_begun_ahead(folder, threads, ahead):
    """A new scan reaches the next batch that is not begun; without threads, the next one."""
    level = ScanLevel(1)
    loader = loader_of(folder, ROWS, scan=level, shuffle=False, threads=threads, prefetch=3)
    low = loader_of(folder, ROWS, scan=1, shuffle=False)
    for number, (batch, other) in enumerate(zip(loader, low, strict=True)):
        assert (batch["jpg"] == other["jpg"]) == (number <= 4 + ahead)
        if number == 4:
            level.value = 2
    assert loader_of(folder, 4, num_workers=1).threads == 0


# --- epochs


@pytest.fixture
def spawning():
    """Worker processes are spawned."""
    method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(method, force=True)


@pytest.mark.usefixtures("spawning")
def test_spawned_workers(folder):
    """Spawned workers know the rank of their parent, its epoch and its scan."""
    how = {"decoder": ImageDecoder(8, "random"), "rank": 1, "world_size": 2, "epoch": 1}
    batches = list(loader_of(folder, 5, scan=ScanLevel(5), num_workers=1, **how))
    assert ids(batches) == planned(5, 1, 2, 1)
    expected = loader_of(folder, 5, scan=5, **how)
    for batch, same in zip(batches, expected, strict=True):
        assert torch.equal(batch["jpg"], same["jpg"])


def test_random_numbers_of_workers_are_the_loaders(folder):
    """Workers leave torch's generator to the training, whose dropout is then the same with workers,
    with threads and after a resume; what a transform draws follows the loader's seed and epoch.
    """
    state = torch.get_rng_state()

    def draws(seed):
        options = {"transform": lambda _: torch.rand(()), "seed": seed, "num_workers": 2}
        loader = loader_of(folder, 5, **options)
        return [torch.cat(list(loader)).tolist() for _ in range(2)]

    first, second = draws(1)
    assert draws(1) == [first, second]
    assert len({*first, *second, *draws(2)[0]}) == 3 * 60
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("drop_last", [True, "pad", False])
@pytest.mark.parametrize(("world", "size"), [(1, 7), (4, 9), (3, 19)])
def test_ranks_have_equal_batches(folder, world, size, drop_last):
    """Every rank gets as many batches as ``len`` says, the same number unless ``drop_last=False``;
    samples are left out only with ``True``, and come twice only with ``"pad"``.
    """
    how = {"seed": 1, "drop_last": drop_last, "world_size": world}
    parts = [loader_of(folder, size, rank=rank, **how) for rank in range(world)]
    seen = [ids(part) for part in parts]
    assert [len(part) for part in parts] == list(map(len, seen))
    assert max(map(len, seen)) - min(map(len, seen)) <= (drop_last is False)
    every = flat(flat(seen))
    assert len(set(every)) == (len(every) if drop_last is True else SAMPLES)
    assert drop_last == "pad" or len(set(every)) == len(every)


def test_shuffle_takes_a_number_of_shards(folder):
    """``shuffle=2`` mixes two shards at a time, ``True`` four, ``False`` none."""
    for shuffle, window in ((2, 2), (True, 4), (False, 0), (1, 1)):
        assert ids(loader_of(folder, 4, shuffle=shuffle)) == planned(
            4, lanes=4 if window else 1, shuffle_shards=window
        )


def test_ranks_are_those_of_the_moment(folder, monkeypatch):
    """A loader that is made before the launcher's rank is known has that rank when it is read,
    unless its rank was given.
    """
    early = loader_of(folder, 4)
    given = loader_of(folder, 4, rank=0, world_size=1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(early) == 7
    assert ids(early) == planned(4, world=2, rank=1)
    assert ids(given) == planned(4)


def test_a_state_counts_the_steps_that_were_read(folder, monkeypatch):
    """A state that is saved after the process group is gone, or after ``batch_size`` has changed,
    is that of the batches which the loop has received.
    """
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = loader_of(folder, 4)
    assert len(list(itertools.islice(loader, 3))) == 3
    state = loader.state_dict()
    monkeypatch.delenv("RANK")
    loader.batch_size = 6
    assert len(loader) == 10
    assert loader.state_dict() == state
    assert state["segments"] == [[8, 2, 4, 3]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": (1,)}, "as many weights as datasets"),
        ({"weights": (1, -1)}, "expected weights"),
        ({"weights": (0, 0)}, "expected weights"),
        ({"weights": (1, 1), "num_samples": 0}, "samples"),
        ({"num_samples": 10}, "weights"),
        ({"max_world_size": 3}, "multiple of max_world_size"),
        ({"drop_last": "keep"}, "expected drop_last"),
        ({"rank": 1}, "below world_size, got 1 of None"),
        ({"rank": 2, "world_size": 2}, "got 2 of 2"),
        ({"batch_size": 37}, "one global batch of 37 samples, got 36"),
    ],
)
def test_options_that_make_no_sense(two, options, message):
    """Wrong options are refused when the loader is made."""
    with pytest.raises(ValueError, match=message):
        loader_of(two, **{"batch_size": 4} | options)


def test_a_loader_describes_itself(dataset):
    """The loader's repr shows its next position and its rank."""
    made = loader_of(dataset, 4, rank=1, world_size=2, epoch=3)
    first = repr(made).splitlines()[0]
    assert first == "<PCRLoader: 3 batches of 4 per epoch, next epoch 3, Rank(rank=1, world=2)"


# --- mixtures


def test_weighted_mixing(two):
    """Weights are shares of each epoch, and over epochs a dataset's samples come equally often."""
    counts = collections.Counter()
    for epoch in range(6):
        loader = loader_of(
            two, 5, weights=(1, 3), num_samples=40, num_workers=epoch % 3, epoch=epoch
        )
        assert len(loader) == 8
        seen = flat(ids(loader))
        assert len(seen) == 40
        assert sum(number < 24 for number in seen) == 10
        counts.update(seen)
    assert {counts[number] for number in range(24)} <= {2, 3}
    assert {counts[number] for number in range(24, 36)} == {15}


def test_several_datasets_without_weights(two):
    """Without weights, several datasets act as one, and each sample comes once per epoch."""
    assert sorted(flat(ids(loader_of(two, 4)))) == list(range(36))


# --- augmentation


@pytest.mark.parametrize(
    ("size", "how"),
    [
        (4, {}),
        (SAMPLES, {"scan": 1, "num_workers": 2}),
        (5, {"scan": "full", "rank": 1, "world_size": 2}),
        (4, {"seed": 1}),
        (4, {"epoch": 1}),
    ],
    ids=str,
)
def test_draws_depend_on_seed_epoch_and_sample_only(folder, size, how):
    """Crops and flips are the same for any workers, ranks, batch size and scan."""
    decoder = ImageDecoder(12, "random", flip=0.5)
    dataset = PCRDataset(folder, scan=how.get("scan", 5))
    own = how.get("seed", 0), how.get("epoch", 0)
    for batch in loader_of(folder, size, **{"scan": 5, "decoder": decoder} | how):
        for number, pixels in zip(batch["cls"].tolist(), batch["jpg"].numpy(), strict=True):
            jpeg = dataset[number]["jpg"]
            assert np.array_equal(pixels, decoder(jpeg, draw_key(*own, number)))


# --- errors, forks


def test_a_missing_shard_is_named(folder, tmp_path):
    """A missing shard raises an error that names it, instead of shortening the epoch."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "data-000003.tar").unlink()
    with pytest.raises(Exception, match=r"data-000003\.tar"):
        list(loader_of(tmp_path, 4))


def forked_reads(loader, batches, sent):
    """In a forked child: what its parent's iteration says, and an epoch of the child's own."""
    try:
        next(batches)
        sent.put("nothing was raised")
    except RuntimeError as error:
        sent.put(str(error))
    loader.set_epoch(5)
    sent.put(ids(loader))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.parametrize("threads", [0, 2])
def test_a_fork_in_the_middle_of_an_epoch(folder, threads):
    """A child forked in mid-epoch gets an error that asks it to start its own iteration, which then
    works and leaves the parent's undisturbed.
    """
    loader = loader_of(folder, 4, decoder=8, threads=threads)
    batches = iter(loader)
    seen = [next(batches)["cls"].tolist() for _ in range(3)]
    context = multiprocessing.get_context("fork")
    sent = context.Queue()
    child = context.Process(target=forked_reads, args=(loader, batches, sent))
    child.start()
    assert "begin the iteration there" in sent.get(timeout=30)
    assert sent.get(timeout=30) == planned(4, 5)
    child.join(30)
    assert child.exitcode == 0
    assert seen + ids(batches) == planned(4)
