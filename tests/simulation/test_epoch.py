"""A simulated epoch, against laws that hold for any."""

import sys
import time

import pytest

from pcrshard.errors import MissingDependency
from pcrshard.simulation.cluster import Cluster, Job, Node, Storage, Work
from pcrshard.simulation.epoch import Simulation

SIZES = [64] * 40
PREFIXES = [64 * 10_000] * 40


def run(cluster=Cluster(), job=Job(1, 1000, 32, 1), work=Work(), prefixes=PREFIXES, epochs=1):
    """The trace of the last of some epochs."""
    pytest.importorskip("simpy")
    simulation = Simulation(cluster, job, work, SIZES, prefixes, lanes_per_rank=max(job.workers, 1))
    return [simulation.run(epoch) for epoch in range(epochs)][-1]


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
    trace = run(Cluster(Storage(1e6)), Job(1, 1e6, 32, workers))
    assert rate(trace) == pytest.approx(1e6 * trace.images / trace.sent_bytes, rel=0.01)
    assert trace.sent_bytes <= 1.03 * sum(PREFIXES)


def test_nodes_have_links_of_their_own():
    """Two nodes behind slow links of their own read twice as fast as two ranks behind one."""
    job = Job(2, 1e6, 16, 1)
    apart = run(Cluster(node=Node(1, 8, bandwidth=1e6)), job)
    together = run(Cluster(node=Node(2, 8, bandwidth=1e6)), job)
    assert rate(apart) == pytest.approx(2 * rate(together), rel=0.05)


def test_cores_decide_where_decoding_is_slow():
    """Two workers on one core decode as fast as the core does; on two cores twice as fast."""
    work = Work(image_seconds=0.01)
    one = run(Cluster(node=Node(1, 1)), Job(1, 1e6, 32, 2), work)
    two = run(Cluster(node=Node(1, 2)), Job(1, 1e6, 32, 2), work)
    assert rate(one) == pytest.approx(100, rel=0.01)
    assert rate(two) == pytest.approx(200, rel=0.05)


def test_without_workers_nothing_overlaps_decoding():
    """A rank that decodes itself needs the time of both; a worker hides the shorter one."""
    work = Work(image_seconds=0.001)
    alone = run(job=Job(1, 1000, 32, 0), work=work)
    helped = run(job=Job(1, 1000, 32, 1), work=work)
    assert rate(alone) == pytest.approx(500, rel=0.01)
    assert rate(helped) == pytest.approx(1000, rel=0.05)


def test_threads_decode_together_while_the_accelerator_works():
    """Two threads of a rank are as fast as two cores, and as one where there is only one."""
    work = Work(image_seconds=0.01)
    two = run(cluster=Cluster(node=Node(1, 2)), job=Job(1, 1e6, 32, 0, threads=2), work=work)
    one = run(cluster=Cluster(node=Node(1, 1)), job=Job(1, 1e6, 32, 0, threads=2), work=work)
    assert rate(two) == pytest.approx(200, rel=0.02)
    assert rate(one) == pytest.approx(100, rel=0.02)
    hidden = run(job=Job(1, 1000, 32, 0, threads=1), work=Work(image_seconds=0.001))
    assert rate(hidden) == pytest.approx(1000, rel=0.05)


def test_bytes_are_received_beside_decoding():
    """A second core hides what receiving costs; on one core it is added."""
    work = Work(image_seconds=0.01, byte_seconds=1e-6)  # of an image: 10 ms, and 10 kB x 1 us
    job = Job(1, 1e6, 32, 0)
    two = run(cluster=Cluster(node=Node(1, 2)), job=job, work=work)
    one = run(cluster=Cluster(node=Node(1, 1)), job=job, work=work)
    assert rate(two) == pytest.approx(100, rel=0.1)
    assert rate(one) == pytest.approx(50, rel=0.1)


def test_a_request_is_limited_by_its_stream_and_its_latency():
    """Two requests at a time, each of a second and a half for 64 images."""
    storage = Storage(stream_bandwidth=64e4, latency=0.5)
    trace = run(Cluster(storage), Job(1, 1e6, 32, 1))
    assert rate(trace) == pytest.approx(2 * 64 / 1.5, rel=0.05)


def test_a_cache_that_holds_all_leaves_nothing_to_read():
    """The second epoch comes from disk; half a cache saves less."""
    whole = run(Cluster(node=Node(1, 8, cache_bytes=1e9)), epochs=2)
    assert (whole.requests, whole.cached_bytes) == (0, sum(PREFIXES))
    half = run(Cluster(node=Node(1, 8, cache_bytes=sum(PREFIXES) / 2)), epochs=2)
    assert 0 < half.requests < 40


def test_the_same_seed_gives_the_same_epoch():
    """Latencies are drawn, but a simulation can be repeated."""
    storage = Storage(1e7, latency=0.05, latency_p99=0.5)
    assert run(Cluster(storage)) == run(Cluster(storage))


def test_a_thousand_accelerators_take_less_than_a_minute():
    """ImageNet on 1,024 accelerators of 128 machines, all of its 19 steps."""
    pytest.importorskip("simpy")
    sizes = [1024] * 1250 + [1167]
    cluster = Cluster(Storage(1e10, 9e7, 0.03, 0.3), Node(8, 192, 12.5e9))
    job = Job(1024, 2800, 64, 4)
    begun = time.monotonic()
    prefixes = [47_000 * size for size in sizes]
    trace = Simulation(cluster, job, Work(0.0006), sizes, prefixes).run(steps=4)
    assert len(trace.step_ends) == 4
    assert time.monotonic() - begun < 60


def test_without_simpy_it_says_what_to_install(monkeypatch):
    """The package works without; the command tells."""
    monkeypatch.setitem(sys.modules, "simpy", None)
    simulation = Simulation(Cluster(), Job(1, 10, 32, 1), Work(), SIZES, PREFIXES)
    with pytest.raises(MissingDependency, match="simulate"):
        simulation.run()
