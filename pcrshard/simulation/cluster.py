"""Parameters of a simulation: a cluster, and a job that runs on it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Annotated

from ..arguments import Least, Natural, Positive, check_fields

# 99th percentile of the standard normal distribution.
_P99 = 2.326
_MAX_READERS = 1 << 17


_Rate = Annotated[float, Least(1), "a number of at least 1"]
_Seconds = Annotated[float, Least(0), "a number of at least 0"]


@dataclass(frozen=True)
class Cluster:
    """A simulated cluster.

    Bandwidths are in bytes per second.

    Attributes:
        bandwidth: Storage bandwidth shared by all ranks.
        per_node: Accelerators per node.
        cores: CPU cores per node.
        link: Network bandwidth per node (default: unlimited).
        stream: Bandwidth per request, which object stores limit (default: unlimited).
        latency: Time to the first byte of a request in seconds: median and 99th percentile.
    """

    bandwidth: _Rate = math.inf
    per_node: Positive = 8
    cores: Positive = 64
    link: _Rate = math.inf
    stream: _Rate = math.inf
    latency: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        check_fields(self)
        median, p99 = self.latency
        if not 0 <= median <= p99 < math.inf:
            raise ValueError(
                "expected a median latency of at least 0 and a 99th percentile of at least the "
                f"median, got {median:g} and {p99:g}"
            )


def draw_latency(latency: tuple[float, float], rng: random.Random) -> float:
    """Draw a request's first-byte latency in seconds; log-normal, close to measurements.

    Args:
        latency: Median and 99th percentile in seconds.
        rng: Source of the random number.
    """
    median, p99 = latency
    return median and median * math.exp(rng.gauss(0, math.log(p99 / median) / _P99))


@dataclass(frozen=True)
class Job:
    """A training job: how it reads, computes and decodes.

    Attributes:
        accelerators: Number of ranks over all nodes.
        rate: Images per second of one accelerator that never waits.
        batch: Batch size per rank.
        workers: DataLoader workers per rank.
        threads: Decoding threads per rank, instead of workers; with neither, the training loop
            decodes between steps.
        ahead: Batches decoded ahead by each worker, or by the threads (``prefetch``).
        prefetch: Prefixes fetched ahead by each worker.
        sync_seconds: Fixed seconds per step besides the images, such as the gradient all-reduce.
        start_seconds: Seconds from the start of the first epoch until the workers begin to read.
        image_seconds: CPU seconds to decode, crop and collate one image.
        byte_seconds: CPU seconds to receive, join and check one byte of a prefix.
    """

    accelerators: Positive = 1
    rate: Annotated[float, Least(1e-6), "a positive number"] = 1000.0
    batch: Positive = 256
    workers: Natural = 4
    threads: Natural = 0
    ahead: Positive = 2
    prefetch: Natural = 2
    sync_seconds: _Seconds = 0.0
    start_seconds: _Seconds = 0.0
    image_seconds: _Seconds = 0.0
    byte_seconds: _Seconds = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if (readers := self.accelerators * max(self.workers, 1)) > _MAX_READERS:
            raise ValueError(f"expected at most {_MAX_READERS} ranks and workers, got {readers}")
        if self.workers and self.threads:
            raise ValueError(
                f"expected workers or threads, got {self.workers} workers and "
                f"{self.threads} threads"
            )
