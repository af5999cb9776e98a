"""Read a shard: plan the prefix (pure), read it in one request, ungroup it into samples."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import threading
from collections.abc import Iterator
from typing import Any

from .. import memory, storage
from ..errors import CorruptIndex, FormatError, NotAShard, ScanUnavailable, TruncatedShard
from ..format.dataset_index import DATASET_INDEX, ShardEntry
from ..format.scan import FULL, Scan, check_scan
from ..format.shard_index import (
    BLOCK,
    HEAD_STOP,
    Buffer,
    Head,
    ShardIndex,
    decode_head,
    decode_index,
)
from ..native import scatter
from ..storage.retry import Retry
from .joined import JoinedSamples, read_images
from .prefix import Decode, OnError, Prefix, Sample, Select
from .prefix_cache import PrefixCache

log = logging.getLogger(__name__)
_RETRY = Retry()


class Shard:
    """One shard, read at any scan.

    Nothing is read until it is needed. The index is kept; pieces are not.

    Args:
        url: Local path, any fsspec URL, or ``pipe:COMMAND``.
        entry: The shard's entry in the dataset index; with it a prefix is one request, without it two.
        check: Whether to compare each piece with its CRC-32C.
        storage_options: fsspec storage options.
        retry: What to do about a bad network.
        cache: Where prefixes are kept on local disk.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        entry: ShardEntry | None = None,
        check: bool = True,
        storage_options: storage.Options | None = None,
        retry: Retry | None = None,
        cache: PrefixCache | None = None,
    ) -> None:
        self.url = os.fspath(url)
        self.entry = entry
        self.check = check
        self.cache = cache
        self._how: dict[str, Any] = {"options": storage_options, "retry": retry or _RETRY}

    def __repr__(self) -> str:
        return f"Shard({self.url!r})"

    @functools.cached_property
    def head(self) -> Head:
        """The head; one request of 1024 bytes."""
        with storage.open_range(self.url, 0, HEAD_STOP, **self._how) as view:
            return self._decode_head(view)

    @functools.cached_property
    def index(self) -> ShardIndex:
        """The index; one request beside that for the head."""
        stop = HEAD_STOP + self.head.body_bytes
        with storage.open_range(self.url, HEAD_STOP, stop, **self._how) as view:
            return decode_index(self.head, view, url=self.url)

    @property
    def num_samples(self) -> int:
        """Samples in the shard."""
        return self.entry.num_samples if self.entry else self.head.num_samples

    @property
    def num_groups(self) -> int:
        """Scan groups N: the highest scan."""
        return self.entry.num_groups if self.entry else self.head.num_groups

    def prefix_stop(self, scan: Scan) -> int:
        """Bytes that a read at this scan moves.

        Raises:
            ScanUnavailable: The scan is not in 1..N.
        """
        try:
            return self.entry.prefix_stop(scan) if self.entry else self.head.prefix_stop(scan)
        except ScanUnavailable as error:
            raise ScanUnavailable(str(error), url=self.url) from error

    def samples(
        self,
        scan: Scan = FULL,
        *,
        select: Select | None = None,
        on_error: OnError | None = None,
        decode: Decode | None = None,
    ) -> Iterator[Sample]:
        """Read the prefix of a scan and yield its samples in order; see :meth:`load` and :meth:`Prefix.samples`."""
        if decode is None:
            with self.load_samples(scan) as loaded:
                yield from loaded.samples(select=select, on_error=on_error)
        else:
            with self.load(scan) as prefix:
                yield from prefix.samples(select=select, on_error=on_error, decode=decode)

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[Sample]:
        """All samples at full fidelity, by one read; without this, ``for`` would read the prefix anew for each."""
        return self.samples()

    def __getitem__(self, row: int | str) -> Sample:
        """A sample at full fidelity, by position or key; reads the shard's prefix. See :meth:`sample`."""
        return self.sample(row)

    def sample(self, row: int | str, scan: Scan = FULL) -> Sample:
        """One sample, by position or key; reads one prefix. Many are cheaper through :meth:`load`.

        Raises:
            IndexError, KeyError: There is no such position or key.
            TypeError: It is neither, such as a slice.
        """
        row = row if isinstance(row, str) else operator.index(row)
        if not isinstance(row, str) and not -self.num_samples <= row < self.num_samples:
            raise IndexError(f"expected a position of {self.num_samples} samples, got {row}")
        with self.load(scan) as prefix:
            if not isinstance(row, str):
                return prefix.sample(row % self.num_samples)
            if row not in prefix.index.keys:
                raise KeyError(row)
            return prefix.sample(prefix.index.keys.index(row))

    def load(self, scan: Scan = FULL, *, cancel: threading.Event | None = None) -> Prefix:
        """Read the prefix of a scan.

        Exactly ``[0, prefix_stop(scan))`` is read, in one request with a dataset index, in two without; less with a cache. What comes damaged from a
        remote store or a cache is fetched once more, because it is more often the way that damages than the store.

        Args:
            scan: 1..N; ``"full"`` also restores metadata.
            cancel: Ends a remote read from another thread.

        Returns:
            The prefix in memory; close it, or use it in a ``with`` statement.

        Raises:
            ScanUnavailable, NotAShard, UnsupportedVersion, CorruptIndex, TruncatedShard, StorageError: The shard cannot be read.
        """
        if not self.check or (self.cache is None and storage.is_local(self.url)):
            return self._load(scan, cancel)
        try:
            prefix = self._load(scan, cancel)
            if prefix.is_sound():
                return prefix
            prefix.close()
        except TruncatedShard:
            self._forget()  # a head that was read before may be that of a longer file
            raise
        except FormatError as error:
            log.warning("%s; fetching it once more", error)
        self._forget()
        prefix = self._load(scan, cancel)
        if not prefix.is_sound():
            self._forget(head=False)
        return prefix

    def load_samples(
        self, scan: Scan = FULL, *, cancel: threading.Event | None = None
    ) -> Prefix | JoinedSamples:
        """Read what gives all samples of a scan as bytes; of a local file without a buffer in between.

        See :meth:`load` for arguments, cost and errors.
        """
        path = storage.local_path(self.url) if scatter.available and self.cache is None else None
        if path is None:
            return self.load(scan, cancel=cancel)
        if self.entry:
            self.prefix_stop(scan)
        with storage.open_local(path, url=self.url) as file:
            self.__dict__["head"] = self._decode_head(file.read(0, HEAD_STOP))
            file.check_range(0, self.prefix_stop(scan))
            self.__dict__["index"] = decode_index(
                self.head, file.read(HEAD_STOP, HEAD_STOP + self.head.body_bytes), url=self.url
            )
            return JoinedSamples(self, scan, read_images(file, self.index, scan, check=self.check))

    def change_scan(self, prefix: Prefix, scan: Scan) -> Prefix:
        """Turn a prefix into that of another scan; only what is missing is read, in one request.

        Args:
            prefix: Of this shard; not to be used afterwards.
            scan: As for :meth:`load`, which says what may be raised.
        """
        if prefix.scan == scan:
            return prefix
        with contextlib.ExitStack() as on_error:
            on_error.callback(prefix.close)
            changed = self._change_scan(prefix, scan)
            if changed.resources is prefix.resources:
                on_error.pop_all()
            return changed

    def _change_scan(self, prefix: Prefix, scan: Scan) -> Prefix:
        stop, have = self.prefix_stop(scan), prefix.base + len(prefix.view)
        if stop <= have:
            return Prefix(
                self, prefix.view, prefix.base, scan, prefix.resources, check=prefix.checks_at(scan)
            )
        if self.cache is not None:
            return self.load(scan)
        with contextlib.ExitStack() as stack:
            view = stack.enter_context(memory.borrow(stop - prefix.base))
            view[: len(prefix.view)] = prefix.view
            storage.read_into(self.url, have, view[len(prefix.view) :], **self._how)
            changed = Prefix(self, view, prefix.base, scan, stack.pop_all())
        if self.check and not storage.is_local(self.url) and not changed.is_sound():
            changed.close()
            return self.load(scan)
        return changed

    def _load(self, scan: Scan, cancel: threading.Event | None) -> Prefix:
        start = 0 if self.entry or self.cache else HEAD_STOP
        with contextlib.ExitStack() as stack:
            view = stack.enter_context(self._open(start, scan, cancel))
            if start == 0:
                self.__dict__["head"] = self._decode_head(view[:HEAD_STOP])
            body = view[HEAD_STOP - start :][: self.head.body_bytes]
            self.__dict__["index"] = decode_index(self.head, body, url=self.url)
            return Prefix(self, view, start, scan, stack.pop_all())

    @functools.cached_property
    def _identity(self) -> str:
        """What the cache knows this content by; without a dataset index one request."""
        if self.entry:
            return f"{self.entry.head_crc32c:08x} {self.entry.shard_bytes} {self.entry.shard_crc32c:08x}"
        return storage.identity(self.url, options=self._how["options"])

    def _open(
        self, start: int, scan: Scan, cancel: threading.Event | None
    ) -> contextlib.AbstractContextManager[memoryview]:
        """The bytes from ``start`` to the prefix stop, through the cache if there is one."""
        cache = self.cache
        if cache is None:
            return storage.open_range(
                self.url, start, self.prefix_stop(scan), cancel=cancel, **self._how
            )
        if self.entry:
            self.entry.prefix_stop(scan)  # a staged copy may not have it
        known = (
            self.entry.prefix_stops if self.entry else cache.known_stops(self.url, self._identity)
        )
        stops = known or self.head.prefix_stops
        stop = stops[check_scan(scan, len(stops) - 1) - 1]

        def fetch(start: int, view: memoryview) -> None:
            storage.read_into(self.url, start, view, cancel=cancel, **self._how)

        return cache.open_prefix(self.url, self._identity, stops, stop, fetch, cancel)

    def _forget(self, *, head: bool = True) -> None:
        """Drop what may be damaged."""
        if self.cache is not None:
            self.cache.forget(self.url, self._identity)
        if head:
            for name in ("head", "index", "_identity"):
                self.__dict__.pop(name, None)

    def _decode_head(self, view: Buffer) -> Head:
        if bytes(view[257:262]) != b"ustar":
            raise NotAShard("expected a PCR shard, got something that is not a tar", url=self.url)
        head = decode_head(view[BLOCK:HEAD_STOP], url=self.url)
        crc = int.from_bytes(view[BLOCK + 8 : BLOCK + 12], "little")
        known = self.entry
        if known and (crc, head.num_samples, head.prefix_stops) != (
            known.head_crc32c,
            known.num_samples,
            known.prefix_stops,
        ):
            raise CorruptIndex(
                f"the shard is not the one that {DATASET_INDEX} describes: it was replaced, or the index is old",
                url=self.url,
            )
        return head
