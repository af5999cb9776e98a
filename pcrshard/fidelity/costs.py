"""What each scan costs, as figures and as text; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..format.dataset_index import DatasetIndex, prefix_totals
from ..format.scan import FULL, Scan
from ..training.epoch_order import Geometry, Order, Rules, epoch_order
from ..training.shard_schedule import Account, account

_UNITS = ("B", "kB", "MB", "GB", "TB")
_PLAN_HEADER = (
    "scan",
    "epoch",
    "rank at most",
    "read twice",
    "requests",
    "memory/worker",
    "images/s",
)


class ScanCost(NamedTuple):
    """Bytes of a dataset at a scan; ``saving`` is full bytes over these bytes."""

    scan: Scan
    prefix_bytes: int
    bytes_per_sample: float
    saving: float


def scan_costs(index: DatasetIndex) -> list[ScanCost]:
    """The cost of each scan, lowest first, ``"full"`` last; of a staged copy, what it holds."""
    totals = prefix_totals(index.shards)
    scans = [*range(1, index.num_groups + 1), FULL]
    costs = [
        ScanCost(scan, total, total / index.num_samples, totals[-1] / total)
        for scan, total in zip(scans, totals, strict=True)
    ]
    return costs[: index.scan]


def name_scan(scan: Scan) -> str:
    """A scan in a sentence.

    >>> name_scan(5), name_scan("full")
    ('scan 5', 'full')
    """
    return FULL if scan == FULL else f"scan {scan}"


def human_bytes(size: float) -> str:
    """A size in bytes for people.

    >>> human_bytes(999), human_bytes(108_000), human_bytes(129 * 2**30)
    ('999 B', '108 kB', '139 GB')
    """
    power = 0
    while size >= 999.5 and power < 4:
        size /= 1000
        power += 1
    digits = ".3g" if size < 999.5 else ".0f"
    return f"{size:{digits}} {_UNITS[power]}"


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "shard"), counted(4, "shard")
    ('1 shard', '4 shards')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns of text; those with numbers are aligned on the right.

    >>> print(table(["scan", "bytes", "name"], [[1, "12 kB", "a"], ["full", "3 MB", "bc"]]))
    scan  bytes  name
       1  12 kB  a
    full   3 MB  bc
    """
    lines = [[str(cell).replace("\n", " ") for cell in row] for row in (header, *rows)]
    columns = []
    for name, *cells in zip(*lines, strict=True):
        width = max(map(len, [name, *cells]))
        is_text = cells and not any(cell[:1].isdigit() for cell in cells)
        columns.append([f"{cell:{'<' if is_text else '>'}{width}}" for cell in (name, *cells)])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def scan_table(costs: Sequence[ScanCost]) -> str:
    """The table of ``pcrshard info``."""
    return table(
        ["scan", "prefix", "bytes/sample", "saving"],
        [
            [scan, human_bytes(total), human_bytes(each), f"{saving:.2f}x"]
            for scan, total, each, saving in costs
        ],
    )


class PlanCost(NamedTuple):
    """What an epoch reads at a scan.

    Attributes:
        scan: The scan.
        steps: Steps of each rank.
        epoch_bytes: Bytes that all workers of all ranks read.
        rank_bytes: Bytes of the rank that reads most.
        repeated_bytes: Those of ``epoch_bytes`` that are read more than once.
        requests: Prefixes that all workers read. A remote one is one request up to the size of a
            part (docs/remote.md), then one per part.
        worker_memory_bytes: Most bytes of prefixes that a worker holds at a time.
        images_per_second: What the bandwidth allows, X = W / E[s] (Theorem 4.1 of the VLDB paper);
            ``None`` without a bandwidth.
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
    """What an epoch will read at some scans.

    Args:
        index: The dataset.
        scans: The scans to plan for; by default all that there are.
        geometry: The geometry of the job, with a rank for each slot.
        rules: The rules of the job's order.
        workers: DataLoader workers per rank.
        bandwidth: Bytes a second that the storage gives to all ranks together.

    Raises:
        ScanUnavailable: There is no such scan.
        ValueError: The dataset has no global batch.
    """
    sizes = [shard.num_samples for shard in index.shards]
    order = epoch_order(sizes, geometry, rules)
    costs = []
    for scan in scans or [cost.scan for cost in scan_costs(index)]:
        prefixes = [shard.prefix_stop(scan) for shard in index.shards]
        counted = account(order, sizes, prefixes, geometry.max_world_size, workers)
        costs.append(_plan_cost(scan, order, counted, bandwidth))
    return costs


def _plan_cost(
    scan: Scan,
    order: Order,
    counted: Account,
    bandwidth: float | None,
) -> PlanCost:
    epoch_bytes = int(counted.read_bytes.sum())
    return PlanCost(
        scan=scan,
        steps=order.steps,
        epoch_bytes=epoch_bytes,
        rank_bytes=int(counted.read_bytes.sum(axis=1).max()),
        repeated_bytes=counted.repeated_bytes,
        requests=int(counted.requests.sum()),
        worker_memory_bytes=int(counted.open_bytes.max()),
        images_per_second=bandwidth and bandwidth / (epoch_bytes / len(order.ids)),
    )


def plan_table(costs: Sequence[PlanCost]) -> str:
    """The table of ``pcrshard plan``."""
    rows = [_plan_cells(cost) for cost in costs]
    return table(_PLAN_HEADER[: len(rows[0])], rows)


def _plan_cells(cost: PlanCost) -> list[object]:
    sizes = map(human_bytes, (cost.epoch_bytes, cost.rank_bytes, cost.repeated_bytes))
    row: list[object] = [cost.scan, *sizes, cost.requests, human_bytes(cost.worker_memory_bytes)]
    if cost.images_per_second is not None:
        row.append(f"{cost.images_per_second:.0f}")
    return row
