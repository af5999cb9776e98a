"""The journal of an encoding run, stored next to its shards, from which the run can resume.

Each task saves its result as a file of the folder ``encode-parts``, so nothing is lost with the
process that started it. The end of the run replaces these files by ``encode-journal.json``.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from .. import storage
from ..checksum import crc32c
from ..errors import EncodeError, PCRError, StorageError
from ..format.dataset_index import DATASET_INDEX, ShardEntry
from ..format.names import shard_name
from ..format.shard_format import FieldNames
from ..storage.locks import hold_lock
from ..storage.stores import mapped_errors
from .samples import StorageOptions
from .shard_plan import EncodeOptions, Plan

JOURNAL = "encode-journal.json"
LOCK = ".encode.lock"
SKIPPED = "skipped.jsonl"
KEPT = "kept.jsonl"
PARTS = "encode-parts"
Part = tuple[int, int]


class Unlayered(NamedTuple):
    """A file that is not stored as its own progressive scans, and the reason.

    ``outcome`` is ``skipped``, ``kept`` or ``reencoded``.
    """

    key: str
    source: str
    reason: str
    outcome: str

    @property
    def report(self) -> str:
        """Name of the report that lists this file."""
        return SKIPPED if self.outcome == "skipped" else KEPT


class ShardResult(NamedTuple):
    """The result of a shard task; ``entry`` is ``None`` if every sample was skipped.

    ``num_classes`` is the highest label + 1 in the shard, and ``on_error`` says what was asked to
    be done with files that cannot be layered.
    """

    entry: ShardEntry | None
    unlayered: tuple[Unlayered, ...]
    num_classes: int = 0
    on_error: str = ""


Results = dict[int, ShardResult]


class Saved(msgspec.Struct):
    """The content of a journal file: the results of one shard or of all."""

    fingerprint: str
    shards: Results
    options: EncodeOptions = EncodeOptions()
    quality: float = 0.0

    @property
    def unlayered(self) -> list[Unlayered]:
        """The files that are not stored as their own scans, in the order of the shards."""
        return [row for result in self.shards.values() for row in result.unlayered]

    def write(self, url: str, options: StorageOptions) -> None:
        """Write a journal file."""
        with storage.atomic_write(url, options=options) as file:
            # Not msgspec's encoder: file names may have bytes that are not UTF-8.
            file.write(json.dumps(msgspec.to_builtins(self)).encode())


def read_journal(dst: str, *, options: StorageOptions = None) -> Saved:
    """Return what a dataset's journal says; without one, nothing and the default options.

    Args:
        dst: The dataset's folder.
        options: fsspec storage options of the folder.

    Raises:
        EncodeError: The journal is damaged.
        StorageError: It cannot be read.
    """
    return _read(storage.join(dst, JOURNAL), options) or Saved("", {})


def _read(url: str, options: StorageOptions) -> Saved | None:
    """Return the content of a journal file, ``None`` if it does not exist."""
    try:
        data = storage.read_bytes(url, options=options)
        return msgspec.convert(json.loads(data), Saved, str_keys=True)
    except StorageError:
        if storage.exists(url, options=options):
            raise
        return None
    except (ValueError, RecursionError) as error:
        message = f"not a journal: {error}; remove it to start over"
        raise EncodeError(message, url=url) from error


class Run(NamedTuple):
    """What all tasks of a run share; picklable.

    Attributes:
        dst: Folder of the shards.
        options: How they are encoded.
        names: The fields of all shards.
        fingerprint: The fingerprint of the plan.
        src_options: fsspec storage options of the source.
        dst_options: fsspec storage options of the folder.
        permit: A file that holds the token for as long as the run is active.
        token: The token.
    """

    dst: str
    options: EncodeOptions
    names: FieldNames
    fingerprint: str
    src_options: StorageOptions
    dst_options: StorageOptions
    permit: str
    token: str

    def check(self) -> None:
        """Raise :class:`EncodeError` if the run has ended, or another one has taken over."""
        there = storage.exists(self.permit, options=self.dst_options)
        token = storage.read_bytes(self.permit, options=self.dst_options) if there else b""
        if token != self.token.encode():
            raise EncodeError(
                "the run that requested this shard has ended, or another encode is writing to "
                "this folder",
                url=self.dst,
            )

    def save(self, number: int, result: ShardResult) -> None:
        """Save the result of a task, from which an interrupted run can resume."""
        url = storage.join(self.dst, f"{PARTS}/{number:06d}.json")
        Saved(self.fingerprint, {number: result}).write(url, self.dst_options)


class Journal:
    """A record of the shards written so far, stored in the destination so that a run can resume.

    Args:
        dst: Folder of the shards.
        plan: The source and the options. A journal with a different fingerprint is rejected, and a
            shard whose bad files were handled by a different ``on_error`` is encoded again.
        src_options: fsspec storage options of the source.
        dst_options: fsspec storage options of the folder.
        part: (I, N), or ``None`` for a run over all shards.

    Attributes:
        plan: The shards of all parts.
        numbers: The numbers of the shards that this part writes.
        results: The complete shards by number.
        run: What the tasks need.
    """

    def __init__(
        self,
        dst: str,
        plan: Plan,
        src_options: StorageOptions = None,
        dst_options: StorageOptions = None,
        part: Part | None = None,
    ) -> None:
        first, step = part or (0, 1)
        if not 0 <= first < step:
            raise EncodeError(f"expected a part I/N with I from 0 to N-1, got {first}/{step}")
        self.plan = plan
        self.numbers = range(first, len(plan.shards), step)
        self.results: Results = {}
        self._is_part = part is not None
        # In the names of temporary files, which are cleaned up if this process is killed.
        self._name = f"{first}-of-{step}"
        self.run = Run(
            dst,
            plan.options,
            plan.names,
            plan.fingerprint,
            src_options,
            dst_options,
            storage.join(dst, f".pcrshard-run-{self._name}.tmp"),
            secrets.token_hex(8),
        )

    @contextlib.contextmanager
    def open(self, resume: bool) -> Iterator[None]:
        """Adopt the complete shards of an earlier run, and permit tasks to write the others.

        Until the end of the block no other run may write to the folder, except other parts. Object
        stores have no locks; there, the tasks of the earlier run fail when they start.

        Raises:
            EncodeError: Another run is writing to the folder, or has written there and ``resume``
                is false or the runs do not match.
        """
        run = self.run
        storage.make_folder(run.dst, options=run.dst_options)
        own = f".pcrshard-lock-{self._name}.tmp"
        with self._lock(LOCK, shared=self._is_part), self._lock(own):
            self._take_over(resume)
            with storage.atomic_write(run.permit, options=run.dst_options, durable=False) as file:
                file.write(run.token.encode())
            try:
                yield
            finally:
                self.revoke()

    def revoke(self) -> None:
        """Revoke the permit, so that tasks that have not started fail without writing."""
        with contextlib.suppress(StorageError):
            storage.remove(self.run.permit, options=self.run.dst_options)

    @contextlib.contextmanager
    def _lock(self, name: str, *, shared: bool = False, wait: bool = False) -> Iterator[None]:
        """Hold a lock of the folder; the file of an exclusive one is removed afterwards."""
        if not storage.is_local(self.run.dst):
            yield
            return
        path = os.path.join(self.run.dst, name)
        with contextlib.ExitStack() as stack:
            with mapped_errors(path, "write", (OSError,)):
                held = stack.enter_context(hold_lock(path, shared=shared, wait=wait))
            if held is None:
                raise EncodeError(
                    "another encode, of the same part or of the whole dataset, is writing to "
                    f"{self.run.dst}: wait for it, or use another folder"
                )
            if not shared:
                stack.callback(Path(path).unlink, missing_ok=True)
            yield

    def _take_over(self, resume: bool) -> None:
        dst, options = self.run.dst, self.run.dst_options
        found = self._read()
        mine = {n: each for saved in found for n, each in saved.shards.items() if n in self.numbers}
        has_index = storage.exists(storage.join(dst, DATASET_INDEX), options=options)
        if not resume and (has_index or mine):
            raise EncodeError("already holds a dataset: use --resume, or another folder", url=dst)
        if has_index and not found:
            raise EncodeError(
                f"holds a dataset that --resume cannot continue: it has no {JOURNAL}", url=dst
            )
        fingerprint = self.run.fingerprint
        if any(saved.shards and saved.fingerprint != fingerprint for saved in found):
            raise EncodeError(
                "the source or the options differ from those of the run in this folder, "
                "which --resume would continue",
                url=dst,
            )
        if not self._is_part:
            storage.remove_temporary_files(dst)
        self.results = {n: result for n, result in mine.items() if self._is_kept(result)}
        name = self.run.options.name
        names = {shard_name(name, n) for n in self.numbers if n not in self.results}
        if not (resume and found) and (others := sorted(names & self._sizes(dst).keys())):
            raise EncodeError(
                f"already holds {others[0]}, which another run has written: use another folder",
                url=dst,
            )
        # A run that is killed while it writes its first shards can resume, too.
        start = storage.join(dst, f"{PARTS}/start.json")
        Saved(fingerprint, {}).write(start, options)

    def _sizes(self, folder: str) -> dict[str, int | None]:
        """Return a folder's files with their sizes; object stores have no empty folders."""
        try:
            return dict(storage.list_files(folder, options=self.run.dst_options))
        except StorageError:
            if storage.is_folder(folder, options=self.run.dst_options):
                raise
            return {}

    def _read(self) -> list[Saved]:
        """Return every file of the journal, later ones last."""
        parts = storage.join(self.run.dst, PARTS)
        urls = [storage.join(parts, n) for n in self._sizes(parts) if n.endswith(".json")]
        # Another part may merge and remove the files meanwhile. It writes the merged file first, so
        # reading that one last misses nothing.
        urls.append(storage.join(self.run.dst, JOURNAL))
        found = [_read(url, self.run.dst_options) for url in urls]
        return [saved for saved in reversed(found) if saved is not None]

    def _is_kept(self, result: ShardResult) -> bool:
        """Return whether a shard is complete and handled bad files as the options now ask."""
        if result.unlayered and result.on_error != self.run.options.on_error:
            return False
        entry = result.entry
        if entry is None:
            return True
        url = storage.join(self.run.dst, entry.name)
        try:
            data = storage.read_bytes(
                url, options=self.run.dst_options, max_bytes=entry.shard_bytes
            )
        except PCRError:
            return False
        return crc32c(data) == entry.shard_crc32c

    @contextlib.contextmanager
    def finishing(self) -> Iterator[Results]:
        """Yield the shards that all parts have written, in order; one process at a time."""
        with self._lock(f"{LOCK}-finish", wait=True):
            yield dict(sorted((self.written() | self.results).items()))

    def written(self) -> Results:
        """Return the journaled shards whose size is right; their writers checked the content."""
        sizes = self._sizes(self.run.dst)
        found = {n: result for saved in self._read() for n, result in saved.shards.items()}
        return {n: result for n, result in found.items() if _is_there(result.entry, sizes)}

    def unite(self, results: Results) -> None:
        """Save the results of all parts in one file and remove the files of the tasks."""
        dst, options = self.run.dst, self.run.dst_options
        whole = Saved(self.run.fingerprint, results, self.run.options, self.plan.quality)
        whole.write(storage.join(dst, JOURNAL), options)
        storage.remove_temporary_files(dst)
        for name in (PARTS, LOCK) if self._is_part else (PARTS,):
            with contextlib.suppress(StorageError):
                storage.remove(storage.join(dst, name), options=options)


def _is_there(entry: ShardEntry | None, sizes: dict[str, int | None]) -> bool:
    """Return whether a shard has its size, if the store reports sizes."""
    return entry is None or sizes.get(entry.name, -1) in (entry.shard_bytes, None)
