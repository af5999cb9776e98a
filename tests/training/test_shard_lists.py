"""Shard lists for WebDataset: orders by epoch, and ranks that survive spawn and a plain srun."""

import pickle
import warnings

import pytest
import webdataset as wds

import pcrshard

URLS = [f"{i}.tar" for i in range(20)]


def test_each_epoch_has_its_own_order():
    """Epochs differ, every shard comes once, and seed and epoch alone decide."""
    orders = [pcrshard.shards(URLS, seed=3).of_epoch(epoch) for epoch in range(4)]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == sorted(URLS) for order in orders)
    assert orders[2] == pcrshard.shards("{0..19}.tar", 3).of_epoch(2)


@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")])
def test_ranks_share_the_shards(monkeypatch, names):
    """Under torchrun and under a plain srun, each rank gets its part, and together they get all."""
    parts = []
    for rank in range(3):
        monkeypatch.setenv(names[0], str(rank))
        monkeypatch.setenv(names[1], "3")
        parts.append(list(pcrshard.split_by_node(URLS)))
    assert sorted(url for part in parts for url in part) == sorted(URLS)
    assert [len(part) for part in parts] == [7, 7, 6]


def test_a_spawned_worker_keeps_its_parents_rank(monkeypatch):
    """What a spawned worker unpickles knows the rank, although the worker itself could not find it
    out.
    """
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    sent = pickle.dumps(pcrshard.split_by_node)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert list(pickle.loads(sent)(URLS)) == URLS[1::4]
    assert list(pcrshard.split_by_node(URLS)) == URLS


def test_a_frozen_order_is_pointed_out(shard_urls):
    """Who relies on WebDataset's shardshuffle learns that its epochs are all alike.

    And what to use.
    """
    with pytest.warns(UserWarning, match=r"same order of shards.*pcrshard\.shards"):
        wds.WebDataset(shard_urls, shardshuffle=100).pcr_scan(1)
    with pytest.warns(UserWarning, match=r"detshuffle.*pcrshard\.shards"):
        wds.WebDataset(shard_urls, shardshuffle=100, detshuffle=True).pcr_scan(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wds.WebDataset(pcrshard.shards(shard_urls).of_epoch(2), shardshuffle=False).pcr_scan(1)
        wds.WebDataset(pcrshard.shards(shard_urls), shardshuffle=False).pcr_scan(1)


def test_an_order_lists_the_next_epoch(shard_urls):
    """Looking at an order does not advance it; reading does, also in a plain DataPipeline."""
    order = pcrshard.shards("{0..9}.tar", seed=3)
    first = order.of_epoch(0)
    assert list(order) == list(order) == first
    assert [item["url"] for item in order()] == first
    assert list(order) == order.of_epoch(1)
    order = pcrshard.shards(shard_urls)
    pipeline = wds.DataPipeline(order, wds.split_by_worker, pcrshard.pcr_scan(1))
    for epoch in range(3):
        read = dict.fromkeys(sample["__url__"] for sample in pipeline)
        assert list(read) == order.of_epoch(epoch)


def test_a_part_of_an_order_is_not_taken_for_the_whole(shard_urls):
    """Who takes some shards of an order reads those."""
    some = list(pcrshard.shards(shard_urls))[:3]
    dataset = wds.WebDataset(some, shardshuffle=False).pcr_scan(1)
    assert {sample["__url__"] for sample in dataset} == set(some)
