"""What each scan costs, as figures and as text; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..format.dataset_index import DatasetIndex, prefix_totals
from ..format.scan import FULL, Scan
from ..training.epoch_order import Geometry, Rules, epoch_order
from ..training.shard_schedule import account

_UNITS = ("B", "kB", "MB", "GB", "TB")


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


def record_table(rows: Sequence[Any], omit: Sequence[str] = ()) -> str:
    """A table of records (named tuples or dicts): their names as columns, values in human units.

    A column without any value is left out.

    >>> print(record_table([{"scan": 1, "sent_bytes": 2000, "rate": None}]))
    scan  sent bytes
       1        2 kB
    """
    records = [row if isinstance(row, dict) else row._asdict() for row in rows]
    names = list(dict.fromkeys(name for record in records for name in record))
    shown = [
        name
        for name in names
        if name not in omit and any(record.get(name) is not None for record in records)
    ]
    cells = [[_cell(name, record.get(name)) for name in shown] for record in records]
    return table([name.replace("_", " ") for name in shown], cells)


def _cell(name: str, value: Any) -> str:
    match value:
        case None:
            return "-"
        case dict():
            return " ".join(f"{key}={each}" for key, each in value.items())
        case list() | tuple():
            return "x".join(map(str, value))
        case int() | float() if "bytes" in name:
            return human_bytes(value)
        case float():
            return f"{value:.3g} s" if name.endswith("seconds") else f"{value:.4g}"
    return str(value)


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
        read = account(order, sizes, prefixes, geometry.max_world_size, workers)
        epoch_bytes = int(read.read_bytes.sum())
        costs.append(
            PlanCost(
                scan=scan,
                steps=order.steps,
                epoch_bytes=epoch_bytes,
                rank_bytes=int(read.read_bytes.sum(axis=1).max()),
                repeated_bytes=read.repeated_bytes,
                requests=int(read.requests.sum()),
                worker_memory_bytes=int(read.open_bytes.max()),
                images_per_second=bandwidth and bandwidth / (epoch_bytes / len(order.ids)),
            )
        )
    return costs
