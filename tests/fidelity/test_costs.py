"""What each scan costs, against sums over the dataset's own index, and how figures are shown."""

import pytest

from pcrshard import open_dataset, stage
from pcrshard.fidelity.costs import human_bytes, scan_costs


@pytest.fixture(scope="module")
def index(dataset):
    return open_dataset(dataset)[0]


def test_scan_costs_are_sums_over_the_shards(index):
    """Each scan's bytes are those of all prefixes, and its saving is against full fidelity."""
    costs = scan_costs(index)
    assert [cost.scan for cost in costs] == [*range(1, 11), "full"]
    for cost in costs:
        assert cost.prefix_bytes == sum(shard.prefix_stop(cost.scan) for shard in index.shards)
        assert cost.bytes_per_sample == cost.prefix_bytes / 24
        assert cost.saving == costs[-1].prefix_bytes / cost.prefix_bytes


def test_a_staged_copy_costs_what_it_holds(dataset, index, tmp_path):
    """Scans that are not there have no cost; savings are still against the whole dataset."""
    copy = stage(dataset, tmp_path, 3)
    assert scan_costs(copy) == scan_costs(index)[:3]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999.4, "999 B"), (999.6, "1 kB"), (12_345, "12.3 kB"), (5e15, "5000 TB")],
)
def test_sizes_for_people(size, text):
    """Three digits and a unit, up to terabytes."""
    assert human_bytes(size) == text
