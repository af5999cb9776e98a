"""A job that stops goes on at the exact next batch: other workers, ranks, scans, SIGKILL."""

import collections
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from pcrshard import EpochOptions, ImageDecoder, PCRDataset, ShardWriter
from pcrshard.testing import make_jpeg

SAMPLES, ROWS = 96, 8
pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated"
)  # torchdata 0.11 with torch 2.13


def write(folder, samples, first=0):
    """Shards of 8 small images; ``cls`` is the sample's id."""
    jpegs = [make_jpeg(i, 16, 16) for i in range(4)]
    with ShardWriter(str(folder), samples_per_shard=ROWS) as writer:
        for i in range(first, first + samples):
            writer.write({"__key__": f"k{i:03d}", "jpg": jpegs[i % 4], "cls": i})
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """12 shards of 8."""
    return write(tmp_path_factory.mktemp("resume"), SAMPLES)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Datasets of 64 and 32 samples."""
    return [
        write(tmp_path_factory.mktemp("first"), 64),
        write(tmp_path_factory.mktemp("second"), 32, 64),
    ]


def ids(batches):
    """The ``cls`` of all samples, batch by batch."""
    return [batch["cls"].tolist() for batch in batches]


def through_json(state):
    """What a checkpoint keeps of it; small."""
    text = json.dumps(state)
    assert len(text) < 1000
    return json.loads(text)


def consume(url, world, size, options, state, steps, workers=0, scan=1):
    """Global batches of some steps of a job of ``world`` ranks, and its state behind them."""
    columns, states = [], []
    for rank in range(world):
        loader = PCRDataset(
            url, size, scan=scan, epoch=options, rank=(rank, world), fields=None
        ).loader(workers)
        if state is not None:
            loader.load_state_dict(through_json(state))
        columns.append(ids(itertools.islice(loader, steps)))
        states.append(loader.state_dict())
    assert all(one == states[0] for one in states), "the state is the same on all ranks"
    return [list(itertools.chain(*row)) for row in zip(*columns, strict=True)], states[0]


def whole(url, options, size, epoch=0):
    """The uninterrupted sequence of global batches, from one rank."""
    dataset = PCRDataset(url, size, scan=1, epoch=options, rank=(0, 1))
    dataset.set_epoch(epoch)
    return ids(dataset)


# --- in one process: every place, every world


@pytest.mark.parametrize("last", ["drop", "pad"])
@pytest.mark.parametrize("weights", [None, (2.0, 1.0)])
def test_elastic_jobs_go_on_with_the_same_sequence(two, last, weights):
    """With ``slots`` any worlds, workers and scans one after another give exactly the uninterrupted
    sequence.
    """
    options = EpochOptions(seed=2, slots=4, last=last, weights=weights)
    expected = whole(two, options, 20)
    rng = random.Random(f"{last} {weights}")
    for _ in range(6):
        seen, state = [], None
        while len(seen) < len(expected):
            world, steps = rng.choice([1, 2, 4, 5, 10]), rng.randint(0, 2)
            rows, state = consume(
                two, world, 20 // world, options, state, steps, scan=rng.choice([1, 3, "full"])
            )
            seen += rows
        assert seen == expected


def test_every_place_to_stop(folder):
    """Behind every single batch of an epoch the state gives exactly the rest.

    And the next epoch follows.
    """
    options = EpochOptions(seed=4)
    expected = [*whole(folder, options, 8), *whole(folder, options, 8, epoch=1)]
    loader = PCRDataset(folder, 8, scan=1, epoch=options).loader()
    states = [loader.state_dict()] + [loader.state_dict() for _ in loader] + [loader.state_dict()]
    for done, state in zip([*range(13), 12], states, strict=True):
        loader = PCRDataset(folder, 8, scan=1, epoch=options).loader()
        loader.load_state_dict(through_json(state))
        seen = ids(loader)
        assert seen + (ids(loader) if loader.dataset.epoch == 1 else []) == expected[done:]


@pytest.mark.parametrize(("last", "most"), [("drop", 1), ("pad", 2), ("short", 1)])
def test_other_geometries_go_on_with_what_is_left(folder, last, most):
    """With other batch sizes and worlds, nothing that was had comes again.

    And what is left comes, but for the last batch's rule.
    """
    rng = random.Random(last)
    for _ in range(6):
        options = EpochOptions(seed=rng.randrange(100), last=last)
        seen, state, stop = [], None, False
        while not stop:
            world, size = rng.choice([(1, 5), (2, 3), (3, 4), (1, 16)])
            steps = rng.randint(1, 4)
            left = SAMPLES - len(seen)
            if left < world * size:
                break
            rows, state = consume(
                folder, world, size, options, state, min(steps, left // (world * size))
            )
            seen += itertools.chain(*rows)
            stop = rng.random() < 0.2
        world, size = (2, 7) if SAMPLES - len(seen) >= 14 else (1, 1)
        for rank in range(world):
            dataset = PCRDataset(folder, size, scan=1, epoch=options, rank=(rank, world))
            dataset.load_state_dict(through_json(state))
            seen += itertools.chain(*ids(dataset))
        counts = collections.Counter(seen)
        assert max(counts.values()) <= most
        if last == "drop":
            assert SAMPLES - len(counts) < world * size
        else:
            assert len(counts) == SAMPLES
            assert last == "pad" or len(seen) == SAMPLES


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 1)])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_do_not_matter(folder, before, after, persistent):
    """The state counts what the training loop had, not what workers fetched ahead.

    Any other workers go on, and into the next epoch.
    """
    options = EpochOptions(seed=1)
    expected = [*whole(folder, options, 8), *whole(folder, options, 8, epoch=1)]
    first = PCRDataset(folder, 8, scan=1, epoch=options)
    loader = first.loader(before, persistent_workers=persistent and before > 0)
    seen = ids(itertools.islice(loader, 5))
    state = through_json(loader.state_dict())
    assert state == through_json(first.state_dict()) == through_json(first.state_dict(5))
    loader = PCRDataset(folder, 8, scan="full", epoch=options).loader(
        after, persistent_workers=persistent and after > 0
    )
    loader.load_state_dict(state)
    assert len(loader) == 7
    seen += ids(loader)
    assert loader.dataset.epoch == 1
    assert seen + ids(itertools.islice(loader, 4)) == expected[:16]
    # Running workers hear of a loaded state, too.
    loader.load_state_dict(state)
    assert ids(loader) == expected[5:12]


def test_a_state_of_something_else_is_refused(folder, two):
    """Other shards, options or versions would mean other samples: the error names what differs."""
    options = EpochOptions(seed=1)
    state = PCRDataset(folder, 8, epoch=options).state_dict(3)
    assert state["segments"] == [[8, 1, 4, 3]]
    others = [
        ("shards", PCRDataset(two, 8, epoch=options)),
        ("seed", PCRDataset(folder, 8)),
        ("shuffle_shards", PCRDataset(folder, 8, epoch=EpochOptions(seed=1, shuffle_shards=5))),
        ("last", PCRDataset(folder, 8, epoch=EpochOptions(seed=1, last="pad"))),
        ("weights", PCRDataset(folder, 8, epoch=EpochOptions(seed=1, weights=(1.0,)))),
    ]
    for name, other in others:
        before = other.state_dict()
        with pytest.raises(
            ValueError, match=f"expected a state of the same dataset and options, its {name} is"
        ):
            other.load_state_dict(through_json(state))
        assert other.state_dict() == before
    dataset = PCRDataset(folder, 8, epoch=options)
    before = dataset.state_dict()
    for wrong in (
        *({"version": version} for version in (2, None)),
        *({"epoch": epoch} for epoch in (-1, None, "1", 1.0, 1 << 63)),
        *(
            {"segments": segments}
            for segments in (
                None,
                7,
                "abcd",
                [3],
                [[8, 1, 4]],
                [[8, 1, 4, "1"]],
                [[8, 1, 4, 1]] * 65,
            )
        ),
        {"segments": [[8, 1, 4, 99]]},  # more steps than the epoch has
        {"segments": [[8, 3, 4, 1]]},  # slots that do not divide the batch
    ):
        with pytest.raises(ValueError, match="expected"):
            dataset.load_state_dict(state | wrong)
        assert dataset.state_dict() == before


# --- the loader itself


def test_leaving_early_and_going_on(folder):
    """An epoch that is left early begins anew; with ``set_epoch`` nothing of it remains."""
    dataset = PCRDataset(folder, 4)
    loader = dataset.loader(2)
    for _, _batch in zip(range(5), loader, strict=False):
        pass
    dataset.set_epoch(2)
    assert loader.state_dict() == PCRDataset(folder, 4).state_dict() | {"epoch": 2}
    assert ids(loader) == whole(folder, EpochOptions(), 4, 2)
    assert dataset.epoch == 3


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
)
def test_a_loop_that_stops_after_the_last_batch_goes_on_to_the_next_epoch(folder, options):
    """Lightning asks for len() batches and no more, and its epochs are those of a plain loop.

    A state that is saved after the last batch is good, too.
    """
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


def test_a_contradiction_is_seen_before_workers_are_spawned(folder, monkeypatch):
    """A spawned worker knows nothing of its parent's process group, so the parent looks."""
    early = PCRDataset(folder, 4)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="make it after init_process_group"):
        next(iter(early.loader(1, multiprocessing_context="spawn")))


