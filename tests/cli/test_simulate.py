"""``pcrshard plan --simulate``: from options to a table."""

import pytest

from pcrshard import open_dataset

pytest.importorskip("simpy")
SIMULATE = ["--simulate", "100000", "--batch", "6", "--lanes-per-rank", "1", "--workers", "1"]


@pytest.fixture
def plan(dataset, cli):
    """Return a function that simulates this dataset with more options and returns the rows."""
    return lambda *more: cli("plan", dataset, *SIMULATE, *more, "--json")[1]["scans"]


def test_a_slow_storage_is_as_fast_as_its_bytes(dataset, plan):
    """Each scan has a row; what a slow storage sends in a second decides."""
    rows = plan("--bandwidth", "0.1", "--decode", "100000")
    assert [row["scan"] for row in rows] == [*range(1, 11), "full"]
    index, _ = open_dataset(dataset)
    for row in rows:
        expected = 24 / (index.prefix_bytes(row["scan"]) / 1e5)
        assert row["images_per_second"] == pytest.approx(expected, rel=0.05)
        assert row["stall"] > 0.9


def test_latency_is_an_option(plan):
    """Latency makes the first batch wait."""
    command = ("--scan", "2", "--latency", "20,80", "--per-node", "2", "--cores", "4")
    assert plan(*command)[0]["first_batch_seconds"] > 0.01
