"""The journal of an encoding run, stored next to its shards, from which the run can resume.

Each task saves its result as a file of the folder ``encode-parts``, so nothing is lost with the
process that started it. The end of the run replaces these files by ``encode-journal.json``.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

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
_GRACE_SECONDS = 1.0
Part = tuple[int, int]
# Outcomes a kept shard may contain, per current `on_error`.
_ALLOWED = {
    "raise": frozenset[str](),
    "skip": frozenset({"skipped"}),
    "keep": frozenset({"kept"}),
    "reencode": frozenset({"reencoded", "skipped"}),
}


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
    options: EncodeOptions = EncodeOptions()

    def write(self, url: str, options: storage.Options) -> None:
        with storage.atomic_write(url, options=options) as file:
            # Not msgspec's encoder: file names may have bytes that are not UTF-8.
            file.write(json.dumps(msgspec.to_builtins(self)).encode())

    @classmethod
    def read(cls, url: str, options: storage.Options) -> list[_Saved]:
        """Return the content of a file, or nothing if it does not exist."""
        data = _read_if_exists(url, options)
        try:
            return [] if data is None else [msgspec.convert(json.loads(data), cls, str_keys=True)]
        except (ValueError, RecursionError) as error:
            message = f"not a journal: {error}; remove it to start over"
            raise EncodeError(message, url=url) from error


def _read_if_exists(url: str, options: storage.Options) -> bytes | None:
    try:
        return storage.read_bytes(url, options=options)
    except StorageError:
        if storage.exists(url, options=options):
            raise
        return None


class Record(NamedTuple):
    """The data that a task needs to take part in a run.

    Attributes:
        url: The file to which the task saves its result.
        permit: A file that holds the token for as long as the run is active.
        token: The token.
        number: The number of its shard.
        fingerprint: The fingerprint of the plan.
    """

    url: str
    permit: str
    token: str
    number: int
    fingerprint: str

    def check(self, options: storage.Options) -> None:
        """Raise :class:`EncodeError` if the run has ended, or another one has taken over."""
        there = storage.exists(self.permit, options=options)
        if not there or storage.read_bytes(self.permit, options=options) != self.token.encode():
            raise EncodeError(
                "the run that requested this shard has ended, or another encode is writing to "
                "this folder",
                url=self.url,
            )

    def save(self, result: ShardResult, options: storage.Options) -> None:
        """Save the result, from which an interrupted run can resume."""
        _Saved(self.fingerprint, {self.number: result}).write(self.url, options)


class Journal:
    """A record of the shards written so far, stored in the destination so that a run can resume.

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
        self._name = "" if part is None else f"-{part[0]}-of-{part[1]}"
        self._whole = storage.join(dst, JOURNAL)
        self._parts = storage.join(dst, PARTS)
        # Named like a temporary file, so that it is cleaned up if this process is killed.
        self._permit = storage.join(dst, f".pcrshard-run{self._name}.tmp")
        self._token = secrets.token_hex(8)
        self._resumes = False

    @contextlib.contextmanager
    def open(self, resume: bool) -> Iterator[None]:
        """Adopt the complete shards of an earlier run, or check that there was none.

        Until the end of the block no other run may write to the folder, except other parts. Object
        stores have no locks; there, the tasks of the earlier run fail when they start.

        Raises:
            EncodeError: Another run is writing to the folder, or has written there and ``resume``
                is false or the runs do not match.
        """
        storage.make_folder(self.dst, options=self.options)
        with self._lock(LOCK, shared=self.part is not None), contextlib.ExitStack() as stack:
            if self.part is not None:
                stack.enter_context(self._lock(LOCK + self._name))
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
        found = self._read()
        shards = {n: result for saved in found for n, result in saved.shards.items()}
        mine = {number: result for number, result in shards.items() if self.is_mine(number)}
        index_url = storage.join(self.dst, DATASET_INDEX)
        has_index = storage.exists(index_url, options=self.options)
        if not resume and (has_index or mine):
            raise EncodeError(
                "already holds a dataset: use --resume, or another folder", url=self.dst
            )
        if has_index and not found:
            raise EncodeError(
                f"holds a dataset that --resume cannot continue: it has no {JOURNAL}",
                url=self.dst,
            )
        fingerprint = self.plan.fingerprint
        if any(saved.shards and saved.fingerprint != fingerprint for saved in found):
            raise EncodeError(
                "the source or the options differ from those of the run in this folder, "
                "which --resume would continue",
                url=self.dst,
            )
        self._resumes = resume and bool(found)
        if self.part is None:
            storage.remove_temporary_files(self.dst)
        sizes = self._sizes()
        self.results = {n: result for n, result in mine.items() if self._is_kept(result, sizes)}

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
        start = _Saved(self.plan.fingerprint, {}, self.plan.options)
        start.write(storage.join(self._parts, "start.json"), self.options)
        with storage.atomic_write(self._permit, options=self.options, durable=False) as file:
            file.write(self._token.encode())

    def record(self, number: int) -> Record:
        """Return what the task of a shard needs."""
        return Record(
            storage.join(self._parts, f"{number:06d}.json"),
            self._permit,
            self._token,
            number,
            self.plan.fingerprint,
        )

    def end(self) -> None:
        """Revoke the permit, so that tasks that have not started fail without writing."""
        with contextlib.suppress(StorageError):
            storage.remove(self._permit, options=self.options)

    def _sizes(self, folder: str = "") -> dict[str, int | None]:
        """Return a folder's files with their sizes; object stores have no empty folders."""
        folder = folder or self.dst
        try:
            return dict(storage.list_files(folder, options=self.options))
        except StorageError:
            if storage.is_folder(folder, options=self.options):
                raise
            return {}

    def _read(self) -> list[_Saved]:
        """Return every file of the journal, later ones last."""
        names = [name for name in self._sizes(self._parts) if name.endswith(".json")]
        found: list[_Saved] = []
        # Another part may merge and remove the files meanwhile. It writes the merged file first, so
        # reading that one last misses nothing.
        for url in [*(storage.join(self._parts, name) for name in names), self._whole]:
            found += _Saved.read(url, self.options)
        return found[::-1]

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
            for saved in self._read()
            for number, result in saved.shards.items()
            if _is_there(result, sizes)
        }

    def unite(self, results: Results) -> None:
        """Save the results of all parts in one file and remove the files of the tasks."""
        ordered = dict(sorted(results.items()))
        whole = _Saved(self.plan.fingerprint, ordered, self.plan.options)
        whole.write(self._whole, self.options)
        storage.remove_temporary_files(self.dst)
        with contextlib.suppress(StorageError):
            storage.remove(self._parts, options=self.options)
        self._unlock_for_good(LOCK)


def _is_there(result: ShardResult, sizes: dict[str, int | None]) -> bool:
    """Return whether a shard exists with its expected size, if the store reports sizes."""
    entry = result.entry
    return entry is None or sizes.get(entry.name, -1) in (entry.shard_bytes, None)


def encode_options(dst: str, *, options: storage.Options = None) -> EncodeOptions:
    """Return the options that a dataset was encoded with, the defaults if it has no journal.

    Args:
        dst: The dataset's folder.
        options: fsspec storage options of the folder.
    """
    found = _Saved.read(storage.join(dst, JOURNAL), options)
    return found[0].options if found else EncodeOptions()


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
    lines = (_read_if_exists(storage.join(dst, name), options) or b"").splitlines()
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
