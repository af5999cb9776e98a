"""Small clusters that are real: processes in network namespaces behind shaped links, nginx as the
storage, real reads and decoding; only the accelerator is a sleep. What the simulation is held to.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import random
import signal
import statistics
import time

import servers

import pcrshard
from pcrshard.simulation.cluster import draw_latency

from ..links import apart, begin, enter, goodput, network

SIZE = 224
BATCH = 16
COPIES = 4
PER_SHARD = 64
# The accelerator of a calibration, in seconds.
PAUSE = 0.01
# How long a plain download takes that tells what a link carries.
GOODPUT_SECONDS = 1.5


@dataclasses.dataclass(frozen=True)
class Setup:
    """A cluster that can be built here; rates in MB/s, ``latency`` in seconds (median, p99)."""

    name: str
    scan: int | str
    processes: int = 1
    nodes: int = 1
    workers: int = 0
    threads: int = 0
    storage: float = 20.0
    link: float = 100.0
    rate: float = 200.0
    epochs: int = 1
    latency: tuple[float, float] | None = None

    @property
    def per_node(self):
        """Processes of a node."""
        return self.processes // self.nodes


def dataset(lab):
    """Photographs in shards of a few megabytes, several times over."""
    target = os.path.join(lab.cache, "cluster-shards")
    copies = 1 if lab.quick else COPIES
    if not os.path.exists(os.path.join(target, "pcr.json")):
        source = lab.photos()[lab.tasks[0].name if lab.quick else "imagenet"]
        links = os.path.join(lab.cache, "cluster-copies")
        os.makedirs(links, exist_ok=True)
        for copy in range(copies):
            place = os.path.join(links, f"copy{copy}")
            if not os.path.lexists(place):
                os.symlink(os.path.abspath(source), place)
        options = pcrshard.EncodeOptions(
            samples_per_shard=8 if lab.quick else PER_SHARD,
            fmt=pcrshard.ShardFormat("standard"),
        )
        pcrshard.encode(links, target, options, workers=1)
    return target


def open_rank(url, setup, rank=0):
    """The loader of a rank."""
    decoder = pcrshard.ImageDecoder(SIZE, "random")
    dataset = pcrshard.PCRDataset(url, scan=setup.scan, decoder=decoder, fields=("jpg", "__key__"))
    return pcrshard.PCRLoader(
        dataset,
        BATCH,
        threads=setup.threads,
        num_workers=setup.workers,
        lanes_per_rank=phases(setup),
        rank=rank,
        world_size=setup.processes,
    )


def phases(setup):
    """Lanes of a rank: one a worker."""
    return max(setup.workers, 1)


def _rank(url, setup, rank, barrier):
    """Seconds of each epoch, and seconds that each step waited."""
    loader = open_rank(url, setup, rank)
    seconds = []
    waits = []
    for epoch in range(setup.epochs):
        loader.set_epoch(epoch)
        barrier.wait()
        begun = end = time.monotonic()
        for _ in loader:
            waits.append(time.monotonic() - end)
            time.sleep(BATCH / setup.rate)
            barrier.wait()
            end = time.monotonic()
        seconds.append(end - begun)
    return seconds, waits


def real(lab, setup):
    """Return images per second of a setup, its steps, and the measured link goodput."""
    folder = dataset(lab)
    index = pcrshard.open_dataset(folder)[0]
    with (
        network(setup.nodes, setup.storage * 1e6, setup.link * 1e6) as (link, nodes),
        servers.nginx(folder, link=link) as server,
        _latency(setup, server, nodes) as url,
    ):
        largest = max(index.shards, key=lambda shard: shard.shard_bytes)
        wanted = GOODPUT_SECONDS * 1e6 * min(setup.storage, setup.link)
        plain = (server.url(largest.name), largest.shard_bytes, wanted)
        speed = apart(goodput, *plain, namespace=nodes[0])
        server.reset()
        barrier = multiprocessing.get_context("fork").Barrier(setup.processes)
        started = [
            begin(nodes[rank // setup.per_node], _rank, url, setup, rank, barrier)
            for rank in range(setup.processes)
        ]
        ranks = [finish() for finish in started]
        requests = server.requests()
    seconds = [max(times) for times in zip(*(rank[0] for rank in ranks), strict=True)]
    images = sum(len(rank[1]) for rank in ranks) * BATCH
    waited = sum(sum(waits) for _, waits in ranks)
    shards = [request for request in requests if request.path.endswith(".tar")]
    return {
        "images_per_second": images / sum(seconds),
        "stall": waited / len(ranks) / sum(seconds),
        "first_batch": max(waits[0] for _, waits in ranks),
        "goodput": speed,
        "requests": len(shards),
        "sent_bytes": sum(request.body_bytes for request in shards),
    }


@contextlib.contextmanager
def _latency(setup, server, nodes):
    """The URL of the dataset; where a set-up has latency, through a proxy on the node itself, in
    which the answers to requests wait.
    """
    if setup.latency is None:
        yield server.url()
        return
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_serve_late, args=(send, nodes[0], server.url(), setup))
    process.start()
    try:
        yield receive.recv()
    finally:
        process.terminate()
        process.join()


def _serve_late(send, namespace, upstream, setup):
    enter(namespace)
    rng = random.Random(0)

    def late(_):
        return servers.Fault(stall=draw_latency(setup.latency, rng))

    with servers.proxy(upstream, late) as server:
        send.send(server.url())
        signal.pause()


# What the machine does in a second, for the simulation.


def calibrate(lab, ways):
    """Seconds of an image at each (scan, threads), of a received byte, of handing a batch over, and
    until workers read; nothing of it looks at the set-ups. By the clock, because what idles on the
    other half of a core makes decoding slower, too.
    """
    folder = dataset(lab)
    images = {
        f"{scan}, {threads}": apart(_image_seconds, folder, scan, threads) for scan, threads in ways
    }
    found = {"image_seconds": images}
    decoding = BATCH * apart(_image_seconds, folder, 1, 0)
    found["batch_seconds"] = [
        max(0.0, apart(_beside, folder, Setup("", 1)) - decoding),
        apart(_beside, folder, Setup("", 1, workers=1)),
    ]
    with network(1, 1e9, 1e9) as (link, nodes), servers.nginx(folder, link=link) as server:
        url = server.url()
        costs = [apart(_byte_seconds, url, namespace=nodes[0]) for _ in range(3)]
        found["byte_seconds"] = min(costs)
        found["start_seconds"] = [
            apart(_start_seconds, url, workers, namespace=nodes[0]) for workers in (0, 1)
        ]
        found["latency"] = apart(_request_seconds, url, namespace=nodes[0])
    return found


def _image_seconds(folder, scan, threads):
    """Decoded in this process from local shards, by a thread or none; the least of two epochs."""
    loader = open_rank(folder, Setup("", scan, threads=threads))
    costs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        begun = time.monotonic()
        images = sum(BATCH for _ in loader)
        costs.append((time.monotonic() - begun) / images)
    return min(costs)


def _beside(folder, setup):
    """What a step takes beside the accelerator: the median of two epochs."""
    loader = open_rank(folder, setup)
    steps = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        end = time.monotonic()
        for _ in loader:
            time.sleep(PAUSE)
            steps.append(time.monotonic() - end - PAUSE)
            end = time.monotonic()
    return statistics.median(steps)


def _start_seconds(url, workers):
    """How much later the first batch of a process comes than those of its next epochs."""
    loader = open_rank(url, Setup("", 1, workers=workers))
    firsts = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        begun = time.monotonic()
        came = [time.monotonic() - begun for _ in loader]
        firsts.append(came[0])
    return max(0.0, firsts[0] - min(firsts[1:]))


def _byte_seconds(url):
    """CPU seconds of a byte that is received, joined and checked, nothing decoded."""
    loader = pcrshard.PCRLoader(pcrshard.PCRDataset(url, fields=("__key__",)), BATCH, threads=0)
    begun = time.process_time()
    for _ in loader:
        pass
    return (time.process_time() - begun) / pcrshard.open_dataset(url)[0].prefix_bytes("full")


def _request_seconds(url):
    """The median time of a small request, a connection being there."""
    times = []
    for _ in range(20):
        begun = time.monotonic()
        pcrshard.open_dataset(url)
        times.append(time.monotonic() - begun)
    return statistics.median(times)
