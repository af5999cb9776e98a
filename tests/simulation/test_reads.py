"""What an epoch reads, against the dataset's own index."""

import pytest

from pcrshard import open_dataset
from pcrshard.simulation.reads import epoch_reads, plan_costs
from pcrshard.training.order import Geometry


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("workers", [1, 3])
def test_an_epoch_reads_every_prefix(dataset, ranks, workers):
    """The costs cover all bytes, and what several workers read is counted as repeated."""
    index, _ = open_dataset(dataset)
    sizes = [shard.num_samples for shard in index.shards]
    scans = [*range(1, 11), "full"]
    prefixes = {scan: [shard.prefix_stop(scan) for shard in index.shards] for scan in scans}
    costs = plan_costs(epoch_reads(sizes, Geometry(4, ranks, 1), workers=workers), prefixes)
    assert [cost.scan for cost in costs] == scans
    for cost in costs:
        assert cost.steps == 6
        assert cost.epoch_bytes - cost.repeated_bytes == index.prefix_bytes(cost.scan)
        assert cost.requests >= len(index.shards)
        assert (cost.repeated_bytes == 0) == (cost.requests == len(index.shards))
        assert 0 < cost.worker_memory_bytes <= cost.epoch_bytes
        assert cost.images_per_second is None
