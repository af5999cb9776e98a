"""Parameters of a simulation: a cluster, and a job that runs on it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from ..errors import PCRError

# 99th percentile of the standard normal distribution.
_P99 = 2.326
_MAX_READERS = 1 << 17


def _check(record: object, least: float, *names: str) -> None:
    """Raise ``PCRError`` for an attribute below ``least``, or NaN."""
    for name in names:
        number = getattr(record, name)
        if not number >= least:
            raise PCRError(f"expected {name} of at least {least:g}, got {number:g}")


@dataclass(frozen=True)
class Cluster:
    """Simulated cluster.

    Attributes:
        bandwidth: Storage bandwidth shared by all ranks, in bytes per second.
        per_node: Accelerators per node.
        cores: CPU cores per node.
        link: Network bandwidth per node (default: unlimited).
        stream: Bandwidth per request, which object stores limit (default: unlimited).
        latency: Time to the first byte of a request in seconds: median and 99th percentile.
    """

    bandwidth: float = math.inf
    per_node: int = 8
    cores: int = 64
    link: float = math.inf
    stream: float = math.inf
    latency: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        _check(self, 1, "bandwidth", "per_node", "cores", "link", "stream")
        median, p99 = self.latency
        if not 0 <= median <= p99 < math.inf:
            raise PCRError(
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

    accelerators: int = 1
    rate: float = 1000.0
    batch: int = 256
    workers: int = 4
    threads: int = 0
    ahead: int = 2
    prefetch: int = 2
    sync_seconds: float = 0.0
    start_seconds: float = 0.0
    image_seconds: float = 0.0
    byte_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check(self, 1, "accelerators", "batch", "ahead")
        _check(self, 0, "workers", "threads", "prefetch", "sync_seconds", "start_seconds")
        _check(self, 0, "image_seconds", "byte_seconds")
        _check(self, 1e-6, "rate")
        if (readers := self.accelerators * max(self.workers, 1)) > _MAX_READERS:
            raise PCRError(f"expected at most {_MAX_READERS} ranks and workers, got {readers}")
        if self.workers and self.threads:
            raise PCRError(
                f"expected workers or threads, got {self.workers} workers and "
                f"{self.threads} threads"
            )
