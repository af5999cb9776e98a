"""Read a shard: one request for the prefix of a scan, then its samples."""

from __future__ import annotations

import operator
import os
from functools import partial

import numpy as np
from numpy.typing import NDArray

from .. import storage
from ..errors import CorruptIndex, FormatError, naming
from ..format.dataset_index import DATASET_INDEX, ShardEntry
from ..format.scan import FULL, Scan
from ..format.schema import Schema
from ..format.shard_head import HEAD_STOP, Head, read_head
from ..format.shard_index import ShardIndex, decode_index
from ..lazy import lazy
from ..memory import Buffer, borrow_array
from ..redaction import PIPE, get_logger, redact_url
from ..storage.retry import Cancel, Retry
from ..storage.stores import mapped_errors
from .plain_tar import check_end, find_extents, read_extents
from .prefix import OnError, Prefix, Sample, Samples
from .prefix_cache import Fetch, PrefixCache

log = get_logger(__name__)
Rows = NDArray[np.int64] | None


class Shard:
    """One shard, read at any scan.

    Reads lazily. The index is kept in memory; pieces are not.

    Args:
        url: Local path, any fsspec URL, or ``pipe:COMMAND``.
        entry: The shard's entry in the dataset index. With it, a prefix takes one request, without
            it two.
        schema: The schema of the dataset, which the shard's must equal.
        storage_options: fsspec storage options.
        retry: How to retry failed requests.
        cache: Cache of prefixes on local disk.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        entry: ShardEntry | None = None,
        schema: Schema | None = None,
        storage_options: storage.Access = None,
        retry: Retry | None = None,
        cache: PrefixCache | None = None,
    ) -> None:
        self.url = os.fspath(url)
        self.entry = entry
        self.schema = schema
        self.cache = cache
        # Identities of the content that the cache holds, by the head's checksum.
        self._cached: set[str] = set()
        self.store = storage.Store.of(storage_options, retry)

    def __repr__(self) -> str:
        return f"Shard({redact_url(self.url)!r})"

    @lazy
    def head(self) -> Head:
        """The head; costs one request of 1024 bytes at first use."""
        return self._read_head(self._read(HEAD_STOP).data)

    @lazy
    def index(self) -> ShardIndex:
        """The index; at first use, it costs as many requests as :meth:`load`."""
        return self.load(0).index

    @property
    def num_samples(self) -> int:
        """Samples in the shard."""
        return (self.entry or self.head).num_samples

    @property
    def is_plain_tar(self) -> bool:
        """Whether this is a plain tar, or a part of one, whose index is a file of its own."""
        return bool(self.entry and self.entry.index_url)

    def prefix_stop(self, scan: Scan) -> int:
        """Return the bytes that a read at this scan transfers.

        Raises:
            ScanUnavailable: The scan is not in 1..N.
            TypeError: The scan is neither an integer nor ``"full"``.
        """
        return self._stop(self.entry or self.head, scan)

    def _stop(self, known: ShardEntry | Head, scan: Scan) -> int:
        with naming(self.url):
            return known.prefix_stop(scan)

    def samples(
        self,
        scan: Scan = FULL,
        *,
        on_error: OnError | None = None,
    ) -> Samples:
        """Read the prefix of a scan and yield its samples in order.

        Args:
            scan: As for :meth:`load`.
            on_error: As for :meth:`Prefix.samples`.

        Raises:
            PCRError: See :meth:`load` and :meth:`Prefix.samples`.
        """
        yield from self.load(scan).samples(on_error=on_error)

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Samples:
        """Yield all samples at full fidelity with one read, instead of one per ``__getitem__``."""
        return self.samples()

    def sample(self, row: int | str, scan: Scan = FULL) -> Sample:
        """Return one sample; reads a whole prefix. For many, use :meth:`load`.

        Args:
            row: Position of the sample, which may be negative, or its key.
            scan: As for :meth:`load`.

        Raises:
            IndexError, KeyError: There is no such position or key.
            TypeError: ``row`` is neither an integer nor a string.
            PCRError: The prefix cannot be read, or the sample is damaged.
        """
        prefix = self.load(scan)
        keys = prefix.index.keys
        if isinstance(row, str):
            if row not in keys:
                raise KeyError(row)
            row = keys.index(row)
        if not -len(keys) <= operator.index(row) < len(keys):
            raise IndexError(f"expected a position of {len(keys)} samples, got {row}")
        return prefix.sample(row % len(keys))

    __getitem__ = sample

    def load(
        self,
        scan: Scan = FULL,
        *,
        cancel: Cancel = None,
        known: Buffer = b"",
        rows: Rows = None,
    ) -> Prefix:
        """Read the prefix of a scan.

        Reads exactly ``[0, prefix_stop(scan))``, and with a cache only the missing bytes. If they
        fit into a part, this takes one request with a dataset index and two without. Verifies the
        checksum of every image. Damaged bytes from a remote store or a cache are fetched once more,
        because the transfer is more often at fault than the store.

        Args:
            scan: Highest scan to read, 1-based; ``"full"`` also restores metadata; 0 reads labels
                and other fields without pixels.
            cancel: Set by another thread to end a remote read.
            known: First bytes of the shard, which are not read again.
            rows: (n,) positions of the samples that are needed, by default all. The others are not
                read if this is a plain tar, unless they are asked for.

        Returns:
            The prefix in memory. Its samples raise CorruptPiece for damaged images.

        Raises:
            ScanUnavailable, NotAShard, UnsupportedVersion, CorruptIndex, TruncatedShard,
            StorageError: The shard cannot be read.
            TypeError: The scan is neither an integer nor ``"full"``.
        """
        if self.cache is None and storage.is_local(self.url):
            return self._load_once(scan, cancel, known, rows)
        try:
            prefix = self._load_once(scan, cancel, known, rows)
            if not prefix.damaged:
                return prefix
        except FormatError as error:
            log.warning("%s; fetching it once more", error)
        self._forget()
        prefix = self._load_once(scan, cancel, b"", rows)
        if prefix.damaged:
            self._forget()  # the next load fetches it again
        return prefix

    def change_scan(self, prefix: Prefix, scan: Scan) -> Prefix:
        """Turn a prefix into that of another scan; reads only the missing bytes, in one request.

        Args:
            prefix: A prefix of this shard; do not use it afterwards.
            scan: As for :meth:`load`, which also lists the errors.
        """
        if prefix.holds(scan):
            return prefix.at(scan)
        known = b"" if prefix.damaged else prefix.buffer.data
        return self.load(scan, known=known)

    def _load_once(self, scan: Scan, cancel: Cancel, known: Buffer, rows: Rows) -> Prefix:
        if self.entry is None and not known:
            # Read each time: the file may have been replaced since.
            known = self._read(HEAD_STOP, cancel=cancel).data
        about = self.entry or ShardEntry.of_head("", self._read_head(known))
        # A command may write something else each time.
        content = "" if self.url.startswith(PIPE) else f"{about.head_crc32c:08x}"
        stop = self._stop(about, scan)
        if about.index_url:  # the rest is in another file
            stop = about.index_stop
        buffer = self._read(stop, content, known=known[:stop], cancel=cancel)
        head = self._read_head(buffer.data)
        index = decode_index(head, buffer.data[HEAD_STOP : head.body_stop], url=self.url)
        if self.schema not in (None, index.schema):
            raise CorruptIndex(
                f"the shard's fields are not those of the dataset: expected {self.schema}, got "
                f"{index.schema}",
                url=self.url,
            )
        if not about.index_url or scan != FULL:
            return Prefix(self, index, buffer, scan)
        return self._load_members(index, buffer, rows, content, cancel)

    def load_rows(self, prefix: Prefix, rows: NDArray[np.int64]) -> Prefix:
        """Read some samples of a plain tar whose index is in memory, not through the cache.

        Args:
            prefix: A prefix of this shard at any scan.
            rows: (n,) positions of the samples.

        Raises:
            TruncatedShard, StorageError: The tar cannot be read, or is not the one of the index.
        """
        start = prefix.buffer[: prefix.index.head.index_stop]
        found = self._load_members(prefix.index, start, rows)
        if found.damaged and not storage.is_local(self.url):
            found = self._load_members(prefix.index, start, rows)
        return found

    def _load_members(
        self,
        index: ShardIndex,
        start: NDArray[np.uint8],
        rows: Rows,
        content: str = "",
        cancel: Cancel = None,
    ) -> Prefix:
        """Read the members of a plain tar; ``start`` is the file of its index."""
        extents = find_extents(index, rows)
        check_end(self.url, index, extents)
        with mapped_errors(self.url, f"read {extents.num_bytes} bytes"):
            buffer = borrow_array(len(start) + extents.num_bytes)
        buffer[: len(start)] = start
        fetch = partial(read_extents, self.url, index, extents, options=self.store, cancel=cancel)
        self._fill(buffer, content and content + extents.identity, fetch, len(start), cancel)
        return Prefix(self, index, buffer, FULL, extents)

    def _read(
        self,
        stop: int,
        content: str = "",
        *,
        known: Buffer = b"",
        cancel: Cancel = None,
    ) -> NDArray[np.uint8]:
        """Read ``[0, stop)``; ``known`` is the first part.

        Args:
            stop: Bytes to read.
            content: Identity of the content, to read through the cache; empty to read the store.
            known: The first bytes.
            cancel: Set by another thread to end a remote read.
        """
        url = (self.entry and self.entry.index_url) or self.url
        buffer = storage.allocate(url, 0, stop)
        buffer.data[: len(known)] = known
        fetch: Fetch = partial(storage.read_into, url, options=self.store, cancel=cancel)
        self._fill(buffer, content, fetch, len(known), cancel)
        return buffer

    def _fill(
        self,
        buffer: NDArray[np.uint8],
        content: str,
        fetch: Fetch,
        start: int,
        cancel: Cancel,
    ) -> None:
        """Fill memory from ``start`` on, through the cache if there is one and an identity."""
        if self.cache is None or not content:
            fetch(start, buffer.data[start:])
            return
        self._cached.add(content)
        self.cache.read(self.url, content, buffer.data, fetch, start=start, cancel=cancel)

    def _forget(self) -> None:
        for content in self._cached:
            if self.cache is not None:
                self.cache.forget(self.url, content)

    def _read_head(self, start: Buffer) -> Head:
        head = read_head(start, url=self.url)
        if self.entry is None:
            return head
        if not self.entry.describes(head):
            raise CorruptIndex(
                f"the shard is not the one that {DATASET_INDEX} describes: it was replaced, "
                "or the index is old",
                url=self.url,
            )
        return head
