"""A job that stops goes on at the exact next batch: other workers, ranks, scans, SIGKILL."""

import itertools
import json
import multiprocessing
import os
import pickle
import random
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from numbered import WRITERS, flat, ids, loader_of, numbered, scan_of, through_json
from support import run_ranks

from pcrshard import Buckets, PCRDataset, PCRLoader

SAMPLES, ROWS = 96, 8


@pytest.fixture(scope="module", params=WRITERS)
def folder(request, tmp_path_factory):
    """12 shards, or plain tars, of 8."""
    return WRITERS[request.param](tmp_path_factory.mktemp("resume"), numbered(SAMPLES), ROWS)


@pytest.fixture(scope="module", params=WRITERS)
def two(request, tmp_path_factory):
    """Datasets of 64 and 32 samples."""
    made = WRITERS[request.param]
    return [
        made(tmp_path_factory.mktemp("first"), numbered(64), ROWS),
        made(tmp_path_factory.mktemp("second"), numbered(32, 64), ROWS),
    ]


def consume(url, world, size, options, state, steps, workers=0, scan=1):
    """Global batches of some steps of a job of ``world`` ranks, and its state behind them."""
    columns, states = [], []
    for rank in range(world):
        loader = loader_of(
            url, size, scan=scan, rank=rank, world_size=world, num_workers=workers, **options
        )
        if state is not None:
            loader.load_state_dict(through_json(state))
        batches = iter(loader)
        columns.append([next(batches)["cls"].tolist() for _ in range(steps)])
        states.append(loader.state_dict())
    assert all(one == states[0] for one in states), "the state is the same on all ranks"
    return [flat(row) for row in zip(*columns, strict=True)], states[0]


def whole(url, options, size, epoch=0):
    """The uninterrupted sequence of global batches, from one rank."""
    return ids(loader_of(url, size, rank=0, world_size=1, epoch=epoch, **options))


# --- in one process: every place, every world


@pytest.mark.parametrize("drop_last", [True, "pad"])
@pytest.mark.parametrize("weights", [None, (2.0, 1.0)])
def test_elastic_jobs_go_on_with_the_same_sequence(two, drop_last, weights):
    """With ``max_world_size`` any worlds, workers and scans one after another give exactly the
    uninterrupted sequence.
    """
    options = {"seed": 2, "max_world_size": 4, "drop_last": drop_last, "weights": weights}
    expected = whole(two, options, 20)
    rng = random.Random(f"{drop_last} {weights}")
    for _ in range(3):
        seen, state = [], None
        while len(seen) < len(expected):
            world, steps = rng.choice([1, 2, 4, 5, 10]), rng.randint(0, 2)
            steps = min(steps, len(expected) - len(seen))
            rows, state = consume(
                two, world, 20 // world, options, state, steps, scan=rng.choice([1, 3, "full"])
            )
            seen += rows
        assert seen == expected


def test_every_place_to_stop(folder):
    """Behind every single batch of an epoch the state gives exactly the rest.

    And the next epoch follows, or any other that is set.
    """
    expected = [whole(folder, {"seed": 4}, 8, epoch) for epoch in range(3)]
    loader = loader_of(folder, 8, seed=4)
    states = [loader.state_dict()] + [loader.state_dict() for _ in loader] + [loader.state_dict()]
    assert [state["epoch"] for state in states] == [0] * 12 + [1] * 2
    for done, state in enumerate(states):
        loader = loader_of(folder, 8, seed=4, epoch=7)
        loader.load_state_dict(through_json(state))
        assert loader.state_dict() == state
        epoch, step = divmod(min(done, 12), 12)
        assert loader.epoch == epoch
        assert ids(loader) == expected[epoch][step:]
        assert ids(itertools.islice(loader, 1)) == expected[epoch + 1][:1]
        loader.load_state_dict(state)
        next(iter(loader))
        loader.set_epoch(0)
        assert ids(loader) == expected[0]


def test_a_last_batch_that_all_ranks_get(folder):
    """With fewer samples left than ranks, the last batch takes some of the one before it, so that
    all ranks have as many; a job that resumes there has each sample once.
    """
    how = {"drop_last": False, "world_size": 10}
    first = [loader_of(folder, 9, rank=rank, **how) for rank in range(10)]
    assert {len(loader) for loader in first} == {2}
    seen = flat(flat(ids(itertools.islice(loader, 1)) for loader in first))
    states = [loader.state_dict() for loader in first]
    assert all(state == states[0] for state in states)
    for rank in range(10):
        loader = loader_of(folder, 9, rank=rank, **how)
        loader.load_state_dict(through_json(states[0]))
        assert loader.epoch == 0
        last = ids(loader)
        assert list(map(len, last)) == [1]
        seen += flat(last)
        assert loader.epoch == 1
    assert sorted(seen) == list(range(SAMPLES))


