"""Parameters of a simulation: storage, nodes, a job, and the cost of its images."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import PCRError

# 99th percentile of the standard normal distribution.
_P99 = 2.326
MAX_READERS = 1 << 17


def _check(numbers: Mapping[str, float], least: float) -> None:
    """Raise ``PCRError`` for a number below its minimum."""
    for name, number in numbers.items():
        if not number >= least or (not number < math.inf and "bandwidth" not in name):
            raise PCRError(f"expected {name} of at least {least:g}, got {number:g}")


@dataclass(frozen=True)
class Storage:
    """Shared storage that holds the shards.

    Attributes:
        bandwidth: Bytes per second, shared by all readers.
        stream_bandwidth: Bytes per second of one request, which object stores limit.
        latency: Median seconds until the first byte of a request.
        latency_p99: 99th percentile of the latency; the default is no variation.
        request_price: Dollars per request.
        egress_price: Dollars per byte of egress.
    """

    bandwidth: float = math.inf
    stream_bandwidth: float = math.inf
    latency: float = 0.0
    latency_p99: float | None = None
    request_price: float = 0.0
    egress_price: float = 0.0

    def __post_init__(self) -> None:
        _check({"bandwidth": self.bandwidth, "stream_bandwidth": self.stream_bandwidth}, 1)
        _check({"latency": self.latency, "request_price": self.request_price}, 0)
        if self.latency_p99 is not None:
            _check({"latency_p99": self.latency_p99}, self.latency)

    def draw_latency(self, rng: random.Random) -> float:
        """Draw a request's first-byte latency in seconds; log-normal, close to measurements."""
        if self.latency_p99 is None or self.latency == 0:
            return self.latency
        deviation = math.log(self.latency_p99 / self.latency) / _P99
        return self.latency * math.exp(rng.gauss(0, deviation))


@dataclass(frozen=True)
class Node:
    """One machine.

    Attributes:
        accelerators: Number of ranks.
        cores: CPU cores, shared by the ranks and their workers.
        bandwidth: Network bandwidth in bytes per second.
        cache_bytes: Capacity of the local cache; 0 for none.
        cache_bandwidth: Bytes per second of the cache.
    """

    accelerators: int = 8
    cores: int = 64
    bandwidth: float = math.inf
    cache_bytes: float = 0
    cache_bandwidth: float = 2e9

    def __post_init__(self) -> None:
        counts = {"accelerators": self.accelerators, "cores": self.cores}
        _check(counts | {"bandwidth": self.bandwidth, "cache_bandwidth": self.cache_bandwidth}, 1)
        _check({"cache_bytes": self.cache_bytes}, 0)


@dataclass(frozen=True)
class Job:
    """Reading and compute parameters of a training job.

    Attributes:
        accelerators: Number of ranks over all nodes.
        rate: Images per second of one accelerator that never waits.
        batch: Batch size per rank.
        workers: DataLoader workers per rank.
        threads: Decoding threads per rank, instead of workers; with neither, the training loop
            decodes between steps.
        ahead: Batches decoded ahead by each worker, or by the threads (``prefetch``).
        prefetch: Prefixes fetched ahead by each worker (``shards_ahead``).
        sync_seconds: Fixed seconds per step besides the images, such as the gradient all-reduce.
        start_seconds: Seconds from the start of the first epoch until the workers begin to read.
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

    def __post_init__(self) -> None:
        _check({"accelerators": self.accelerators, "batch": self.batch, "ahead": self.ahead}, 1)
        counts = {"workers": self.workers, "threads": self.threads, "prefetch": self.prefetch}
        _check(counts, 0)
        _check({"sync_seconds": self.sync_seconds, "start_seconds": self.start_seconds}, 0)
        _check({"rate": self.rate}, 1e-6)
        if (readers := self.accelerators * max(self.workers, 1)) > MAX_READERS:
            raise PCRError(f"expected at most {MAX_READERS} ranks and workers, got {readers}")
        if self.workers and self.threads:
            raise PCRError(
                f"expected workers or threads, got {self.workers} workers and "
                f"{self.threads} threads"
            )

    @property
    def decodes_ahead(self) -> bool:
        """Whether batches are decoded while the accelerator computes."""
        return self.workers + self.threads > 0

    @property
    def step_seconds(self) -> float:
        """Seconds of a step that never waits."""
        return self.batch / self.rate


@dataclass(frozen=True)
class Work:
    """CPU cost of the images.

    Attributes:
        image_seconds: CPU seconds to decode, crop and collate one image.
        byte_seconds: CPU seconds to receive, join and check one byte of a prefix.
    """

    image_seconds: float = 0.0
    byte_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check({"image_seconds": self.image_seconds, "byte_seconds": self.byte_seconds}, 0)


@dataclass(frozen=True)
class Cluster:
    """Storage and identical nodes."""

    storage: Storage = field(default_factory=Storage)
    node: Node = field(default_factory=Node)

    def num_nodes(self, accelerators: int) -> int:
        """Return the number of nodes needed for a number of accelerators."""
        return -(-accelerators // self.node.accelerators)
