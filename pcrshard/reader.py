"""Read a shard: plan the prefix (pure), read it in one request, ungroup it into samples."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from . import buffers, native, storage
from .cache import PrefixCache
from .dataset_index import DATASET_INDEX, DatasetIndex, ShardEntry
from .errors import CorruptIndex, CorruptPiece, FormatError, NotAShard, PCRError, ScanUnavailable, TruncatedShard
from .index import BLOCK, FULL, HEAD_STOP, U32, Head, Scan, ShardIndex, check_scan, crc32c, decode_head, decode_index
from .jpeg import join_pieces
from .markers import EOI
from .retry import Retry

Sample = dict[str, Any]
Select = Callable[[str, str], bool]
OnError = Callable[[PCRError], bool]
Decode = Callable[[list[memoryview]], Any]
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
        url: str,
        *,
        entry: ShardEntry | None = None,
        check: bool = True,
        storage_options: storage.Options | None = None,
        retry: Retry | None = None,
        cache: PrefixCache | None = None,
    ) -> None:
        self.url = url
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
        """
        if not isinstance(row, str) and not -self.num_samples <= row < self.num_samples:
            raise IndexError(f"expected a position of {self.num_samples} samples, got {row}")
        with self.load(scan) as prefix:
            if not isinstance(row, str):
                return prefix.sample(int(row) % self.num_samples)
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
            return Prefix(self, prefix.view, prefix.base, scan, prefix.resources, check=prefix.checks_at(scan))
        if self.cache is not None:
            return self.load(scan)
        with contextlib.ExitStack() as stack:
            view = stack.enter_context(buffers.borrow(stop - prefix.base))
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

    def _open(self, start: int, scan: Scan, cancel: threading.Event | None) -> contextlib.AbstractContextManager[memoryview]:
        """The bytes from ``start`` to the prefix stop, through the cache if there is one."""
        cache = self.cache
        if cache is None:
            return storage.open_range(self.url, start, self.prefix_stop(scan), cancel=cancel, **self._how)
        if self.entry:
            self.entry.prefix_stop(scan)  # a staged copy may not have it
        known = self.entry.prefix_stops if self.entry else cache.known_stops(self.url, self._identity)
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

    def _decode_head(self, view: memoryview) -> Head:
        if bytes(view[257:262]) != b"ustar":
            raise NotAShard("expected a PCR shard, got something that is not a tar", url=self.url)
        head = decode_head(view[BLOCK:HEAD_STOP], url=self.url)
        crc = int.from_bytes(view[BLOCK + 8 : BLOCK + 12], "little")
        known = self.entry
        if known and (crc, head.num_samples, head.prefix_stops) != (known.head_crc32c, known.num_samples, known.prefix_stops):
            raise CorruptIndex(
                f"the shard is not the one that {DATASET_INDEX} describes: it was replaced, or the index is old", url=self.url
            )
        return head


