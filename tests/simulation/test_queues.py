"""What is shared and makes others wait, against what can be reckoned by hand."""

import pytest

from pcrshard.simulation.queues import Barrier, Cores, Pipe

simpy = pytest.importorskip("simpy")


def test_a_pipe_serves_one_after_the_other():
    """Two that come at once take as long as both bytes need; who comes late finds it free."""
    pipe = Pipe(100)
    assert pipe.pass_through(0, 50) == 0.5
    assert pipe.pass_through(0, 50) == 1.0
    assert pipe.pass_through(5, 100) == 6.0
    assert Pipe(float("inf")).pass_through(3, 1e9) == 3


def test_cores_are_shared_evenly():
    """Three jobs of a second on two cores end together after one and a half; a fourth that comes
    when they are gone has a core of its own.
    """
    environment = simpy.Environment()
    cores = Cores(environment, 2)
    ends = []

    def job(delay, seconds):
        yield environment.timeout(delay)
        yield cores.work(seconds)
        ends.append(round(environment.now, 9))

    for delay, seconds in ((0, 1), (0, 1), (0, 1), (2, 1)):
        environment.process(job(delay, seconds))
    environment.run()
    assert ends == [1.5, 1.5, 1.5, 3.0]


def test_a_barrier_opens_again_and_again():
    """Nobody begins a step before all have ended the one before."""
    environment = simpy.Environment()
    barrier = Barrier(environment, 2)
    steps = []

    def rank(seconds):
        for _ in range(2):
            yield environment.timeout(seconds)
            yield barrier.wait()
            steps.append(environment.now)

    environment.process(rank(1))
    environment.process(rank(3))
    environment.run()
    assert steps == [3, 3, 6, 6]