def test_batches_out_of_order_are_refused(folder):
    """A loader that gives batches as they come could not be resumed exactly."""
    with pytest.raises(ValueError, match="in_order"):
        PCRDataset(folder, 4).loader(2, in_order=False)


def test_no_warning_about_lengths(folder):
    """A length that was asked for in a resumed epoch does not hold for the next.

    And torch does not complain.
    """
    loader = PCRDataset(folder, 4).loader()
    state = [loader.state_dict() for _ in loader][9]
    loader = PCRDataset(folder, 4).loader()
    loader.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(loader) == SAMPLES // 4 - 10
        # Not list(loader), which asks for the length.
        assert [sum(1 for _ in loader), sum(1 for _ in loader)] == [
            SAMPLES // 4 - 10,
            SAMPLES // 4,
        ]


@pytest.mark.parametrize("workers", [0, 1])
def test_setting_the_loaded_epoch_keeps_its_place(folder, workers):
    """The usual loop sets the epoch also where it resumes: that must not begin the epoch anew, but
    a second call does.
    """
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


# --- torchdata


@pytest.fixture
def stateful():
    """``StatefulDataLoader``; its absence is loud."""
    reason = "TORCHDATA IS NOT INSTALLED: pip install torchdata"
    return pytest.importorskip("torchdata.stateful_dataloader", reason=reason).StatefulDataLoader


