"""The dataset index of a folder."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from .. import storage
from ..errors import FormatError, StorageError, naming
from ..format.dataset_index import (
    DATASET_INDEX,
    MAX_DATASET_INDEX_BYTES,
    DatasetIndex,
    ShardEntry,
    ShardTable,
)
from ..format.plain_tar import PlainTarIndexes
from ..format.sample_columns import COLUMNS, decode_column
from ..redaction import get_logger
from ..storage.retry import Retry, is_hopeless
from .prefix_cache import PrefixCache
from .shard import Shard

log = get_logger(__name__)

# A dataset index and the URLs of its shards.
Opened = tuple[DatasetIndex, Sequence[str]]
Result = TypeVar("Result")

# Requests of map_shards in flight: 16 hide 50 ms a request, more are refused by some servers.
MAP_THREADS = 16
# The order of this many samples takes about 130 MB.
MAX_UNSEEN_SAMPLES = 1 << 21


def map_shards(read: Callable[..., Result], *arguments: Iterable[Any]) -> Iterator[Result]:
    """Apply a function that reads something of a shard to many, ``MAP_THREADS`` at a time.

    Yields the results in order.
    """
    with ThreadPoolExecutor(MAP_THREADS, "pcrshard-map") as threads:
        try:
            yield from threads.map(read, *arguments)
        except BaseException:
            threads.shutdown(cancel_futures=True)  # not after thousands of requests more
            raise


def is_shard(url: str) -> bool:
    """Return whether a URL names a single shard rather than a dataset."""
    return storage.file_name(url).endswith(".tar")


def index_url(url: str | os.PathLike[str]) -> str:
    """Return the URL of the dataset index, given the folder or the index itself."""
    place = os.fspath(url) or "."
    is_index = storage.file_name(place) == DATASET_INDEX
    return place if is_index else storage.join(place, DATASET_INDEX)


class ShardUrls(Sequence[str]):
    """The URLs of files in a folder; one is made when it is asked for."""

    def __init__(self, folder: str, names: Sequence[str]) -> None:
        self.folder, self.names = folder, names

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> ShardUrls: ...
    def __getitem__(self, place: int | slice) -> str | ShardUrls:
        if isinstance(place, slice):
            return ShardUrls(self.folder, self.names[place])
        return storage.join(self.folder, self.names[place])


def open_dataset(
    source: storage.Urls,
    *,
    storage_options: storage.Access = None,
    retry: Retry | None = None,
    cache: PrefixCache | None = None,
) -> tuple[DatasetIndex, list[str]]:
    """Read a dataset index; see :func:`open_lazily`, whose URLs this returns as a list.

    Returns:
        The index, and the URL of each shard, in order.
    """
    index, urls = open_lazily(source, storage_options=storage_options, retry=retry, cache=cache)
    return index, list(urls)


def open_lazily(
    source: storage.Urls,
    *,
    storage_options: storage.Access = None,
    retry: Retry | None = None,
    cache: PrefixCache | None = None,
) -> Opened:
    """Read a dataset index.

    Args:
        source: The folder, its ``pcr.json``, or some tars of one folder, in the order that the
            index will have; braces such as ``{000000..000003}`` are expanded.
        storage_options: fsspec storage options.
        retry: How to retry failed requests.
        cache: Keeps the dataset index of a remote store, which is used if the store cannot be
            reached any more.

    Returns:
        The index, and the URL of each shard, in order. Costs one request. For tars whose
        ``pcr.json`` is missing or refused, one more request per shard for its head, which does not
        name the classes.

    Raises:
        StorageError: The index or a shard cannot be read, the index is larger than 256 MiB, or does
            not have a shard.
        FormatError: The file is not a dataset index of this version, or another one not a shard.
        ValueError: ``source`` is empty.
    """
    store = storage.Store.of(storage_options, retry)
    if not source:
        raise ValueError("expected a dataset, got none")
    urls = storage.expand([source] if isinstance(source, str | os.PathLike) else source)
    by_name = is_shard(urls[0])
    found = index_url(storage.parent(urls[0]) if by_name else urls[0])
    try:
        index = _read_index(found, store, cache)
    except StorageError as error:
        # The signature of a shard's URL is not one for pcr.json.
        denied = (PermissionError,) * by_name
        if not isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError, *denied)):
            raise
        if not by_name:
            hint = "name the folder of a dataset, or make one with `pcrshard encode`"
            with contextlib.suppress(StorageError):
                splits = find_datasets(storage.parent(found), storage_options=store)
                if "" not in splits:
                    hint = f"name the folder of a split: {', '.join(splits)}"
            raise StorageError(f"no {DATASET_INDEX} there; {hint}", url=found) from error.__cause__
        if any(map(storage.is_pattern, urls)):
            raise StorageError(
                "expected braces instead of wildcards, as in data-{000000..000003}.tar: no "
                f"{DATASET_INDEX} lists the shards",
                url=urls[0],
            ) from error.__cause__
        return _index_of([Shard(url, storage_options=store) for url in urls]), urls
    if index.tars:
        names = index.shards.names
        index_urls = ShardUrls(storage.parent(found), PlainTarIndexes(names))
        rows = ShardTable(names, index.shards.rows, index_urls)
        index = dataclasses.replace(index, shards=rows)
    if not by_name:
        folder = storage.within(storage.parent(found), index.tars)
        return index, ShardUrls(folder, index.shards.names)
    return _choose(index, urls)


def entries_by_name(entries: Iterable[ShardEntry]) -> dict[str, list[ShardEntry]]:
    """Return entries by file name; a plain tar has one for each of its parts, in order."""
    found: dict[str, list[ShardEntry]] = {}
    for entry in entries:
        found.setdefault(entry.name, []).append(entry)
    return found


def _choose(index: DatasetIndex, urls: Sequence[str]) -> Opened:
    """Return an index of some shards by their URLs."""
    entries_of = entries_by_name(index.shards)
    for url in urls:
        if storage.file_name(url) not in entries_of:
            hint = "name the folder to read all of its shards"
            raise StorageError(
                f"the {DATASET_INDEX} of its folder does not have it; {hint}", url=url
            )
    pairs = [(url, each) for url in urls for each in entries_of[storage.file_name(url)]]
    chosen = [entry.name for _, entry in pairs]
    if chosen != list(index.shards.names):
        # What is said of all shards does not hold.
        table = ShardTable.of(entry for _, entry in pairs)
        index = dataclasses.replace(index, shards=table, counts=None, columns=())
    return index, [url for url, _ in pairs]


def _read_index(url: str, store: storage.Store, cache: PrefixCache | None) -> DatasetIndex:
    """Read a dataset index; if its store cannot be reached, take the one that a cache keeps."""
    try:
        data = storage.read_bytes(url, max_bytes=MAX_DATASET_INDEX_BYTES, options=store)
    except StorageError as error:
        kept = b"" if cache is None or storage.is_local(url) else cache.recall(url)
        if not kept or error.__cause__ is None or is_hopeless(error.__cause__):
            raise
        index = DatasetIndex.decode(kept, url=url)
        log.warning("%s; continuing with the dataset index that the cache keeps", error)
        return index
    index = DatasetIndex.decode(data, url=url)
    if cache is not None and not storage.is_local(url):
        cache.remember(url, data)
    return index


def _index_of(shards: Sequence[Shard]) -> DatasetIndex:
    """Return an index of shards, from their heads and the schema of the first.

    Every shard that is read is compared with that schema.
    """
    heads = list(map_shards(lambda shard: shard.head, shards))
    groups = {head.num_groups for head in heads}
    if len(groups) > 1:
        message = f"expected shards of one dataset, got shards of {sorted(groups)} scans"
        raise FormatError(message, url=shards[0].url)
    entries = [
        ShardEntry.of_head(storage.file_name(shard.url), head)
        for shard, head in zip(shards, heads, strict=True)
    ]
    return DatasetIndex(shards[0].index.schema, ShardTable.of(entries))


def find_datasets(
    url: str | os.PathLike[str],
    *,
    storage_options: storage.Access = None,
) -> dict[str, str]:
    """Find the splits of a folder.

    Returns:
        ``{"train": "URL/train", ...}`` for a folder whose subfolders are datasets, ``{"": url}``
        for a dataset and anything else. Costs one request, or a listing of a folder that is not a
        dataset.
    """
    url = os.fspath(url)
    if storage.exists(index_url(url), options=storage_options):
        return {"": url}
    pattern = storage.join(url, f"*/{DATASET_INDEX}")
    found = storage.list_matching(pattern, options=storage_options)
    folders = sorted(storage.parent(file.name) for file in found)
    return {storage.file_name(folder): folder for folder in folders} or {"": url}


def check_claims(
    index: DatasetIndex,
    urls: Sequence[str],
    *,
    storage_options: storage.Access = None,
) -> None:
    """Compare a claim of more than 2 million samples with a shard before allocating for them.

    One request: the index of the largest shard must be as long as claimed, because it bounds the
    number of samples.

    Raises:
        TruncatedShard, StorageError: It is shorter, or the shard is missing.
    """
    if index.num_samples > MAX_UNSEEN_SAMPLES:
        largest = int(index.shards.num_samples.argmax())
        entry = index.shards[largest]
        url, stop = entry.index_url or urls[largest], entry.index_stop
        storage.read(url, stop - 1, stop, options=storage_options)


def index_folder(index: DatasetIndex, urls: Sequence[str]) -> str:
    """Return the folder of a dataset index, given the URLs of its shards."""
    return storage.parent(index.shards[0].index_url or urls[0])


def read_column(
    index: DatasetIndex,
    folder: str,
    name: str,
    *,
    storage_options: storage.Access = None,
) -> NDArray[Any] | None:
    """Read a column of all samples of a dataset; one request.

    Args:
        index: The dataset index.
        folder: Its folder.
        name: One of the names of :class:`SampleColumns`.
        storage_options: fsspec storage options.

    Returns:
        The column, as in :class:`SampleColumns`; ``None`` without one of these shards.

    Raises:
        StorageError: It cannot be read, though it is there.
    """
    for column in index.columns:
        if column.name == name:
            url = storage.join(folder, COLUMNS)
            try:
                data = storage.read(url, *index.column_range(column), options=storage_options).data
                with naming(url):
                    return decode_column(column, index.shards, data)
            except (FormatError, StorageError) as error:
                gone = isinstance(error.__cause__, FileNotFoundError)
                if not (gone or isinstance(error, FormatError)):
                    raise
                log.warning("%s; reading the index of each shard instead", error)
    return None


def count_classes(
    index: DatasetIndex,
    urls: Sequence[str],
    *,
    storage_options: storage.Access = None,
) -> dict[str, int]:
    """Count the samples of each class, by class name, or by label in the field ``cls``.

    The largest class comes first. One request for all labels; where some are no numbers, or there
    is no ``pcr.columns``, one per shard, for its index. Images are not read.
    """
    labels: collections.Counter[bytes | None] = collections.Counter()
    store = storage.Store.of(storage_options)
    numbers = read_column(index, index_folder(index, urls), "labels", storage_options=store)

    def labels_of(url: str, entry: ShardEntry) -> Sequence[bytes | None]:
        fields = Shard(url, entry=entry, storage_options=store).index.fields
        return fields.get("cls", [None] * entry.num_samples)

    if numbers is not None and (numbers >= 0).all():
        values, sums = np.unique(numbers, return_counts=True)
        found = zip(values.tolist(), sums.tolist(), strict=True)
        labels.update({str(label).encode(): count for label, count in found})
    else:
        for own in map_shards(labels_of, urls, index.shards):
            labels.update(own)
    names = {str(label).encode(): name for label, name in enumerate(index.classes)}
    counts = {}
    for label, count in labels.most_common():
        shown = "(no label)" if label is None else label.decode(errors="replace")
        counts[names.get(label or b"", shown)] = count
    return counts
