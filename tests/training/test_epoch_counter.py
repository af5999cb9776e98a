"""Epochs that advance by themselves: in every way in which torch starts workers."""

import sys
import threading
import time

import numpy as np
import pytest
import torch
import webdataset as wds
from numbered import numbered, write
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import pcrshard
from pcrshard.training.shard_lists import EpochCounter


@pytest.fixture(scope="module")
def many_shards(tmp_path_factory):
    """A dataset of 24 shards with two images each."""
    folder = tmp_path_factory.mktemp("many")
    write(folder / "shards", numbered(48), 2)
    return folder


def shard_orders(loader, epochs=5):
    """The shards of each epoch in the order in which they come; each epoch must be complete."""
    found = []
    for _ in range(epochs):
        urls = [url for batch in loader for url in batch[0]]
        assert len(urls) == 48
        found.append(tuple(dict.fromkeys(urls)))
        assert len(found[-1]) == 24
    return found


WORKERS = {
    "no workers": {"num_workers": 0},
    "2 workers": {"num_workers": 2},
    "2 spawned workers": {"num_workers": 2, "multiprocessing_context": "spawn"},
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True},
}


@pytest.mark.parametrize(
    "workers",
    [pytest.param(name, marks=[pytest.mark.long] * ("spawned" in name)) for name in WORKERS],
)
def test_a_pipeline_has_a_new_order_each_epoch(workers, many_shards, monkeypatch):
    """Five epochs of a pipeline have five orders of shards, however its workers are started."""
    monkeypatch.chdir(many_shards)
    _, urls = pcrshard.open_dataset("shards")
    dataset = (
        wds.WebDataset(pcrshard.shards(urls), shardshuffle=False)
        .pcr_scan(5, index="shards")
        .pcr_decode(size=64, crop="random")
        .decode(partial=True)
        .to_tuple("__url__")
        .batched(32)
    )
    loader = wds.WebLoader(dataset, batch_size=None, **WORKERS[workers])
    orders = shard_orders(loader)
    assert len(set(orders)) == 5


@pytest.mark.parametrize(
    ("workers", "is_ordered"),
    [
        ("no workers", False),
        ("2 workers", False),
        ("2 persistent workers", False),
        ("2 workers", True),
    ],
)
def test_seeded_crops_differ_by_epoch(workers, is_ordered, many_shards):
    """Each epoch has crops of its own, which a run with the same seed repeats, and a resumed one
    continues.
    """

    def crops(first=0):
        order = pcrshard.shards(names_of(many_shards))
        order.epoch = first
        dataset = (
            wds.WebDataset(order if is_ordered else order.urls, shardshuffle=False)
            .pcr_scan(5)
            .pcr_decode(size=8, crop="random", seed=1)
            .to_tuple("__key__", "jpg")
        )
        loader = wds.WebLoader(dataset, batch_size=None, **WORKERS[workers])
        for _ in range(3 - first):
            yield {key: np.asarray(image).tobytes() for key, image in loader}

    epochs = list(crops())
    assert all(len({epoch[key] for epoch in epochs}) == 3 for key in epochs[0])
    assert list(crops()) == epochs
    if is_ordered:
        assert list(crops(1)) == epochs[1:]


def test_a_new_loader_for_each_epoch_goes_on(many_shards):
    """Recreated loaders with different worker counts never repeat or lose a shard."""
    dataset = of_order(many_shards)
    orders = []
    for workers in (2, 1, 0, 2, 1, 0):
        orders += shard_orders(wds.WebLoader(dataset, batch_size=None, num_workers=workers), 1)
    assert len(set(orders)) == 6


def test_a_seed_that_is_set_for_each_epoch_repeats_no_order(many_shards):
    """Calling torch.manual_seed before each epoch does not repeat the shard order."""
    dataset = of_order(many_shards)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=2)
    orders = []
    for _ in range(4):
        torch.manual_seed(0)
        orders += shard_orders(loader, 1)
    assert len(set(orders)) == 4


def test_two_loaders_at_a_time_both_read_everything(many_shards):
    """Loaders that share a pipeline and run at the same time have an epoch each."""
    dataset = of_order(many_shards)
    loaders = [wds.WebLoader(dataset, batch_size=None, num_workers=2) for _ in range(2)]
    pairs = list(zip(*loaders, strict=True))
    for which in range(2):
        urls = [url for pair in pairs for url in pair[which][0]]
        assert sorted(urls) == sorted(2 * list(names_of(many_shards)))


class Late(IterableDataset):
    """An epoch of a counter, begun by each worker after its delay."""

    def __init__(self, counter, delays):
        self.counter = counter
        self.delays = delays

    def __iter__(self):
        time.sleep(self.delays[get_worker_info().id])
        yield self.counter.begin()


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_of_one_loader_share_its_epoch(context):
    """However late a worker starts, and whatever other loaders began before it, it reads the epoch
    of its loader; with equal seeds, too.
    """
    counter = EpochCounter()
    for delays in ((0, 0.6), (0.3, 0.3)), ((0.6, 0), (0.3, 0.3)):
        loaders = []
        for own in delays:
            torch.manual_seed(0)
            how = {"batch_size": None, "num_workers": 2, "multiprocessing_context": context}
            loaders.append(iter(DataLoader(Late(counter, own), **how)))
        begun = [set(loader) for loader in loaders]
        assert list(map(len, begun)) == [1, 1]
        assert set.union(*begun) == {counter.epoch - 1, counter.epoch - 2}


def test_epochs_that_begin_at_the_same_time_are_distinct():
    """Threads that begin epochs of one counter together never get the same number."""
    counter, begun = EpochCounter(), []
    threads = [
        threading.Thread(target=lambda: begun.extend(counter.begin() for _ in range(500)))
        for _ in range(4)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(begun) == 2000
    assert counter.epoch == 2000


def test_an_order_can_be_resumed(many_shards):
    """With ``epoch`` set, workers go on with the order of that epoch, which the seed decides."""
    order = pcrshard.shards(names_of(many_shards), seed=7)
    dataset = wds.WebDataset(order, shardshuffle=False).pcr_scan(1).to_tuple("__url__").batched(2)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    for first in (0, 300, 1):
        order.epoch = first
        orders = [tuple(order.of_epoch(epoch)) for epoch in range(first, first + 3)]
        assert shard_orders(loader, 3) == orders
        assert order.epoch == first + 3


def names_of(folder):
    return pcrshard.open_dataset(folder / "shards")[1]


def of_order(folder):
    """Batches of one URL, read in the order of a ShardOrder."""
    order = pcrshard.shards(names_of(folder))
    stage = wds.WebDataset(order, shardshuffle=False).pcr_scan(1)
    return stage.to_tuple("__url__").batched(2)