def make_stateful(stateful, folder, workers, state=None, **options):
    dataset = PCRDataset(folder, 8, scan=1, epoch=EpochOptions(seed=1))
    loader = stateful(dataset, batch_size=None, num_workers=workers, **options)
    if state is not None:
        loader.load_state_dict(through_json(state) if workers == 0 else state)
    return loader


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_dataloader_resumes_exactly(folder, stateful, workers):
    """Behind every batch, torchdata's loader goes on exactly.

    Also when it stops again before each worker has given a batch.
    """
    expected = whole(folder, EpochOptions(seed=1), 8)
    loader = make_stateful(stateful, folder, workers)
    states = [loader.state_dict()] + [loader.state_dict() for _ in loader]
    for done in (0, 1, 2, 5, 11) if workers else range(12):
        loader = make_stateful(stateful, folder, workers, states[done])
        assert ids(loader) == expected[done:]
    state, seen = states[3], expected[:3]
    for _ in range(3):
        loader = make_stateful(stateful, folder, workers, state)
        seen += ids(itertools.islice(loader, 1))
        state = loader.state_dict()
    assert seen == expected[:6]


def test_stateful_dataloader_over_epochs(folder, stateful):
    """Persistent workers begin an epoch with a state of that epoch, not of the one before."""
    loader = make_stateful(stateful, folder, 2, persistent_workers=True)
    assert len(ids(loader)) == 12
    loader.dataset.set_epoch(1)
    expected = whole(folder, EpochOptions(seed=1), 8, epoch=1)
    assert ids(itertools.islice(loader, 1)) == expected[:1]
    state = loader.state_dict()
    assert ids(make_stateful(stateful, folder, 2, state)) == expected[1:]


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_dataloader_behind_an_epoch(folder, stateful, workers):
    """A state that was saved between two epochs goes on with the epoch that the job sets, not with
    the one that is over.
    """
    loader = make_stateful(stateful, folder, workers)
    assert len(ids(loader)) == 12
    loader = make_stateful(stateful, folder, workers, loader.state_dict())
    for epoch in (1, 2):
        loader.dataset.set_epoch(epoch)
        assert ids(loader) == whole(folder, EpochOptions(seed=1), 8, epoch)


