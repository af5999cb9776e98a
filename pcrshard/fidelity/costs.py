"""The cost of each scan, as figures and as text, without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..format.dataset_index import DatasetIndex, prefix_totals
from ..format.scan import FULL, Scan

_MAX_LISTED = 20
_UNITS = ("B", "kB", "MB", "GB", "TB")


class ScanCost(msgspec.Struct, frozen=True):
    """Bytes of a dataset at a scan.

    Attributes:
        scan: The scan.
        prefix_bytes: Bytes of all prefixes.
        bytes_per_sample: Their mean.
        saving: The full bytes over these bytes.
        msssim: The estimated MS-SSIM of the images, mean; ``None`` if not known.
        msssim_5th: Its 5th percentile.
    """

    scan: Scan
    prefix_bytes: int
    bytes_per_sample: float
    saving: float
    msssim: float | None = None
    msssim_5th: float | None = None


def scan_costs(index: DatasetIndex) -> list[ScanCost]:
    """Return the cost of each available scan, lowest first and ``"full"`` last."""
    totals = prefix_totals(index.shards)
    scans = [*range(1, len(totals)), FULL]
    known = [*index.similarity, (1.0, 1.0)] if index.similarity else [()] * len(scans)
    costs = [
        ScanCost(scan, total, total / index.num_samples, totals[-1] / total, *similarity)
        for scan, total, similarity in zip(scans, totals, known, strict=True)
    ]
    return costs[: index.scan]


def human_bytes(size: float) -> str:
    """Format a size in bytes for people.

    >>> human_bytes(999), human_bytes(108_000), human_bytes(129 * 2**30)
    ('999 B', '108 kB', '139 GB')
    """
    power = 0
    while size >= 999.5 and power < 4:
        size /= 1000
        power += 1
    digits = ".3g" if size < 999.5 else ".0f"
    return f"{size:{digits}} {_UNITS[power]}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table as text; numeric columns are right-aligned.

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


def record_table(rows: Sequence[Any]) -> str:
    """Format records (dicts or structs) as a table with human-readable units.

    Field names become columns; a column without values is omitted.

    >>> print(record_table([{"scan": 1, "sent_bytes": 2000, "rate": None}]))
    scan  sent bytes
       1        2 kB
    """
    records = [row if isinstance(row, dict) else msgspec.structs.asdict(row) for row in rows]
    names = list(dict.fromkeys(name for record in records for name in record))
    shown = [name for name in names if any(record.get(name) is not None for record in records)]
    cells = [[_cell(name, record.get(name)) for name in shown] for record in records]
    return table([name.replace("_", " ") for name in shown], cells)


def figures_text(figures: Any) -> str:
    """Format figures as one line each, and lists of records as tables; ``None`` is left out.

    >>> print(figures_text({"file_bytes": 2000, "added": [2, 3], "scans": [{"scan": 1}]}))
    file bytes: 2 kB
    added: 2, 3
    <BLANKLINE>
    scans:
    scan
       1
    """
    if isinstance(figures, list):
        return record_table(figures)
    lines = []
    for name, value in figures.items():
        label = name.replace("_", " ")
        is_table = isinstance(value, list) and isinstance([*value, ""][0], dict | msgspec.Struct)
        if is_table or isinstance(value, dict):
            lines += [f"\n{label}:", figures_text(value)]
        elif value is not None:
            lines.append(f"{label}: {_cell(name, value)}")
    return "\n".join(lines)


def _cell(name: str, value: Any) -> str:
    match value:
        case None | [] | ():
            return "-"
        case dict():
            return " ".join(f"{key}={each}" for key, each in value.items())
        case list() | tuple():
            more = f", ... ({len(value)})" if len(value) > _MAX_LISTED else ""
            return ", ".join(map(str, value[:_MAX_LISTED])) + more
        case int() | float() if "bytes" in name:
            return human_bytes(value)
        case float():
            return _number(name, value)
    return str(value)


def _number(name: str, value: float) -> str:
    if name.endswith("seconds"):
        return f"{value:.3g} s" if value >= 0.1 else f"{1000 * value:.3g} ms"
    return f"{value:.4g}" if value < 10_000 else f"{value:.0f}"
