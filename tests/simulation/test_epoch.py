"""A simulated epoch, against laws that hold for any."""

import sys
import time

import pytest

from pcrshard.errors import MissingDependency
from pcrshard.simulation.cluster import Cluster, Job
from pcrshard.simulation.epoch import Simulation

SIZES = [64] * 40
PREFIXES = [64 * 10_000] * 40


def run(cluster=Cluster(), job=Job(1, 1000, 32, 1)):
    """The trace of an epoch."""
    pytest.importorskip("simpy")
    simulation = Simulation(cluster, job, SIZES, PREFIXES, lanes_per_rank=max(job.workers, 1))
    return simulation.run()


def rate(trace):
    return trace.images / trace.step_ends[-1]


def test_an_accelerator_that_never_waits():
    """Without any limit an epoch takes what its steps take."""
    trace = run()
    assert rate(trace) == pytest.approx(1000)
    assert trace.waited == 0
    assert (trace.requests, trace.sent_bytes) == (40, sum(PREFIXES))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_slow_link_decides(workers):
    """Theorem 4.1: X = W / E[s], for any number of workers; what two of them read counts twice."""
    trace = run(Cluster(1e6), Job(1, 1e6, 32, workers))
    assert rate(trace) == pytest.approx(1e6 * trace.images / trace.sent_bytes, rel=0.01)
    assert trace.sent_bytes <= 1.03 * sum(PREFIXES)


def test_nodes_have_links_of_their_own():
    """Two nodes behind slow links of their own read twice as fast as two ranks behind one."""
    apart, together = (
        run(Cluster(per_node=ranks, cores=8, link=1e6), Job(2, 1e6, 16, 1)) for ranks in (1, 2)
    )
    assert rate(apart) == pytest.approx(2 * rate(together), rel=0.05)


FAST = {"accelerators": 1, "rate": 1e6, "batch": 32}
SLOW_DECODING = {"image_seconds": 0.01}
# Of an image: 10 ms, and 10 kB x 1 us.
SLOW_RECEIVING = {"image_seconds": 0.01, "byte_seconds": 1e-6}


@pytest.mark.parametrize(
    ("job", "one_core", "two_cores"),
    [
        (Job(**FAST, workers=2, **SLOW_DECODING), 100, 200),
        (Job(**FAST, workers=0, threads=2, **SLOW_DECODING), 100, 200),
        (Job(**FAST, workers=0, **SLOW_RECEIVING), 50, 100),
    ],
    ids=["two workers", "two threads", "receiving beside decoding"],
)
def test_cores_decide_where_decoding_is_slow(job, one_core, two_cores):
    """A second core doubles the rate of a job with work for two."""
    assert rate(run(Cluster(cores=1), job)) == pytest.approx(one_core, rel=0.1)
    assert rate(run(Cluster(cores=2), job)) == pytest.approx(two_cores, rel=0.1)


@pytest.mark.parametrize(
    ("workers", "threads", "expected"), [(0, 0, 500), (1, 0, 1000), (0, 1, 1000)]
)
def test_decoding_overlaps_with_workers_or_threads_only(workers, threads, expected):
    """A rank that decodes itself needs the time of both; a worker or a thread hides the shorter."""
    job = Job(1, 1000, 32, workers, threads, image_seconds=0.001)
    assert rate(run(job=job)) == pytest.approx(expected, rel=0.05)


def test_a_request_is_limited_by_its_stream_and_its_latency():
    """Two requests at a time, each of a second and a half for 64 images."""
    trace = run(Cluster(stream=64e4, latency=(0.5, 0.5)), Job(1, 1e6, 32, 1))
    assert rate(trace) == pytest.approx(2 * 64 / 1.5, rel=0.05)


def test_the_same_seed_gives_the_same_epoch():
    """Latencies are drawn, but a simulation can be repeated."""
    cluster = Cluster(1e7, latency=(0.05, 0.5))
    assert run(cluster) == run(cluster)


@pytest.mark.long
def test_a_thousand_accelerators_take_less_than_a_minute():
    """ImageNet on 1,024 accelerators of 128 machines, all of its 19 steps."""
    pytest.importorskip("simpy")
    sizes = [1024] * 1250 + [1167]
    cluster = Cluster(1e10, 8, 192, 12.5e9, 9e7, (0.03, 0.3))
    job = Job(1024, 2800, 64, 4, image_seconds=0.0006)
    begun = time.process_time()
    prefixes = [47_000 * size for size in sizes]
    trace = Simulation(cluster, job, sizes, prefixes).run(steps=4)
    assert len(trace.step_ends) == 4
    assert time.process_time() - begun < 60


def test_without_simpy_it_says_what_to_install(monkeypatch):
    """The package works without; the command tells."""
    monkeypatch.setitem(sys.modules, "simpy", None)
    simulation = Simulation(Cluster(), Job(1, 10, 32, 1), SIZES, PREFIXES)
    with pytest.raises(MissingDependency, match="simulate"):
        simulation.run()
