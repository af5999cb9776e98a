"""What each scan costs, as rows and as text; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .dataset_index import DatasetIndex
from .index import FULL, Scan


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
    return [ScanCost(scan, size, size / index.num_samples, full / size) for scan, size in zip(scans, sizes, strict=True)]


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
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def scan_table(costs: Sequence[ScanCost]) -> str:
    """The table of ``pcrshard info``."""
    rows = [[c.scan, human_bytes(c.prefix_bytes), human_bytes(c.bytes_per_sample), f"{c.saving:.2f}x"] for c in costs]
    return table(["scan", "prefix", "bytes/sample", "saving"], rows)
