"""What each worker reads is what a real job reads."""

from pcrshard.simulation.reads import epoch_reads
from pcrshard.training.epoch_order import Geometry, Rules, epoch_order
from pcrshard.training.shard_schedule import account

SIZES = [50, 40, 60, 30]


def test_requests_and_images_are_those_of_the_plan():
    """The simulation counts the requests that ``pcrshard plan`` counts, for all workers."""
    geometry = Geometry(12, 3, 2)
    reads = dict(epoch_reads(SIZES, geometry, Rules(), workers=2))
    order = epoch_order(SIZES, geometry, Rules())
    counted = account(order, SIZES, SIZES, 3, 2)
    for place, requests in zip(reads, counted.requests.flatten().tolist(), strict=True):
        assert len(reads[place].shards) == requests
        assert reads[place].needed[-1] == requests
    assert sum(sum(each.images) for each in reads.values()) == len(order.ids)


def test_only_the_first_steps():
    """So many steps over all workers, whichever makes them."""
    reads = dict(epoch_reads(SIZES, Geometry(10), Rules(), workers=2, steps=5))
    assert [len(each.images) for each in reads.values()] == [3, 2]
