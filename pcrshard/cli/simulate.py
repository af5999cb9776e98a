"""``pcrshard plan --simulate``: an epoch on a cluster that is not at hand."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import PCRError
from ..fidelity.costs import human_bytes, scan_costs, table
from ..format.dataset_index import DatasetIndex
from ..format.scan import Scan
from ..reading.shard import Shard
from ..simulation.cluster import Cluster, Job, Node, Storage, Work
from ..simulation.decoding import image_seconds
from ..simulation.epoch import Simulation
from ..simulation.outcome import Outcome, outcome
from ..training.epoch_order import Rules
from .arguments import at_least, megabytes, positive, value

_HEADER = (
    "scan",
    "images/s",
    "stall",
    "step p99",
    "first batch",
    "epoch",
    "requests",
    "sent",
    "dollars",
)
_MOST_SAMPLES = 1 << 30


def _pair(text: str) -> tuple[float, float]:
    """The type of an option with a number, or two, such as ``30,300``; none is 0."""
    first, _, second = text.partition(",")
    try:
        found = float(first), float(second or 0)
    except ValueError:
        raise ArgumentTypeError(f"expected one number or two, got {text!r}") from None
    if not all(0 <= number < math.inf for number in found):
        raise ArgumentTypeError(f"expected numbers of at least 0, got {text!r}")
    return found


ARGUMENTS = [
    value(
        "--simulate",
        "simulate the epoch, with accelerators that train so many images a second each",
        "IMAGES/S",
        positive,
    ),
    value("--per-node", "accelerators a node (default: %(default)s)", "N", at_least(1), 8),
    value("--cores", "cores a node (default: %(default)s)", "N", at_least(1), 64),
    value(
        "--threads", "threads that decode in each rank, in place of workers", "N", at_least(0), 0
    ),
    value("--link", "network of a node (default: without limit)", "MB/s", megabytes, math.inf),
    value("--stream", "of one request (default: without limit)", "MB/s", megabytes, math.inf),
    value(
        "--latency",
        "until a request's first byte: the median, and the slowest hundredth",
        "MS[,MS]",
        _pair,
        (0.0, 0.0),
    ),
    value("--cache", "local cache of a node; the second epoch is shown", "GB", positive, 0.0),
    value(
        "--decode",
        "images a second of a core (default: as measured here, at each scan)",
        "IMAGES/S",
        positive,
    ),
    value(
        "--prices",
        "dollars for 1,000 requests, and for a GB that leaves the storage",
        "REQUESTS[,GB]",
        _pair,
        (0.0, 0.0),
    ),
    value("--samples", "as if the dataset had so many", "N", at_least(1)),
    value("--steps", "only the first steps of the epoch", "N", at_least(1)),
]


def simulate(args: Namespace, index: DatasetIndex, urls: Sequence[str]) -> list[dict[str, Any]]:
    """The outcome of an epoch at each scan."""
    scans = [args.scan] if args.scan else [cost.scan for cost in scan_costs(index)]
    return [{"scan": scan} | _simulate(args, index, urls, scan)._asdict() for scan in scans]


def _simulate(
    args: Namespace,
    index: DatasetIndex,
    urls: Sequence[str],
    scan: Scan,
) -> Outcome:
    seconds = 1 / args.decode if args.decode else image_seconds(Shard(urls[0]), scan)
    workers = 0 if args.threads else args.workers
    job = Job(args.ranks, args.simulate, args.batch, workers, args.threads)
    sizes, prefixes = zip(*_shards(index, scan, args.samples or index.num_samples), strict=True)
    simulation = Simulation(
        _cluster(args),
        job,
        Work(seconds),
        sizes,
        prefixes,
        rules=Rules(shuffle_shards=args.shuffle_shards),
        phases=args.phases,
    )
    epochs = 2 if args.cache else 1
    traces = [simulation.run(epoch, args.steps) for epoch in range(epochs)]
    return outcome(simulation, traces[-1])


def _cluster(args: Namespace) -> Cluster:
    median, p99 = args.latency
    requests, gigabytes = args.prices
    storage = Storage(
        args.bandwidth or math.inf,
        args.stream,
        median / 1e3,
        max(median, p99) / 1e3,
        requests / 1e3,
        gigabytes / 1e9,
    )
    node = Node(args.per_node, args.cores, args.link, args.cache * 1e9)
    return Cluster(storage, node)


def _shards(index: DatasetIndex, scan: Scan, samples: int) -> Iterator[tuple[int, int]]:
    """Samples and prefix bytes of each shard; its own again and again, if there are more."""
    if samples > _MOST_SAMPLES:
        raise PCRError(f"expected at most {_MOST_SAMPLES} samples, got {samples}")
    left = samples
    while left > 0:
        for shard in index.shards:
            taken = min(left, shard.num_samples)
            if taken:
                yield taken, shard.prefix_stop(scan) * taken // shard.num_samples
            left -= taken


def simulation_table(rows: Sequence[dict[str, Any]]) -> str:
    """The table of ``pcrshard plan --simulate``."""
    return table(_HEADER, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[object]:
    return [
        row["scan"],
        f"{row['images_per_second']:.0f}",
        f"{100 * row['stall']:.0f} %",
        f"{row['step_p99']:.3g} s",
        f"{row['first_batch']:.3g} s",
        f"{row['epoch_seconds']:.4g} s",
        row["requests"],
        human_bytes(row["sent_bytes"]),
        f"{row['dollars']:.2f}",
    ]