def test_stateful_dataloader_with_other_workers_is_refused(folder, stateful):
    """Its state is its workers' own, so that another number of them is an error and not other
    samples.
    """
    loader = make_stateful(stateful, folder, 2)
    list(itertools.islice(loader, 4))
    state = loader.state_dict()
    with pytest.raises((ValueError, KeyError, AssertionError, RuntimeError)):
        list(make_stateful(stateful, folder, 1, state))


# --- killed


def train(url, folder, attempt, epochs, rank, world, size, slots, workers, scan):
    """One rank of a small job: reads the checkpoint if there is one.

    And makes one behind every step.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store-{attempt}", rank=rank, world_size=world
    )
    options = EpochOptions(seed=6, slots=slots)
    dataset = PCRDataset(url, size, scan=scan, image=ImageDecoder(8, "random"), epoch=options)
    loader = dataset.loader(workers, multiprocessing_context="fork" if workers else None)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4))
    checkpoint = {"rows": []}
    path = f"{folder}/checkpoint.json"
    if os.path.exists(path):
        with open(path) as file:
            checkpoint = json.load(file)
        loader.load_state_dict(checkpoint["data"])
        model[1].weight.data = torch.tensor(checkpoint["weight"])
    while dataset.epoch < epochs:
        for batch in loader:
            loss = torch.nn.functional.cross_entropy(model(batch["jpg"] / 255), batch["cls"] % 4)
            model.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.data -= 0.1 * parameter.grad / world
            parts = [torch.zeros(size, dtype=torch.int64) for _ in range(world)]
            dist.all_gather(parts, batch["cls"])
            checkpoint["rows"].append([dataset.epoch, *torch.cat(parts).tolist()])
            checkpoint |= {"data": loader.state_dict(), "weight": model[1].weight.tolist()}
            if rank == 0:
                with open(f"{path}.tmp", "w") as file:
                    json.dump(checkpoint, file)
                os.replace(f"{path}.tmp", path)
            time.sleep(0.005)
    dist.destroy_process_group()


def steps_done(folder):
    """Steps in the checkpoint."""
    try:
        return len(json.loads((folder / "checkpoint.json").read_text())["rows"])
    except FileNotFoundError:
        return 0


def run_with_kills(url, folder, kills, epochs, shapes, seed):
    """Run a job of some epochs to its end, killing it at random points.

    Its steps as (epoch, ids).
    """
    rng, context = random.Random(seed), multiprocessing.get_context("fork")
    killed = []
    for attempt in range(kills + 1):
        world, size, slots = rng.choice(shapes)
        shape = (world, size, slots, rng.choice([0, 1, 2]), rng.choice([1, 2, 5, "full"]))
        ranks = [
            context.Process(target=train, args=(url, folder, attempt, epochs, rank, *shape))
            for rank in range(world)
        ]
        for rank in ranks:
            rank.start()
            os.setpgid(rank.pid, rank.pid)  # to be killed with its workers
        if attempt < kills:
            target = steps_done(folder) + rng.choice([0, 1, 1, 2, 3])
            while steps_done(folder) < target and all(rank.is_alive() for rank in ranks):
                time.sleep(0.002)
            time.sleep(rng.random() * (0.02 if target else 0.2))
            for rank in rng.sample(ranks, len(ranks)):
                os.killpg(rank.pid, signal.SIGKILL)
        for rank in ranks:
            rank.join(60)
        killed.append(all(rank.exitcode for rank in ranks))
        assert attempt < kills or [rank.exitcode for rank in ranks] == [0] * world
    assert killed == [True] * kills + [False], "the job ended before it was killed often enough"
    rows = json.loads((folder / "checkpoint.json").read_text())["rows"]
    return [(epoch, ids) for epoch, *ids in rows]


def check_elastic(url, folder, kills, epochs, seed):
    """Whatever world it ran with, the job had exactly the uninterrupted sequence."""
    rows = run_with_kills(url, folder, kills, epochs, [(1, 8, 4), (2, 4, 4), (4, 2, 4)], seed)
    options = EpochOptions(seed=6, slots=4)
    assert rows == [
        (epoch, row) for epoch in range(epochs) for row in whole(url, options, 8, epoch)
    ]


def check_any(url, folder, kills, epochs, seed):
    """With other batch sizes and worlds each epoch had its samples once, but for less than a
    batch.
    """
    shapes = [(1, 5, None), (2, 3, None), (1, 8, None), (2, 4, None), (3, 4, None)]
    rows = run_with_kills(url, folder, kills, epochs, shapes, seed)
    for epoch in range(epochs):
        counts = collections.Counter(number for of, row in rows if of == epoch for number in row)
        assert max(counts.values()) == 1
        assert SAMPLES - len(counts) < 12


@pytest.mark.parametrize("check", [check_elastic, check_any])
def test_killed_jobs_lose_and_repeat_nothing(folder, tmp_path, check):
    """A job that is killed goes on from its last checkpoint, with other ranks, workers and scans,
    as if nothing had been.
    """
    check(folder, tmp_path, kills=4, epochs=2, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("check", [check_elastic, check_any])
def test_a_hundred_kills(folder, tmp_path, check):
    """So it does a hundred times in a row."""
    check(folder, tmp_path, kills=100, epochs=20, seed=2)


JOB = """
import json, os, sys
import torch
import torch.distributed as dist
from pcrshard import EpochOptions, ImageDecoder, PCRDataset

