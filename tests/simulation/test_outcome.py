"""The figures that a reader decides by."""

import pytest

from pcrshard.simulation.cluster import Cluster, Job, Storage, Work
from pcrshard.simulation.epoch import Simulation, Trace
from pcrshard.simulation.outcome import outcome


def test_stalls_and_dollars_can_be_reckoned_by_hand():
    """An accelerator that works half of the time stalls for the other half."""
    storage = Storage(request_price=0.5, egress_price=0.01)
    job = Job(2, 100, 50, 1)
    simulation = Simulation(Cluster(storage), job, Work(), [400], [1000])
    trace = Trace(400, [1.5, 2.5, 3.0, 4.0], 0.5, 4.0, 3, 100, 0)
    found = outcome(simulation, trace)
    assert found.images_per_second == 100
    assert found.stall == pytest.approx(0.5)
    assert found.step_p99 == 1.0
    assert found.dollars == pytest.approx(2.5)
