"""The dataset index of a folder."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .. import storage
from ..errors import StorageError
from ..format.dataset_index import (
    DATASET_INDEX,
    MAX_DATASET_INDEX_BYTES,
    DatasetIndex,
    ShardEntry,
)
from ..storage.retry import Retry
from .shard import Shard

# A dataset index and the URLs of its shards.
Opened = tuple[DatasetIndex, list[str]]

# The order of this many samples takes about 130 MB.
MAX_UNSEEN_SAMPLES = 1 << 21
_MISSING = (FileNotFoundError, NotADirectoryError)
_HEAD_THREADS = 16


def index_url(url: str | os.PathLike[str]) -> str:
    """Return the URL of the dataset index, given the folder or the index itself."""
    place = os.fspath(url) or "."
    folder = storage.parent(place) if storage.file_name(place) == DATASET_INDEX else place
    return storage.join(folder, DATASET_INDEX)


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
        retry: How to retry failed requests.

    Returns:
        The index, and the URL of each shard, in order. Costs one request.

    Raises:
        StorageError: The index cannot be read or is larger than 256 MiB.
        CorruptIndex, UnsupportedVersion: The file is not a dataset index of this version.
    """
    found = index_url(url)
    folder = storage.parent(found)
    try:
        data = storage.read_bytes(
            found,
            options=storage_options,
            max_bytes=MAX_DATASET_INDEX_BYTES,
            retry=retry or Retry(),
        )
    except StorageError as error:
        cause = error.__cause__
        if not isinstance(cause, _MISSING):
            raise
        raise StorageError(f"no {DATASET_INDEX} there; {_instead(folder)}", url=found) from cause
    index = DatasetIndex.decode(data, url=found)
    return index, [storage.join(folder, shard.name) for shard in index.shards]


def open_shards(
    urls: Sequence[str],
    *,
    storage_options: storage.Options = None,
    retry: Retry | None = None,
) -> Opened:
    """Return the index of some shards of one folder, named one by one.

    Args:
        urls: The tars, in the order that the index will have.
        storage_options: fsspec storage options.
        retry: How to retry failed requests.

    Returns:
        The index, and the URLs. Costs one request for the folder's ``pcr.json``. If there is none,
        one request per shard for its head, which does not name the classes.

    Raises:
        StorageError: A shard cannot be read, or the folder's dataset does not have it.
        FormatError: A file is not a shard.
    """
    how: Any = {"storage_options": storage_options, "retry": retry}
    try:
        whole, _ = open_dataset(storage.parent(urls[0]), **how)
    except StorageError as error:
        if not isinstance(error.__cause__, _MISSING):
            raise
        with ThreadPoolExecutor(_HEAD_THREADS) as threads:
            entries = list(threads.map(lambda url: _entry(Shard(url, **how)), urls))
        return DatasetIndex("", entries[0].num_groups, tuple(entries)), list(urls)
    by_name = {entry.name: entry for entry in whole.shards}
    names = list(map(storage.file_name, urls))
    if unknown := [url for url, name in zip(urls, names, strict=True) if name not in by_name]:
        held = f"{len(by_name)} from {min(by_name)} to {max(by_name)}"
        raise StorageError(f"the dataset has no such shard, it has {held}", url=unknown[0])
    chosen = tuple(by_name[name] for name in names)
    return dataclasses.replace(whole, shards=chosen), list(urls)


def _entry(shard: Shard) -> ShardEntry:
    """Return what a shard's head says; one request."""
    head = shard.head
    return ShardEntry(
        name=storage.file_name(shard.url),
        num_samples=head.num_samples,
        head_crc32c=head.crc32c,
        shard_bytes=head.prefix_stops[-1],
        shard_crc32c=0,
        prefix_stops=head.prefix_stops,
        index_stop=head.index_stop,
    )


def find_datasets(
    url: str | os.PathLike[str],
    *,
    storage_options: storage.Options = None,
) -> dict[str, str]:
    """Find the dataset at a URL, or the splits of a folder of datasets.

    Returns:
        ``{"": url}`` for a dataset, ``{"train": "URL/train", ...}`` for a folder whose subfolders
        are datasets. Costs one request, or a listing of a folder that is not a dataset.

    Raises:
        StorageError: Neither exists.
    """
    url = os.fspath(url)
    if storage.exists(index_url(url), options=storage_options):
        return {"": url}
    is_folder = storage.is_folder(url, options=storage_options)
    names = _list_datasets(url, storage_options) if is_folder else []
    if not names:
        open_dataset(url, storage_options=storage_options)  # raises a helpful error
    return {name: storage.join(url, name) for name in names}


def _list_datasets(folder: str, storage_options: storage.Options) -> list[str]:
    """Return the subfolders that are datasets."""
    pattern = storage.join(folder, f"*/{DATASET_INDEX}")
    found = storage.list_matching(pattern, options=storage_options)
    return sorted(storage.split_query(url)[0].split("/")[-2] for url in found)


def _instead(folder: str) -> str:
    """Return advice about a folder that is not a dataset."""
    if storage.is_local(folder) and (inside := _list_datasets(folder, None)):
        return f"name one of its folders that are datasets: {', '.join(inside[:5])}"
    return "make a dataset with `pcrshard encode`, or name the folder of one"


def check_claims(
    index: DatasetIndex,
    urls: Sequence[str],
    *,
    storage_options: storage.Options = None,
    retry: Retry | None = None,
) -> None:
    """Compare a claim of more than 2 million samples with a shard before allocating for them.

    One request: the index of the largest shard must be as long as claimed, because it bounds the
    number of samples.

    Raises:
        TruncatedShard, StorageError: It is shorter, or the shard is missing.
    """
    if index.num_samples > MAX_UNSEEN_SAMPLES:
        pairs = zip(index.shards, urls, strict=True)
        entry, url = max(pairs, key=lambda pair: pair[0].num_samples)
        stop = entry.index_stop
        storage.read(url, stop - 1, stop, options=storage_options, retry=retry or Retry())


def count_classes(
    index: DatasetIndex,
    urls: Sequence[str],
    *,
    storage_options: storage.Options = None,
) -> dict[str, int]:
    """Count the samples of each class, by class name, or by label in the field ``cls``.

    One request per shard, for its index; images are not read.
    """
    labels: collections.Counter[Any] = collections.Counter()
    for url, entry in zip(urls, index.shards, strict=True):
        fields = Shard(url, entry=entry, storage_options=storage_options).index.fields
        labels.update(fields.get("cls", [None] * entry.num_samples))
    without_label = labels.pop(None, 0)
    names = {str(label).encode(): name for label, name in enumerate(index.classes)}
    counts = {
        names.get(label) or label.decode(errors="replace"): labels[label]
        for label in sorted(labels, key=_label_order)
    }
    return counts | ({"(no label)": without_label} if without_label else {})


def _label_order(label: Any) -> tuple[float, bytes]:
    """Sort numbers before words."""
    return int(label) if label.isdigit() else math.inf, label
