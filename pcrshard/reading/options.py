"""How shards are read."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from .. import storage
from ..arguments import ByteSize, Natural, check_fields, num_bytes
from ..format.dataset_index import ShardEntry
from ..format.schema import Schema
from ..lazy import lazy
from ..storage.retry import Retry
from .prefix_cache import PrefixCache
from .shard import Shard


@dataclass(frozen=True)
class ReadOptions:
    """How shards are read.

    Attributes:
        storage_options: fsspec storage options.
        retry: When to retry failed requests and when to give up.
        prefetch: Prefixes to fetch while another is in use.
        cache_dir: Folder on local disk that keeps prefixes.
        cache_bytes: Limit of the cache, a number or a size such as ``"50GB"``. At the limit, shards
            last used before this job began are evicted first; after them, the cache keeps what it
            has and stores no further shards.
        begun: Start of the job, in seconds since 1970; by default the time at which the options are
            created.

    Raises:
        TypeError: A value has another type.
        ValueError: A value is out of range, or two options conflict.
    """

    storage_options: storage.Options = field(default=None, repr=False)
    retry: Retry | None = None
    prefetch: Natural = 2
    cache_dir: str | os.PathLike[str] | None = None
    cache_bytes: ByteSize | None = None
    begun: float = field(default_factory=time.time, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.cache_bytes is not None and not self.cache_dir:
            raise ValueError(f"expected cache_dir with cache_bytes={self.cache_bytes!r}")
        _ = self.cache  # created before the workers, so that all share its totals

    @lazy
    def store(self) -> storage.Store:
        """What all shards that are opened with these options are read from."""
        return storage.Store.of(self.storage_options, self.retry)

    @lazy
    def cache(self) -> PrefixCache | None:
        """The cache of all shards that are opened with these options."""
        if not self.cache_dir:
            return None
        size = self.cache_bytes
        limit = None if size is None else num_bytes("cache_bytes", size)
        return PrefixCache(self.cache_dir, limit, self.begun)

    def open(self, url: str, entry: ShardEntry | None, schema: Schema | None = None) -> Shard:
        """Open a shard at a URL; see :class:`Shard`."""
        return Shard(url, entry=entry, schema=schema, storage_options=self.store, cache=self.cache)
