"""What is simulated, as numbers."""

import random
import statistics

import pytest

from pcrshard.simulation.cluster import Cluster, Job, draw_latency


@pytest.mark.parametrize(
    "make",
    [
        lambda: Cluster(bandwidth=0),
        lambda: Cluster(latency=(-1, 1)),
        lambda: Cluster(latency=(0.2, 0.1)),
        lambda: Cluster(cores=0),
        lambda: Job(accelerators=1 << 20),
        lambda: Job(rate=float("nan")),
        lambda: Job(image_seconds=-1),
    ],
)
def test_machines_that_cannot_be_are_refused(make):
    """An impossible number raises an error that names it instead of a silent wrong result."""
    with pytest.raises(ValueError, match="expected"):
        make()


def test_latencies_have_the_median_and_the_tail_that_were_asked_for():
    """One request in a hundred takes as long as the option says."""
    rng = random.Random(1)
    drawn = sorted(draw_latency((0.03, 0.3), rng) for _ in range(20_000))
    assert statistics.median(drawn) == pytest.approx(0.03, rel=0.05)
    assert drawn[int(0.99 * len(drawn))] == pytest.approx(0.3, rel=0.15)
