"""wids index files: the tars of a dataset, and how many samples each has."""

from __future__ import annotations

import msgspec

from .. import storage
from ..errors import EncodeError
from .samples import StorageOptions

_MAX_BYTES = 1 << 28


class _Shard(msgspec.Struct):
    url: str
    nsamples: int


class _Index(msgspec.Struct):
    shardlist: list[_Shard]
    base: str = ""
    datasets: list[msgspec.Raw] = []


def is_wids(url: str) -> bool:
    """Return whether a source is a wids index, by its name."""
    return storage.file_name(url).endswith(".json")


def read_wids(url: str, options: StorageOptions) -> dict[str, int]:
    """Return the samples of each tar that a wids index lists, by the tar's URL.

    Relative URLs are seen from the index's ``base``, by default its folder.

    Raises:
        EncodeError: It is no such index, or one of several datasets.
        StorageError: It cannot be read.
    """
    data = storage.read_bytes(url, max_bytes=_MAX_BYTES, options=options)
    try:
        index = msgspec.json.decode(data, type=_Index)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise EncodeError(
            f"expected a wids index, a JSON file with a shardlist of url and nsamples: {error}",
            url=url,
        ) from error
    if index.datasets or not index.shardlist:
        raise EncodeError(
            f"expected a wids index of tars, got {len(index.datasets)} datasets and "
            f"{len(index.shardlist)} tars: index each dataset by itself",
            url=url,
        )
    folder = storage.within(storage.parent(url), index.base)
    return {storage.within(folder, shard.url): shard.nsamples for shard in index.shardlist}