class Prefix:
    """The bytes of a prefix in memory, and where the pieces are in them; from :meth:`Shard.load`.

    Attributes:
        index: The shard's index.
        scan: What was loaded.
        num_bytes: What is held in memory until :meth:`close`.
        check: Whether a sample is compared with its checksum when it is used: not after :meth:`is_sound` said yes.
    """

    def __init__(
        self,
        shard: Shard,
        view: memoryview,
        base: int,
        scan: Scan,
        resources: contextlib.ExitStack,
        *,
        check: bool | None = None,
    ) -> None:
        index = shard.index
        rows = check_scan(scan, index.num_groups)
        self.shard, self.view, self.base, self.index = shard, view, base, index
        self.scan, self.resources = scan, resources
        self._lower: dict[Scan, Prefix] = {}
        self.num_bytes, self.close = len(view), resources.close
        self.check = shard.check if check is None else check
        self.streams = tuple(field for field, _ in index.schema.streams)
        self.num_scans = min(rows, index.num_groups)
        self._starts = (index.starts(scan) - base).reshape(rows, -1).T
        self._sizes = index.sizes[:rows].reshape(rows, -1).T
        self._crcs = index.crcs[self.num_scans - 1].ravel()

    # Plain lists, sample by sample: indexing numpy arrays one element at a time costs more than the checksums.
    @functools.cached_property
    def starts(self) -> list[list[int]]:
        """Where the pieces of each image begin in the view."""
        found: list[list[int]] = self._starts.tolist()
        return found

    @functools.cached_property
    def stops(self) -> list[list[int]]:
        """Where they end."""
        found: list[list[int]] = (self._starts + self._sizes).tolist()
        return found

    @functools.cached_property
    def crcs(self) -> list[int]:
        """CRC-32C of the scans of each image."""
        found: list[int] = self._crcs.tolist()
        return found

    @functools.cached_property
    def table(self) -> native.Table:
        """Where the scans of each image are in memory, for the native core; valid until :meth:`close`."""
        return native.piece_table(self.view, self._starts[:, : self.num_scans], self._sizes[:, : self.num_scans])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def at(self, scan: Scan) -> Prefix:
        """The same bytes at this or a lower scan; valid as long as this prefix is not closed.

        Raises:
            ScanUnavailable: The scan is higher.
        """
        if scan == self.scan:
            return self
        if self.index.head.prefix_stop(scan) > self.base + len(self.view):
            raise ScanUnavailable(f"asked for scan {scan} of a prefix of scan {self.scan}", url=self.shard.url)
        if scan not in self._lower:
            self._lower[scan] = Prefix(self.shard, self.view, self.base, scan, contextlib.ExitStack(), check=self.checks_at(scan))
        return self._lower[scan]

    def checks_at(self, scan: Scan) -> bool:
        """Whether samples of these bytes at another scan have to be checked: what was found sound is so at lower scans, not at higher ones."""
        head = self.index.head
        return self.check if head.prefix_stop(scan) <= head.prefix_stop(self.scan) else self.shard.check

    def is_sound(self) -> bool:
        """Whether every piece has its checksum; those that were found sound are not checked again."""
        n = self.num_scans
        sound = self._have_crcs(slice(0, n), self._crcs) and self._have_crcs(slice(n, None), self.index.crcs[-1].ravel())
        if sound:
            self.check = False
        return sound

    def _have_crcs(self, rows: slice, crcs: U32) -> bool:
        """Whether these pieces of each image, if there are any, together have its checksum."""
        if not self._starts[:, rows].size:
            return True
        if native.available:
            return native.all_sound(native.piece_table(self.view, self._starts[:, rows], self._sizes[:, rows]), crcs)
        return all(functools.reduce(_extend_crc, self._pieces(unit)[rows], 0) == crc for unit, crc in enumerate(crcs.tolist()))

    def samples(
        self,
        rows: Iterable[int] | None = None,
        *,
        select: Select | None = None,
        on_error: OnError | None = None,
        decode: Decode | None = None,
    ) -> Iterator[Sample]:
        """The samples of the shard.

        Args:
            rows: Which, and in which order; all in order by default.
            select: Called with (key, field); False leaves the field out.
            on_error: Called with the error of a damaged sample; True goes on with the next sample. By default it is raised.
            decode: Called with the pieces of an image, which are valid only during the call; its result takes the place of the bytes.
                ``functools.partial(ImageDecoder(224, "random"), rng=rng)`` decodes without joining them.

        Yields:
            ``__key__``, image fields as complete JPEGs, other fields as stored, all bytes.

        Raises:
            CorruptPiece: A sample is damaged; names its key and scan.
        """
        for row in range(len(self.index.keys)) if rows is None else rows:
            try:
                sample = self.sample(row, select=select, decode=decode)
            except PCRError as error:
                if on_error is None or not on_error(error):
                    raise
                continue
            yield sample

    def sample(self, row: int, *, select: Select | None = None, decode: Decode | None = None) -> Sample:
        """One sample; see :meth:`samples`."""
        key = self.index.keys[row]
        sample: Sample = {"__key__": key}
        unit = row * len(self.streams)
        for m, field in enumerate(self.streams, unit):
            if self.starts[m][0] < self.stops[m][0] and (select is None or select(key, field)):
                sample[field] = self._decoded(m, key, decode) if decode else self._jpeg(m, key)
        for field, values in self.index.fields.items():
            value = values[row]
            if value is not None and (select is None or select(key, field)):
                sample[field] = value
        return sample

    def _pieces(self, unit: int) -> list[memoryview]:
        return [self.view[a:b] for a, b in zip(self.starts[unit], self.stops[unit], strict=True)]

    def _tail_crc(self, unit: int) -> int:
        return int(self.index.crcs[-1].flat[unit])

    def _decoded(self, unit: int, key: str, decode: Decode) -> Any:
        """The result of the caller's decoder on the scattered pieces."""
        pieces = self._pieces(unit)[: self.num_scans]
        if self.check and functools.reduce(_extend_crc, pieces, 0) != self.crcs[unit]:
            self._refuse(unit, key)
        try:
            return decode(pieces)
        except PCRError as error:
            raise type(error)(str(error), url=self.shard.url, key=key) from error

    def _jpeg(self, unit: int, key: str) -> bytes:
        pieces: list[memoryview | bytes] = list(self._pieces(unit))
        tail = bytes(pieces.pop()) if len(pieces) > self.num_scans else b""
        pieces.append(EOI)
        jpeg = b"".join(pieces)
        # Checked after the join, when the bytes are in the processor's cache, and once for all scans; EOI runs on from the checksum.
        if self.check and crc32c(jpeg) != crc32c(EOI, self.crcs[unit]):
            self._refuse(unit, key)
        if not tail:
            return jpeg
        if self.check and crc32c(tail) != self._tail_crc(unit):
            self._refuse(unit, key)
        return join_pieces(pieces[:-1], tail)

    def _refuse(self, unit: int, key: str) -> None:
        """Name the first scan whose bytes are not those that were written."""
        pieces = self._pieces(unit)
        expected = [int(row.flat[unit]) for row in self.index.crcs]
        got = list(itertools.accumulate(pieces[: self.num_scans], _extend_crc, initial=0))[1:]
        bad = next((i for i, crc in enumerate(got) if crc != expected[i]), None)
        row, crc = (bad, got[bad]) if bad is not None else (-1, crc32c(pieces[-1]))
        raise CorruptPiece(
            f"expected CRC-32C {expected[row]:08x}, got {crc:08x} for {len(pieces[row])} bytes",
            url=self.shard.url,
            key=key,
            scan="tail" if bad is None else bad + 1,
            offset=self.starts[unit][row] + self.base,
        )


def _extend_crc(crc: int, piece: memoryview) -> int:
    return crc32c(piece, crc)


def open_dataset(url: str, *, storage_options: storage.Options | None = None) -> tuple[DatasetIndex, list[str]]:
    """Read a dataset index.

    Args:
        url: The folder, or its ``pcr.json``.
        storage_options: fsspec storage options.

    Returns:
        The index, and the URL of each shard in its order. One request.
    """
    folder = url.removesuffix(DATASET_INDEX).rstrip("/") or "."
    path = storage.join(folder, DATASET_INDEX)
    index = DatasetIndex.decode(storage.read_bytes(path, options=storage_options), url=path)
    return index, [storage.join(folder, shard.name) for shard in index.shards]