def test_a_job_resumes_on_more_ranks_than_samples_are_left(folder):
    """Then each rank has one batch, so that none waits forever for the others; some samples come
    twice.
    """
    how = {"drop_last": False, "threads": 0, "scan": 1}
    one = loader_of(folder, SAMPLES - 3, **how)
    seen = flat(ids(itertools.islice(one, 1)))
    state = through_json(one.state_dict())
    last = []
    for rank in range(5):
        loader = loader_of(folder, 2, rank=rank, world_size=5, **how)
        loader.load_state_dict(state)
        found = ids(loader)
        assert list(map(len, found)) == [1]
        last += flat(found)
        assert loader.epoch == 1
    assert sorted({*seen, *last}) == list(range(SAMPLES))
    assert len({*last}) == 3


def test_states_that_a_loader_writes_it_reads(folder):
    """However often the geometry changes in an epoch, and however many steps it has, a loader
    resumes from its own state.
    """
    state, seen = None, []
    for number in range(SAMPLES - 20):
        loader = loader_of(folder, 1, scan=1, lanes_per_rank=1 + number % 2, threads=0)
        if state:
            loader.load_state_dict(json.loads(json.dumps(state)))
        seen += next(iter(loader))["cls"].tolist()
        state = loader.state_dict()
    assert len(state["segments"]) == SAMPLES - 20
    loader.load_state_dict(state)
    assert sorted(seen + flat(ids(loader))) == list(range(SAMPLES))
    large = loader_of(folder, 1)
    large.dataset.shards.starts = large.dataset.shards.starts * 1_000_000
    large.load_state_dict(large.state_dict() | {"segments": [[1, 1, 4, 40_000_000]]})
    assert large.state_dict()["segments"] == [[1, 1, 4, 40_000_000]]


def test_workers_are_sent_no_order(folder):
    """What a spawned worker gets does not grow with the number of samples."""
    sizes = []
    for times in (1, 1_000_000):
        loader = loader_of(folder, 8, num_workers=1)
        loader.dataset.shards.starts = loader.dataset.shards.starts * times
        iter(loader)
        len(loader)
        sizes.append(len(pickle.dumps(loader)))
    assert sizes[1] <= sizes[0] + 100


def test_a_state_of_something_else_is_refused(folder, two):
    """A state saved with other samples, options, or versions is refused, naming the difference."""
    loader = loader_of(folder, 8, seed=1)
    next(iter(loader))
    state = loader.state_dict()
    assert state["segments"] == [[8, 1, 4, 1]]
    others = [
        ("dataset", loader_of(two, 8, seed=1)),
        ("seed", loader_of(folder, 8)),
        ("shuffle_shards", loader_of(folder, 8, seed=1, shuffle=5)),
        ("last", loader_of(folder, 8, seed=1, drop_last="pad")),
        ("weights", loader_of(folder, 8, seed=1, weights=(1.0,))),
        ("dataset", PCRLoader(PCRDataset(folder).subset(range(50)), 8, seed=1)),
        ("buckets", loader_of(folder, 8, seed=1, buckets=Buckets(area=64, multiple=8))),
    ]
    for name, other in others:
        before = other.state_dict()
        with pytest.raises(
            ValueError, match=f"expected a state of the same dataset and options, its {name} is"
        ):
            other.load_state_dict(through_json(state))
        assert other.state_dict() == before
    loader = loader_of(folder, 8, seed=1)
    before = loader.state_dict()
    for wrong in (
        *({"version": version} for version in (2, None)),
        *({"epoch": epoch} for epoch in (-1, None, "1", 1.0, 1 << 63)),
        *(
            {"segments": segments}
            for segments in (None, [3], [[8, 1, 4]], [[8, 1, 4, "1"]], [[8, 1, 4, 1]] * 65)
        ),
        {"segments": [[8, 1, 4, 99]]},  # more steps than the epoch has
        {"segments": [[8, 3, 4, 1]]},  # world sizes that do not divide the batch
        *({"segments": [[24, 1, lanes, 0]]} for lanes in (0, 10**8)),  # would take gigabytes
    ):
        with pytest.raises(ValueError, match="expected"):
            loader.load_state_dict(state | wrong)
        assert loader.state_dict() == before
    with pytest.raises(ValueError, match="expected a state"):
        loader.load_state_dict("state")


def test_a_state_that_leaves_no_batch_is_the_next_epoch(folder):
    """Resuming where no batch of the epoch is left begins the next one."""
    loader = loader_of(folder, 8, seed=1)
    loader.load_state_dict(loader.state_dict() | {"segments": [[8, 1, 4, 12]]})
    assert ids(loader) == whole(folder, {"seed": 1}, 8, epoch=1)


# --- killed

ELASTIC = {"seed": 6, "max_world_size": 4}


