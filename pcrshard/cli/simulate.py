"""``pcrshard plan --simulate``: simulate an epoch on a hypothetical cluster."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from ..fidelity.costs import scan_costs
from ..format.dataset_index import DatasetIndex
from ..format.scan import Scan
from ..reading.shard import Shard
from ..simulation.cluster import Cluster, Job, Node, Storage, Work
from ..simulation.decoding import image_seconds
from ..simulation.epoch import Simulation
from ..simulation.outcome import outcome
from ..training.epoch_order import Geometry, Rules
from .parser import Bandwidth, Count, Kind, Parallel, ParallelOrZero, Positive, between


def _numbers(text: str) -> tuple[float, float]:
    """Parse one or two numbers, such as ``30,300``; a missing second number is 0."""
    first, _, second = text.partition(",")
    try:
        found = float(first), float(second or 0)
    except ValueError:
        raise ArgumentTypeError(f"expected one number or two, got {text!r}") from None
    if not all(0 <= number < math.inf for number in found):
        raise ArgumentTypeError(f"expected numbers of at least 0, got {text!r}")
    return found


def _latency(text: str) -> tuple[float, float]:
    median, p99 = _numbers(text)
    if 0 < p99 < median:
        raise ArgumentTypeError(f"expected MEDIAN,P99 with the median first, got {text!r}")
    return median, max(median, p99)


@dataclass(frozen=True)
class ClusterOptions:
    """Simulated cluster, used with --simulate.

    Attributes:
        per_node: Accelerators per node.
        cores: CPU cores per node.
        threads: Decoding threads per rank, instead of workers.
        link: Network bandwidth per node (default: unlimited).
        stream: Bandwidth per request (default: unlimited).
        latency: Time to the first byte of a request: median and 99th percentile.
        cache: Local cache per node in GB; shows the second epoch.
        decode: Images per second that one core decodes (default: measured on this machine
            at each scan).
        prices: Dollars per 1,000 requests, and per GB of egress.
        samples: Number of samples, if the dataset is part of a larger one.
        steps: Simulate only this many steps (default: the whole epoch).
    """

    per_node: Parallel = 8
    cores: Parallel = 64
    threads: ParallelOrZero = 0
    link: Bandwidth = math.inf
    stream: Bandwidth = math.inf
    latency: Annotated[tuple[float, float], Kind(_latency, "MS[,MS]")] = (0.0, 0.0)
    cache: Positive = 0.0
    decode: Positive | None = None
    prices: Annotated[tuple[float, float], Kind(_numbers, "REQUESTS[,GB]")] = (0.0, 0.0)
    # Planning takes 57 bytes per sample.
    samples: Annotated[int, between(1, 1 << 26)] | None = None
    steps: Count | None = None

    def given(self) -> Iterator[str]:
        """Yield the names of options that differ from their defaults, as on a command line."""
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                yield f"--{field.name.replace('_', '-')}"


def simulate_scans(
    index: DatasetIndex,
    shard: Shard,
    scans: Sequence[Scan] | None,
    geometry: Geometry,
    rules: Rules,
    *,
    rate: float,
    workers: int,
    bandwidth: float | None,
    options: ClusterOptions,
) -> list[dict[str, Any]]:
    """Simulate an epoch at each scan, decoding ``shard`` to measure the decoding cost."""
    batch = geometry.global_batch // geometry.max_world_size
    job = Job(
        geometry.max_world_size,
        rate,
        batch,
        0 if options.threads else workers,
        threads=options.threads,
    )
    median, p99 = options.latency
    requests, gigabytes = options.prices
    cluster = Cluster(
        Storage(
            bandwidth or math.inf,
            options.stream,
            median / 1e3,
            p99 / 1e3,
            requests / 1e3,
            gigabytes / 1e9,
        ),
        Node(options.per_node, options.cores, options.link, options.cache * 1e9),
    )
    rows = []
    for scan in scans or [cost.scan for cost in scan_costs(index)]:
        seconds = 1 / options.decode if options.decode else image_seconds(shard, scan)
        sizes, prefixes = _shards(index, scan, options.samples or index.num_samples)
        simulation = Simulation(
            cluster,
            job,
            Work(seconds),
            sizes,
            prefixes,
            rules=rules,
            lanes_per_rank=geometry.lanes_per_rank,
        )
        for epoch in range(2 if options.cache else 1):
            trace = simulation.run(epoch, options.steps)
        rows.append({"scan": scan} | outcome(simulation, trace)._asdict())
    return rows


def _shards(index: DatasetIndex, scan: Scan, samples: int) -> tuple[list[int], list[int]]:
    """Return samples and prefix bytes per shard, repeating the shards to reach ``samples``."""
    sizes: list[int] = []
    prefixes: list[int] = []
    while samples > 0:
        for shard in index.shards:
            taken = min(samples, shard.num_samples)
            if taken:
                sizes.append(taken)
                prefixes.append(shard.prefix_stop(scan) * taken // shard.num_samples)
            samples -= taken
    return sizes, prefixes
