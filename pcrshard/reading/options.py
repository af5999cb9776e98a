"""How shards are read."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property

from .. import storage
from ..format.dataset_index import ShardEntry
from ..storage.retry import Retry
from .prefix_cache import PrefixCache
from .shard import Shard

_LEAST = {
    "prefetch": 0,
    "prefetch_bytes": 1,
    "cache_bytes": 1,
}


@dataclass(frozen=True)
class ReadOptions:
    """How shards are read.

    Attributes:
        check: Compare each piece with its CRC-32C.
        storage_options: For fsspec.
        retry: What to do about a bad network.
        prefetch: Prefixes that are fetched while another is used.
        prefetch_bytes: Their bound.
        cache_dir: Folder on local disk that keeps prefixes.
        cache_bytes: Its bound. When it is reached, what this job has used stays, and what else it
            reads is not kept; what was used before it began goes first.
        begun: When the job began, in seconds since 1970; by default when the options are made.
    """

    check: bool = True
    storage_options: storage.Options = field(default=None, repr=False)
    retry: Retry | None = None
    prefetch: int = 2
    prefetch_bytes: int = 1 << 28
    cache_dir: str | None = None
    cache_bytes: int | None = None
    begun: float = field(default_factory=time.time, repr=False, compare=False)

    def __post_init__(self) -> None:
        _ = self.cache  # made before workers are, so that all count together
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"expected {name} of at least {least}, got {value}")

    @cached_property
    def cache(self) -> PrefixCache | None:
        """The cache of all shards that are opened with these options."""
        if self.cache_dir is None:
            return None
        return PrefixCache(self.cache_dir, self.cache_bytes, self.begun)

    def open(self, url: str, entry: ShardEntry | None) -> Shard:
        """Return a shard that is read with these options."""
        return Shard(
            url,
            entry=entry,
            check=self.check,
            storage_options=self.storage_options,
            retry=self.retry,
            cache=self.cache,
        )
