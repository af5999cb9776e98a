"""The journal of an encoding run, stored next to its shards, from which the run can resume."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from .. import storage
from ..checksum import crc32c
from ..errors import EncodeError, PCRError, StorageError
from ..format.dataset_index import DATASET_INDEX, ShardEntry
from ..redaction import redact, redact_url
from ..storage.locks import hold_lock
from .shard_plan import EncodeOptions, Plan

JOURNAL = "encode-journal.json"
LOCK = ".encode.lock"
SKIPPED = "skipped.jsonl"
KEPT = "kept.jsonl"
REPORTS = (SKIPPED, KEPT)
PARTS = "encode-parts"
SECONDS_PER_SAVE = 1.0
_GRACE_SECONDS = 1.0
Part = tuple[int, int]
# Outcomes a kept shard may contain, per current `on_error`.
_ALLOWED = {
    "raise": frozenset[str](),
    "skip": frozenset({"skipped"}),
    "keep": frozenset({"kept"}),
    "reencode": frozenset({"reencoded", "skipped"}),
}
# Options that determine how a source is listed, besides the class names, which are in pcr.json.
_LISTING = ("prefix_keys", "split", "lists", "on_error", "reencode_quality")


class Unlayered(NamedTuple):
    """A file that is not stored as its own progressive scans, and the reason.

    ``outcome`` is ``skipped``, ``kept`` or ``reencoded``.
    """

    key: str
    source: str
    reason: str
    outcome: str = "skipped"

    @classmethod
    def of(
        cls,
        key: str,
        source: str,
        reason: str,
        outcome: str = "skipped",
    ) -> Unlayered:
        """Return a record with secrets of URLs redacted, because it is written to a file."""
        return cls(key, redact_url(source), redact(reason, source), outcome)

    @property
    def report(self) -> str:
        """Name of the report that lists this file."""
        return SKIPPED if self.outcome == "skipped" else KEPT


class ShardResult(NamedTuple):
    """The result of a shard task; ``entry`` is ``None`` if every sample was skipped.

    ``num_classes`` is the highest label + 1 in the shard.
    """

    entry: ShardEntry | None
    unlayered: tuple[Unlayered, ...]
    num_classes: int = 0


Results = dict[int, ShardResult]


class _Saved(msgspec.Struct):
    """The content of a journal file."""

    fingerprint: str
    shards: Results
    run: str = ""
    listing: dict[str, Any] = {}  # msgspec copies it


class Journal:
    """A record of the shards written so far, stored in the destination so that a run can resume.

    A run over all shards writes ``encode-journal.json``. Part I of N writes
    ``encode-parts/I-of-N.json``; the last part merges these files.

    Args:
        dst: Folder of the shards.
        plan: The source and the options. A journal with a different fingerprint is rejected, and a
            shard whose bad files were handled by a different ``on_error`` is encoded again.
        options: fsspec storage options of the folder.
        part: (I, N), or ``None`` for a run over all shards.
    """

    def __init__(
        self,
        dst: str,
        plan: Plan,
        options: storage.Options,
        part: Part | None = None,
    ) -> None:
        if part is not None and not 0 <= part[0] < part[1]:
            raise EncodeError(f"expected a part I/N with I from 0 to N-1, got {part[0]}/{part[1]}")
        self.dst = dst
        self.plan = plan
        self.options = options
        self.part = part
        self.results: Results = {}
        self._name = "" if part is None else f"{part[0]}-of-{part[1]}"
        self._whole_url = storage.join(dst, JOURNAL)
        self._parts_url = storage.join(dst, PARTS)
        self._url = self._whole_url
        if part is not None:
            self._url = storage.join(self._parts_url, f"{self._name}.json")
        self._run = secrets.token_hex(8)
        # Named like a temporary file, so that it is cleaned up if this process is killed.
        self.permit = storage.join(dst, f".pcrshard-run-{self._run}.tmp")
        self._saved = 0.0
        self._resumes = False

    @contextlib.contextmanager
    def open(self, resume: bool) -> Iterator[None]:
        """Adopt the complete shards of an earlier run, or check that there was none.

        Until the end of the block no other run may write to the folder, except other parts. Object
        stores have no locks; there, the earlier run fails when it next saves.

        Raises:
            EncodeError: Another run is writing to the folder, or has written there and ``resume``
                is false or the runs do not match.
        """
        storage.make_folder(self.dst, options=self.options)
        with self._lock(LOCK, shared=self.part is not None), contextlib.ExitStack() as stack:
            if self.part is not None:
                stack.enter_context(self._lock(f"{LOCK}-{self._name}"))
            self._take_over(resume)
            yield

    @contextlib.contextmanager
    def _lock(self, name: str, *, shared: bool = False, wait: bool = False) -> Iterator[None]:
        if not storage.is_local(self.dst):
            yield
            return
        path = os.path.join(self.dst, name)
        with contextlib.ExitStack() as stack:
            # Workers of a killed run hold its lock until they notice, a moment later.
            end = time.monotonic() + _GRACE_SECONDS
            held = None
            while held is None:
                if time.monotonic() > end:
                    raise EncodeError(
                        "another encode, of the same part or of the whole dataset, is writing to "
                        f"{self.dst}: wait for it, or use another folder"
                    )
                try:
                    held = stack.enter_context(hold_lock(path, shared=shared, wait=wait))
                except OSError as error:
                    message = f"cannot write: {type(error).__name__}: {error}"
                    raise StorageError(message, url=path) from error
                if held is None:
                    time.sleep(0.05)
            try:
                yield
            finally:
                if not shared:
                    self._unlock_for_good(name)

    def _unlock_for_good(self, name: str) -> None:
        """Remove a lock file; a waiter that locks the unlinked file detects this and reopens it."""
        if storage.is_local(self.dst):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.dst, name))

    def _take_over(self, resume: bool) -> None:
        found = self._read_all()
        mine = [
            saved
            for url, saved in found.items()
            if self.part is None or url in (self._url, self._whole_url)
        ]
        index_url = storage.join(self.dst, DATASET_INDEX)
        has_index = storage.exists(index_url, options=self.options)
        if not resume and (has_index or any(saved.shards for saved in mine)):
            which = DATASET_INDEX if has_index else self._url.removeprefix(self.dst).lstrip("/")
            raise EncodeError(
                f"already holds a dataset ({which}): use --resume, or another folder", url=self.dst
            )
        if has_index and not found:
            raise EncodeError(
                f"holds a dataset that --resume cannot continue: it has no {JOURNAL}",
                url=self.dst,
            )
        fingerprint = self.plan.fingerprint
        if any(saved.shards and saved.fingerprint != fingerprint for saved in found.values()):
            raise EncodeError(
                "the source or the options differ from those of the run in this folder, "
                "which --resume would continue",
                url=self.dst,
            )
        self._resumes = resume and bool(mine)
        if self.part is None:
            storage.remove_temporary_files(self.dst)
        sizes = self._sizes()
        for saved in mine:
            for number, result in saved.shards.items():
                if self.is_mine(number) and self._is_kept(result, sizes):
                    self.results[number] = result

    def is_mine(self, number: int) -> bool:
        """Return whether this part writes the shard with this number."""
        return self.part is None or number % self.part[1] == self.part[0]

    def begin(self, names: Iterable[str]) -> None:
        """Record that these shards will be written, and permit tasks to write them.

        Raises:
            EncodeError: One of them exists and was not written by the run that this one resumes.
        """
        if not self._resumes and (found := sorted(self._sizes().keys() & {*names})):
            raise EncodeError(
                f"already holds {found[0]}, which another run has written: use another folder",
                url=self.dst,
            )
        self.save()
        with storage.atomic_write(self.permit, options=self.options, durable=False):
            pass

    def end(self) -> None:
        """Revoke the permit, so that tasks that have not started fail without writing."""
        with contextlib.suppress(StorageError):
            storage.remove(self.permit, options=self.options)

    def _sizes(self) -> dict[str, int | None]:
        """Return the folder's files with their sizes; object stores have no empty folders."""
        if not storage.is_folder(self.dst, options=self.options):
            return {}
        return dict(storage.list_files(self.dst, options=self.options))

    def _read_all(self) -> dict[str, _Saved]:
        """Return every journal in the folder by its URL."""
        try:
            return self._try_to_read_all()
        except StorageError:
            # Another part found all shards complete and merged the journals since the listing.
            return self._try_to_read_all()

    def _try_to_read_all(self) -> dict[str, _Saved]:
        urls = []
        if storage.exists(self._whole_url, options=self.options):
            urls.append(self._whole_url)
        if storage.exists(self._parts_url, options=self.options):
            files = storage.list_files(self._parts_url, options=self.options)
            names = [name for name, _ in files if name.endswith(".json")]
            urls += [storage.join(self._parts_url, name) for name in names]
        return {url: _read_journal(url, self.options) for url in urls}

    def _is_kept(self, result: ShardResult, sizes: dict[str, int | None]) -> bool:
        """Return whether a shard is complete and handled bad files as the options now ask."""
        if {row.outcome for row in result.unlayered} - _ALLOWED[self.plan.options.on_error]:
            return False
        if result.entry is None:
            return True
        if not _is_there(result, sizes):
            return False
        url = storage.join(self.dst, result.entry.name)
        try:
            data = storage.read(url, 0, result.entry.shard_bytes, options=self.options)
            return crc32c(data) == result.entry.shard_crc32c
        except PCRError:
            return False

    def add(self, number: int, result: ShardResult) -> None:
        """Record a written shard; the file is saved at most once per second."""
        self.results[number] = result
        if time.monotonic() - self._saved > SECONDS_PER_SAVE:
            self.save()

    def save(self) -> None:
        """Save the journal; where there are no locks, check that no other run has taken over.

        Raises:
            EncodeError: Another run has taken over.
        """
        is_unsure = self._saved and not storage.is_local(self.dst)
        if is_unsure and _read_journal(self._url, self.options).run != self._run:
            raise EncodeError(
                "another encode is writing to this folder; wait for it, then use --resume",
                url=self.dst,
            )
        self._write(self._url, self.results)
        self._saved = time.monotonic()

    def _write(self, url: str, results: Results) -> None:
        options = self.plan.options
        listing = {name: getattr(options, name) for name in _LISTING}
        saved = _Saved(self.plan.fingerprint, dict(sorted(results.items())), self._run, listing)
        with storage.atomic_write(url, options=self.options) as file:
            # Not msgspec's encoder: file names may have bytes that are not UTF-8.
            file.write(json.dumps(msgspec.to_builtins(saved)).encode())

    @contextlib.contextmanager
    def finishing(self) -> Iterator[Results]:
        """Yield the shards that all parts have written; one process at a time."""
        with self._lock(f"{LOCK}-finish", wait=True):
            yield self.written() | self.results

    def written(self) -> Results:
        """Return the journaled shards whose size is right; their writers checked the content."""
        sizes = self._sizes()
        return {
            number: result
            for saved in self._read_all().values()
            for number, result in saved.shards.items()
            if _is_there(result, sizes)
        }

    def unite(self, results: Results) -> None:
        """Save the results of all parts in one journal and remove the files of the parts."""
        if self.part is not None:
            self._write(self._whole_url, results)
        storage.remove_temporary_files(self.dst)
        with contextlib.suppress(StorageError):
            if storage.exists(self._parts_url, options=self.options):
                storage.remove(self._parts_url, options=self.options)
        self._unlock_for_good(LOCK)


