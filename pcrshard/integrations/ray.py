"""Ray Data integration: ``ray.data.read_datasource(PCRDatasource("shards", scan=2))``.

Each read task reads some shards, with one request per prefix, so that a cluster reads only the
bytes of the requested scan.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ..errors import MissingDependency
from ..format.dataset_index import ShardEntry, resolve_scan
from ..format.scan import FULL, Scan
from ..reading.dataset_folder import check_claims, open_dataset
from ..reading.field_values import convert_all
from ..reading.options import ReadOptions
from ..reading.prefix import Sample

try:
    from ray.data import Datasource
    from ray.data.block import Block, BlockAccessor, BlockMetadata
    from ray.data.datasource import ReadTask
except ImportError as missing:
    raise MissingDependency("Ray Data is not installed: pip install 'ray[data]'") from missing

Place = tuple[str, ShardEntry]
BLOCK_ROWS = 64


class PCRDatasource(Datasource):  # type: ignore[misc]  # Ray is untyped
    """Samples as rows, one column per field: JPEGs as bytes, ``cls`` an int, ``json`` parsed.

    Decode in ``map_batches``, next to the model: pixels are many times larger than scans.

    Args:
        url: Dataset folder or its ``pcr.json``, local or any fsspec URL that all nodes can read.
        scan: Highest scan to read, 1-based; ``"full"``; or a fraction in (0, 1) of the full bytes.
        fields: Columns; by default ``__key__`` and all fields of a sample.
        read: Cache and network options.

    Raises:
        ScanUnavailable: The dataset has no such scan.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        scan: Scan | float = FULL,
        fields: Sequence[str] | None = None,
        read: ReadOptions = ReadOptions(),
    ) -> None:
        super().__init__()
        self.index, urls = open_dataset(url, storage_options=read.store, cache=read.cache)
        check_claims(self.index, urls, storage_options=read.store)
        self.scan: Scan = resolve_scan(self.index.shards, scan)
        self.index.prefix_bytes(self.scan)  # raises if a shard lacks the scan
        self._places = list(zip(urls, self.index.shards, strict=True))
        self._read = partial(_read, scan=self.scan, fields=fields, read=read)

    def estimate_inmemory_data_size(self) -> int:
        """Return the bytes of the prefixes."""
        return self.index.prefix_bytes(self.scan)

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: object = None,
    ) -> list[Any]:
        """Return at most ``parallelism`` tasks, of whole shards."""
        count = min(parallelism, len(self._places))
        parts = [self._places[task::count] for task in range(count)]
        return [self._task(part, per_task_row_limit) for part in parts]

    def _task(self, places: list[Place], row_limit: int | None) -> Any:
        metadata = BlockMetadata(
            num_rows=sum(entry.num_samples for _, entry in places),
            size_bytes=sum(entry.prefix_stop(self.scan) for _, entry in places),
            input_files=[url for url, _ in places],
            exec_stats=None,
        )
        return ReadTask(partial(self._read, places), metadata, per_task_row_limit=row_limit)


def _read(
    places: list[Place],
    *,
    scan: Scan,
    fields: Sequence[str] | None,
    read: ReadOptions,
) -> Iterator[Block]:
    """Yield the blocks of some shards."""
    for url, entry in places:
        prefix = read.open(url, entry).load(scan)
        samples = (convert_all(sample, prefix.index.schema) for sample in prefix.samples())
        while rows := list(itertools.islice(samples, BLOCK_ROWS)):
            yield _block(rows, fields)


def _block(rows: list[Sample], fields: Sequence[str] | None) -> Block:
    names = fields or dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return BlockAccessor.batch_to_block(columns)
