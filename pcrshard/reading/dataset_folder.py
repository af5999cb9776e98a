"""The dataset index of a folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .. import storage
from ..format.dataset_index import DATASET_INDEX, MAX_DATASET_INDEX_BYTES, DatasetIndex
from ..storage.retry import Retry
from .shard import Shard

# A dataset index, and the URL of each of its shards.
Opened = tuple[DatasetIndex, list[str]]

# An order of so many samples takes some 130 MB.
MAX_UNSEEN_SAMPLES = 1 << 21


def index_url(url: str | os.PathLike[str]) -> str:
    """Where the dataset index of a dataset is, given its folder or the index itself."""
    path, query = storage.split_query(os.fspath(url))
    folder = path if path.rpartition("/")[2] != DATASET_INDEX else path.removesuffix(DATASET_INDEX)
    return storage.join((folder.rstrip("/") or ("/" if folder else ".")) + query, DATASET_INDEX)


def open_dataset(
    url: str | os.PathLike[str],
    *,
    storage_options: storage.Options = None,
    retry: Retry | None = None,
) -> Opened:
    """Read a dataset index.

    Args:
        url: The folder, or its ``pcr.json``.
        storage_options: fsspec storage options.
        retry: What to do about a bad network.

    Returns:
        The index, and the URL of each shard in its order. One request.

    Raises:
        StorageError: It cannot be read, or is larger than 256 MiB.
        CorruptIndex, UnsupportedVersion: It is not a dataset index of this version.
    """
    found = index_url(url)
    path, query = storage.split_query(found)
    folder = path.removesuffix(f"/{DATASET_INDEX}") + query
    data = storage.read_bytes(
        found,
        options=storage_options,
        max_bytes=MAX_DATASET_INDEX_BYTES,
        retry=retry or Retry(),
    )
    index = DatasetIndex.decode(data, url=found)
    return index, [storage.join(folder, shard.name) for shard in index.shards]


def check_claims(
    index: DatasetIndex,
    urls: Sequence[str],
    *,
    storage_options: storage.Options = None,
    retry: Retry | None = None,
) -> None:
    """Compare a claim of more than 2 million samples with a shard, before memory is taken for them.

    The shard that has the most by the index is looked at, by two small requests: its head must be
    the one that the index names, and its own index must be there.

    Raises:
        CorruptIndex, TruncatedShard, StorageError: The shard is another one, or not there.
    """
    if index.num_samples <= MAX_UNSEEN_SAMPLES:
        return
    largest = max(range(len(urls)), key=lambda shard: index.shards[shard].num_samples)
    url = urls[largest]
    how: dict[str, Any] = {"retry": retry or Retry()}
    shard = Shard(
        url,
        entry=index.shards[largest],
        storage_options=storage_options,
        **how,
    )
    stop = shard.head.index_stop
    with storage.open_range(url, stop - 1, stop, options=storage_options, **how):
        pass
