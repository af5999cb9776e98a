"""``pcrshard plan --simulate``: simulate an epoch on a hypothetical cluster."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from ..format.dataset_index import DatasetIndex
from ..format.scan import Scan
from ..reading.shard import Shard
from ..simulation.cluster import Cluster, Job
from ..simulation.decoding import image_seconds
from ..simulation.epoch import Simulation
from ..simulation.outcome import outcome
from ..training.epoch_order import Geometry, Rules
from .parser import MEGABYTES


def latency(text: str) -> tuple[float, float]:
    """Parse milliseconds: a median, and a 99th percentile."""
    seconds = [float(number) / 1e3 for number in text.split(",")]
    return seconds[0], seconds[-1]


def prices(text: str) -> tuple[float, float]:
    """Parse dollars per 1,000 requests, and per GB."""
    requests, _, gigabytes = text.partition(",")
    return float(requests) / 1e3, float(gigabytes or 0) / 1e9


# In the units of a command line.
ClusterOptions = Annotated[
    Cluster,
    {
        "bandwidth": MEGABYTES,
        "link": MEGABYTES,
        "stream": MEGABYTES,
        "latency": {
            "type": latency,
            "metavar": "MS[,MS]",
            "help": "Time to the first byte of a request: median and 99th percentile",
        },
        "prices": {
            "type": prices,
            "metavar": "REQUESTS[,GB]",
            "help": "Dollars per 1,000 requests, and per GB of egress",
        },
    },
]


def simulate_scans(
    index: DatasetIndex,
    shard: Shard,
    scans: Sequence[Scan],
    geometry: Geometry,
    rules: Rules,
    cluster: Cluster,
    job: Job,
    *,
    decode: float | None,
    samples: int,
) -> list[dict[str, Any]]:
    """Simulate an epoch at each scan; decode ``shard`` to measure the cost if not given."""
    rows = []
    for scan in scans:
        seconds = 1 / decode if decode else image_seconds(shard, scan)
        simulation = Simulation(
            cluster,
            replace(job, image_seconds=seconds),
            *_shards(index, scan, samples),
            rules=rules,
            lanes_per_rank=geometry.lanes_per_rank,
        )
        rows.append({"scan": scan} | outcome(simulation, simulation.run())._asdict())
    return rows


def _shards(index: DatasetIndex, scan: Scan, samples: int) -> tuple[list[int], list[int]]:
    """Return samples and prefix bytes per shard, repeating the shards to reach ``samples``."""
    taken = []
    for shard in itertools.cycle(index.shards):
        taken.append((shard, min(samples, shard.num_samples)))
        samples -= taken[-1][1]
        if not samples:
            break
    prefixes = [shard.prefix_stop(scan) * count // shard.num_samples for shard, count in taken]
    return [count for _, count in taken], prefixes