def _is_there(result: ShardResult, sizes: dict[str, int | None]) -> bool:
    """Return whether a shard exists with its expected size, if the store reports sizes."""
    entry = result.entry
    return entry is None or sizes.get(entry.name, -1) in (entry.shard_bytes, None)


def _read_journal(url: str, options: storage.Options) -> _Saved:
    data = storage.read_bytes(url, options=options)
    try:
        return msgspec.convert(json.loads(data), _Saved, str_keys=True)
    except (ValueError, RecursionError) as error:
        raise EncodeError(f"not a journal: {error}; remove it to start over", url=url) from error


def listing_options(dst: str, *, options: storage.Options = None) -> EncodeOptions:
    """Return the options that determine how a dataset's source is listed, from its journal.

    Options that the journal lacks have their defaults.

    Args:
        dst: The dataset's folder.
        options: fsspec storage options of the folder.
    """
    url = storage.join(dst, JOURNAL)
    if not storage.exists(url, options=options):
        return EncodeOptions()
    listing = _read_journal(url, options).listing
    known = {name: value for name, value in listing.items() if name in _LISTING}
    lists = known.get("lists")
    return EncodeOptions(**known | {"lists": None if lists is None else tuple(lists)})


def read_report(
    dst: str,
    name: str,
    *,
    options: storage.Options | None = None,
) -> list[Unlayered]:
    """Return the files that an encode has skipped, stored unchanged or re-encoded, with reasons.

    Args:
        dst: The dataset's folder.
        name: ``skipped.jsonl`` or ``kept.jsonl``.
        options: fsspec storage options of the folder.
    """
    url = storage.join(dst, name)
    if not storage.exists(url, options=options):
        return []
    lines = storage.read_bytes(url, options=options).splitlines()
    return [Unlayered.of(**json.loads(line)) for line in lines]


def write_report(
    dst: str,
    name: str,
    rows: Iterable[Unlayered],
    *,
    options: storage.Options | None = None,
) -> None:
    """Write a report for :func:`read_report`, one JSON object per line."""
    with storage.atomic_write(storage.join(dst, name), options=options) as file:
        file.writelines(json.dumps(row._asdict()).encode() + b"\n" for row in rows)
