"""How shards are read."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from functools import cached_property

from .. import storage
from ..arguments import ByteSize, Natural, Positive, check_fields, num_bytes
from ..format.dataset_index import ShardEntry
from ..storage.retry import Retry
from .prefix_cache import PrefixCache
from .shard import Shard


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
        cache_bytes: Its bound, a number or a size such as ``"50GB"``. When it is reached, what
            this job has used stays, and what else it reads is not kept; what was used before it
            began goes first.
        begun: When the job began, in seconds since 1970; by default when the options are made.
    """

    check: bool = True
    storage_options: storage.Options = field(default=None, repr=False)
    retry: Retry | None = None
    prefetch: Natural = 2
    prefetch_bytes: Positive = 1 << 28
    cache_dir: str | os.PathLike[str] | None = None
    cache_bytes: ByteSize | None = None
    begun: float = field(default_factory=time.time, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.cache_bytes is not None and self.cache_dir is None:
            raise ValueError(f"expected cache_dir with cache_bytes={self.cache_bytes!r}")
        _ = self.cache  # made before workers are, so that all count together

    @cached_property
    def cache(self) -> PrefixCache | None:
        """The cache of all shards that are opened with these options."""
        if self.cache_dir is None:
            return None
        size = self.cache_bytes
        limit = None if size is None else num_bytes("cache_bytes", size)
        return PrefixCache(os.fspath(self.cache_dir), limit, self.begun)

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