url, folder, resume = sys.argv[1:]
torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
image = ImageDecoder(12, "random", flip=0.5)
dataset = PCRDataset(url, 4, scan=3, image=image, epoch=EpochOptions(seed=8))
loader = dataset.loader(threads=2, isolate=True) if resume == "resume" else dataset.loader(2)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(),
    torch.nn.Linear(800, 4),
)
model = torch.nn.parallel.DistributedDataParallel(model)
optimiser = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
losses = []
if resume == "resume":
    saved = torch.load(f"{folder}/middle-{dist.get_rank()}.pt")
    model.load_state_dict(saved["model"])
    optimiser.load_state_dict(saved["optimiser"])
    loader.load_state_dict(json.loads(saved["data"]))
    losses = saved["losses"]
while dataset.epoch < 2:
    for batch in loader:
        loss = torch.nn.functional.cross_entropy(model(batch["jpg"] / 255), batch["cls"] % 4)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item().hex())
        if len(losses) == 7 and resume == "whole":
            state = {"model": model.state_dict(), "losses": losses}
            state |= {"optimiser": optimiser.state_dict(), "data": json.dumps(loader.state_dict())}
            torch.save(state, f"{folder}/middle-{dist.get_rank()}.pt")
with open(f"{folder}/{resume}-{dist.get_rank()}.json", "w") as file:
    weights = [p.double().sum().item().hex() for p in model.parameters()]
    json.dump({"losses": losses, "weights": weights}, file)
dist.destroy_process_group()
"""


def test_losses_are_bit_equal_after_a_resume(folder, tmp_path):
    """Two ranks under torchrun that begin again in the middle, with a child process of threads in
    place of workers, have the losses of those that ran through, bit for bit.
    """
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += [
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        str(tmp_path / "job.py"),
        folder,
        str(tmp_path),
    ]
    for how in ("whole", "resume"):
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, how],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        through, resumed = (
            json.loads((tmp_path / f"{how}-{rank}.json").read_text()) for how in ("whole", "resume")
        )
        assert len(through["losses"]) == 24
        assert through == resumed
