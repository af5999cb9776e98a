"""EpochSampler: the order of PCRLoader for other datasets."""

import itertools
import json
import random
import warnings

import numpy as np
import pytest
import torch
from numbered import flat
from torch.utils.data import DataLoader

from pcrshard import EpochSampler

SIZES = [7, 9, 8, 11, 5, 10, 14]


class Squares:
    """A dataset of someone else."""

    def __len__(self):
        return sum(SIZES)

    def __getitem__(self, number):
        return number**2


@pytest.mark.parametrize(
    ("sizes", "workers"),
    [(64, 0), (SIZES, 2), (np.array(SIZES), 0)],
    ids=["number", "list", "array"],
)
def test_a_dataloader_reads_each_sample_once_an_epoch(sizes, workers):
    """Two ranks of a DataLoader see each sample once between them, in another order each epoch."""
    epochs = []
    samplers = [EpochSampler(sizes, 4, rank=rank, world_size=2) for rank in range(2)]
    loaders = [DataLoader(Squares(), batch_sampler=each, num_workers=workers) for each in samplers]
    for _ in range(2):
        ranks = [[batch.tolist() for batch in loader] for loader in loaders]
        assert list(map(len, ranks)) == [8, 8]
        epochs.append(flat(flat(ranks)))
    assert sorted(epochs[0]) == sorted(epochs[1]) == [number**2 for number in range(64)]
    assert epochs[0] != epochs[1]
    assert [each.epoch for each in samplers] == [2, 2]


def torchdata():
    reason = "NO TORCHDATA: pip install torchdata"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchdata", reason=reason)


def stateful_loader(sampler, workers):
    """torchdata's loader over the sampler."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses what torch deprecates
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(Squares(), batch_sampler=sampler, num_workers=workers)


def node_loader(sampler, workers):
    """torchdata's nodes over the sampler, with threads that read ahead."""
    from torchdata import nodes

    def collate(ids):
        return torch.tensor([Squares()[number] for number in ids])

    source = nodes.SamplerWrapper(sampler)
    if workers:
        source = nodes.ParallelMapper(source, collate, num_workers=workers, method="thread")
    else:
        source = nodes.Mapper(source, collate)
    return nodes.Loader(source)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [stateful_loader, node_loader])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_torchdata_resumes_with_it(make, workers):
    """torchdata saves and loads the state, with workers that are ahead, in any epoch, at its
    beginning and its end.
    """
    torchdata()

    def loader():
        return make(EpochSampler(SIZES, 8, rank=0, world_size=1), workers)

    expected = list(EpochSampler(SIZES, 8, rank=0, world_size=1))
    expected = [[number**2 for number in batch] for batch in expected]
    for epochs, done in ((0, 0), (0, 3), (0, 8), (1, 5)):
        first = loader()
        whole = [[batch.tolist() for batch in first] for _ in range(epochs)]
        assert whole == [expected][:epochs]
        batches = iter(first)
        begun = [next(batches).tolist() for _ in range(done)]
        state = first.state_dict()
        rest = [batch.tolist() for batch in batches]
        again = loader()
        again.load_state_dict(state)
        resumed = iter(again)
        if done < 8:
            assert [batch.tolist() for batch in resumed] == rest
            resumed = iter(again)
        else:
            assert not rest
            assert begun == expected
        assert next(resumed).tolist() == next(iter(first)).tolist()


@pytest.mark.parametrize("drop_last", [True, "pad"])
def test_elastic_jobs_go_on_with_the_same_sequence(drop_last):
    """Stopped after any batches and resumed on other numbers of ranks, a job sees exactly the
    uninterrupted sequence, though its DataLoader had asked for more.
    """
    how = {"seed": 3, "max_world_size": 4, "drop_last": drop_last}
    expected = list(EpochSampler(SIZES, 12, rank=0, world_size=1, **how))
    rng = random.Random(1)
    for _ in range(10):
        seen, state = [], None
        while len(seen) < len(expected):
            world = rng.choice([1, 2, 4])
            done = min(rng.randint(0, 3), len(expected) - len(seen))
            columns, states = [], []
            for rank in range(world):
                sampler = EpochSampler(SIZES, 12 // world, rank=rank, world_size=world, **how)
                if state:
                    sampler.load_state_dict(json.loads(json.dumps(state)))
                ahead = list(itertools.islice(sampler, done + 2))
                columns.append(ahead[:done])
                states.append(sampler.state_dict(done))
            assert all(each == states[0] for each in states)
            state = states[0]
            seen += [flat(row) for row in zip(*columns, strict=True)]
        assert seen == expected
        assert state["epoch"] == 1


def test_states_of_something_else_are_refused():
    """A state of other samples, options or steps is no position."""
    sampler = EpochSampler(SIZES, 4, rank=0, world_size=1)
    state = sampler.state_dict(0)
    for other in (
        EpochSampler(63, 4, rank=0, world_size=1),
        EpochSampler(SIZES, 4, seed=1, rank=0, world_size=1),
        EpochSampler(SIZES, 4, shuffle=False, rank=0, world_size=1),
    ):
        with pytest.raises(ValueError, match="same samples and options"):
            other.load_state_dict(state)
    for wrong in ({"epoch": -1}, {"segments": [[4, 1, 1, 999]]}, {"segments": None}):
        with pytest.raises(ValueError, match="expected"):
            sampler.load_state_dict(state | wrong)
    with pytest.raises(ValueError, match="no batches before"):
        sampler.state_dict(1)
    next(iter(sampler))
    with pytest.raises(ValueError, match="expected 0 to 16 batches, got 17"):
        sampler.state_dict(17)
    with pytest.raises(ValueError, match="at least one global batch"):
        EpochSampler(3, 4, rank=0, world_size=1)
    sampler.set_epoch(5)
    assert sampler.epoch == 5
    assert len(sampler) == 16