def train(url, folder, attempt, rank, world, workers, scan):
    """One rank of a small job: reads the checkpoint if there is one, and makes one behind every
    step.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store-{attempt}", rank=rank, world_size=world
    )
    loader = loader_of(url, 8 // world, scan=scan, num_workers=workers, **ELASTIC)
    checkpoint = {"rows": []}
    path = folder / "checkpoint.json"
    if path.exists():
        checkpoint = json.loads(path.read_text())
        loader.load_state_dict(checkpoint["data"])
    for epoch in range(loader.epoch, 2):
        for batch in loader:
            parts = [torch.zeros(8 // world, dtype=torch.int64) for _ in range(world)]
            dist.all_gather(parts, batch["cls"])
            checkpoint["rows"].append([epoch, *torch.cat(parts).tolist()])
            checkpoint["data"] = loader.state_dict()
            if rank == 0:
                (folder / "new.json").write_text(json.dumps(checkpoint))
                os.replace(folder / "new.json", path)
            time.sleep(0.005)
    dist.destroy_process_group()


def steps_done(folder):
    """Steps in the checkpoint."""
    path = folder / "checkpoint.json"
    return len(json.loads(path.read_text())["rows"]) if path.exists() else 0


def test_killed_jobs_lose_and_repeat_nothing(folder, tmp_path):
    """A job that is killed three times at random points goes on from its last checkpoint, with
    other ranks, workers and scans, with exactly the uninterrupted sequence of two epochs.
    """
    rng, context = random.Random(1), multiprocessing.get_context("fork")
    for attempt in range(4):
        world = rng.choice([1, 2, 4])
        how = (world, rng.choice([0, 1, 2]), rng.choice([1, 2, 5, "full"]))
        ranks = [
            context.Process(target=train, args=(folder, tmp_path, attempt, rank, *how))
            for rank in range(world)
        ]
        for rank in ranks:
            rank.start()
            os.setpgid(rank.pid, rank.pid)  # to be killed with its workers
        if attempt < 3:
            target = steps_done(tmp_path) + rng.choice([1, 2, 3])
            while steps_done(tmp_path) < target and all(rank.is_alive() for rank in ranks):
                time.sleep(0.002)
            for rank in rng.sample(ranks, len(ranks)):
                os.killpg(rank.pid, signal.SIGKILL)
        for rank in ranks:
            rank.join(60)
        assert [rank.exitcode for rank in ranks] == [-signal.SIGKILL * (attempt < 3)] * world
    rows = json.loads((tmp_path / "checkpoint.json").read_text())["rows"]
    assert rows == [[epoch, *row] for epoch in range(2) for row in whole(folder, ELASTIC, 8, epoch)]


JOB = """
import json, os, sys
scan = "full" if sys.argv[3] == "full" else int(sys.argv[3])
import torch
import torch.distributed as dist
from pcrshard import ImageDecoder, PCRDataset, PCRLoader
from pcrshard.training import ranks


def run(saved=None, **how):
    torch.manual_seed(0)
    image = ImageDecoder(12, "random", flip=0.5)
    loader = PCRLoader(PCRDataset(sys.argv[1], scan=scan, decoder=image), 4, seed=8, **how)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(800, 4),
    )
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    losses = []
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(json.loads(saved["data"]))
        losses = saved["losses"]
    for _ in range(loader.epoch, 2):
        for batch in loader:
            loss = torch.nn.functional.cross_entropy(model(batch["jpg"] / 255), batch["cls"] % 4)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
            seen.extend(batch["__key__"])
            if len(losses) == 7 and saved is None:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"losses": losses, "data": json.dumps(loader.state_dict())}
                torch.save(state, path)
    return losses, [p.double().sum().item().hex() for p in model.parameters()]


torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)
rank = ranks.current()
dist.init_process_group("gloo")
assert ranks.current() == rank == (dist.get_rank(), 2)
del os.environ["RANK"]
assert ranks.current() == rank, "torch.distributed knows it without the environment"
path = f"{sys.argv[2]}/middle-{dist.get_rank()}.pt"
seen = []
whole = run(num_workers=1)
parts = [None, None]
dist.all_gather_object(parts, seen)
assert len({*parts[0][:48], *parts[1][:48]}) == len({*parts[0][48:], *parts[1][48:]}) == 96
resumed = run(torch.load(path), threads=2)
assert len(whole[0]) == 24
assert resumed == whole
print("equal", flush=True)
dist.barrier()
dist.destroy_process_group()
# DDP's cycle keeps gloo's threads; one that wants the GIL while Python ends aborts (PyTorch).
os._exit(0)
"""


def test_losses_are_bit_equal_after_a_resume(folder, tmp_path):
    """Two ranks read each sample once per epoch between them, whatever starts their
    workers, and when they resume in mid-epoch with threads instead of workers, they reproduce the
    losses of an uninterrupted run bit for bit.
    """
    (tmp_path / "job.py").write_text(JOB)
    run = run_ranks(tmp_path / "job.py", folder, tmp_path, scan_of(folder, 3))
    assert run.count("equal") == 2
