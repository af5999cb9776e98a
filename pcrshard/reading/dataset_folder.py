"""The dataset index of a folder."""

from __future__ import annotations

import os

from .. import storage
from ..format.dataset_index import DATASET_INDEX, MAX_DATASET_INDEX_BYTES, DatasetIndex
from ..storage.retry import Retry


def index_url(url: str | os.PathLike[str]) -> str:
    """Where the dataset index of a dataset is, given its folder or the index itself."""
    path, query = storage.split_query(os.fspath(url))
    folder = path if path.rpartition("/")[2] != DATASET_INDEX else path.removesuffix(DATASET_INDEX)
    return storage.join((folder.rstrip("/") or ("/" if folder else ".")) + query, DATASET_INDEX)


def open_dataset(
    url: str | os.PathLike[str],
    *,
    storage_options: storage.Options | None = None,
    retry: Retry | None = None,
) -> tuple[DatasetIndex, list[str]]:
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
