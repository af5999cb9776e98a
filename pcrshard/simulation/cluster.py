"""What is simulated, as numbers: storage, nodes, a job, and what its images cost."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import PCRError

# The 99th percentile of a normal distribution, in deviations.
_P99 = 2.326
MAX_READERS = 1 << 17


def _check(numbers: Mapping[str, float], least: float) -> None:
    """Refuse what no machine has."""
    for name, number in numbers.items():
        if not number >= least or (not number < math.inf and "bandwidth" not in name):
            raise PCRError(f"expected {name} of at least {least:g}, got {number:g}")


@dataclass(frozen=True)
class Storage:
    """What holds the shards, for all nodes together.

    Attributes:
        bandwidth: Bytes a second that all readers share.
        stream_bandwidth: Bytes a second of one request; object stores limit it.
        latency: Seconds until the first byte of a request, the median.
        latency_p99: The same for the slowest hundredth; by default all are alike.
        request_price: Dollars for a request.
        egress_price: Dollars for a byte that leaves the storage.
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
        """Seconds until the first byte of one request: log-normal, as measured ones nearly are."""
        if self.latency_p99 is None or self.latency == 0:
            return self.latency
        deviation = math.log(self.latency_p99 / self.latency) / _P99
        return self.latency * math.exp(rng.gauss(0, deviation))


@dataclass(frozen=True)
class Node:
    """One machine.

    Attributes:
        accelerators: Ranks on it.
        cores: Cores that its ranks and their workers share.
        bandwidth: Bytes a second of its network.
        cache_bytes: What its local cache holds; 0 is none.
        cache_bandwidth: Bytes a second of that cache.
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
    """How a training job reads and computes.

    Attributes:
        accelerators: Ranks of all nodes.
        rate: Images a second of one accelerator that never waits.
        batch: Images of a rank and step.
        workers: DataLoader workers of a rank.
        threads: Threads of a rank that decode together, in place of workers; with neither, the
            training loop decodes between its steps.
        ahead: Batches that each worker, or the threads, may be ahead (``prefetch``).
        prefetch: Prefixes that each worker fetches ahead (``shards_ahead``).
        sync_seconds: What a step takes beside the images, such as adding up gradients.
        start_seconds: From the beginning of the first epoch until workers begin to read.
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
        """Whether batches are made while the accelerator works."""
        return self.workers + self.threads > 0

    @property
    def step_seconds(self) -> float:
        """A step that waits for nothing."""
        return self.batch / self.rate


@dataclass(frozen=True)
class Work:
    """What a core does for the images.

    Attributes:
        image_seconds: To decode, crop and collate one image.
        byte_seconds: To receive, join and check one byte of a prefix.
    """

    image_seconds: float = 0.0
    byte_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check({"image_seconds": self.image_seconds, "byte_seconds": self.byte_seconds}, 0)


@dataclass(frozen=True)
class Cluster:
    """Storage and nodes, all alike."""

    storage: Storage = field(default_factory=Storage)
    node: Node = field(default_factory=Node)

    def num_nodes(self, accelerators: int) -> int:
        """Machines that so many accelerators are on."""
        return -(-accelerators // self.node.accelerators)
