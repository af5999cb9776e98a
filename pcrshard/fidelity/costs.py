"""What each scan costs, as rows and as text; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..format.dataset_index import DatasetIndex
from ..format.scan import FULL, Scan
from ..training.epoch_order import Geometry, Rules, epoch_order
from ..training.shard_schedule import account


class ScanCost(NamedTuple):
    """Bytes of a dataset at a scan; ``saving`` is full bytes over these bytes."""

    scan: Scan
    prefix_bytes: int
    bytes_per_sample: float
    saving: float


def scan_costs(index: DatasetIndex) -> list[ScanCost]:
    """The cost of each scan, lowest first, ``"full"`` last; of a staged copy, those that it holds."""
    full = sum(shard.prefix_stops[-1] for shard in index.shards)
    scans: list[Scan] = [*range(1, index.num_groups + 1), FULL][: index.scan]
    sizes = [index.prefix_bytes(scan) for scan in scans]
    return [
        ScanCost(scan, size, size / index.num_samples, full / size)
        for scan, size in zip(scans, sizes, strict=True)
    ]


def human_bytes(size: float) -> str:
    """A size in bytes for people.

    >>> human_bytes(999), human_bytes(108_000), human_bytes(129 * 2**30)
    ('999 B', '108 kB', '139 GB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            return f"{size:.3g} {unit}" if size < 99.95 else f"{size:.0f} {unit}"
        size /= 1000
    raise AssertionError


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Right-aligned columns.

    >>> print(table(["scan", "bytes"], [[1, "12 kB"], ["full", "3 MB"]]))
    scan  bytes
       1  12 kB
    full   3 MB
    """
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    )


def scan_table(costs: Sequence[ScanCost]) -> str:
    """The table of ``pcrshard info``."""
    rows = [
        [c.scan, human_bytes(c.prefix_bytes), human_bytes(c.bytes_per_sample), f"{c.saving:.2f}x"]
        for c in costs
    ]
    return table(["scan", "prefix", "bytes/sample", "saving"], rows)


class PlanCost(NamedTuple):
    """What an epoch reads at a scan.

    Attributes:
        scan: The scan.
        steps: Steps of each rank.
        epoch_bytes: Bytes that all workers of all ranks read.
        rank_bytes: Bytes of the rank that reads most.
        repeated_bytes: Those of ``epoch_bytes`` that are read more than once.
        requests: Ranged reads of all workers.
        worker_memory_bytes: Most bytes of prefixes that a worker holds at a time.
        images_per_second: What the bandwidth allows, X = W / E[s] (Theorem 4.1 of the VLDB paper); ``None`` without a bandwidth.
    """

    scan: Scan
    steps: int
    epoch_bytes: int
    rank_bytes: int
    repeated_bytes: int
    requests: int
    worker_memory_bytes: int
    images_per_second: float | None


def plan_costs(
    index: DatasetIndex,
    scans: Sequence[Scan] | None,
    geometry: Geometry,
    rules: Rules = Rules(),
    *,
    workers: int = 1,
    bandwidth: float | None = None,
) -> list[PlanCost]:
    """What an epoch will read, for some scans.

    Args:
        index: The dataset.
        scans: Which; all that there are by default.
        geometry: Of the job; a rank for each slot.
        rules: Of the job.
        workers: DataLoader workers per rank.
        bandwidth: Of the storage, in bytes a second.

    Raises:
        ScanUnavailable: There is no such scan.
        ValueError: The dataset has no global batch.
    """
    sizes = [shard.num_samples for shard in index.shards]
    order = epoch_order(sizes, geometry, rules)
    costs = []
    for scan in scans or [cost.scan for cost in scan_costs(index)]:
        prefixes = [shard.prefix_stop(scan) for shard in index.shards]
        counted = account(order, sizes, prefixes, geometry.slots, workers)
        epoch_bytes = int(counted.read_bytes.sum())
        rate = None if bandwidth is None else bandwidth / (epoch_bytes / len(order.ids))
        worst = int(counted.read_bytes.sum(axis=1).max())
        requests, memory = int(counted.requests.sum()), int(counted.open_bytes.max())
        costs.append(
            PlanCost(
                scan,
                order.steps,
                epoch_bytes,
                worst,
                counted.repeated_bytes,
                requests,
                memory,
                rate,
            )
        )
    return costs


def plan_table(costs: Sequence[PlanCost]) -> str:
    """The table of ``pcrshard plan``."""
    header = ["scan", "epoch", "rank at most", "read twice", "requests", "memory/worker"]
    rows: list[list[object]] = []
    for c in costs:
        sizes = [human_bytes(size) for size in (c.epoch_bytes, c.rank_bytes, c.repeated_bytes)]
        rows.append([c.scan, *sizes, c.requests, human_bytes(c.worker_memory_bytes)])
        if c.images_per_second is not None:
            rows[-1].append(f"{c.images_per_second:.0f}")
    return table([*header, "images/s"] if costs[0].images_per_second is not None else header, rows)
