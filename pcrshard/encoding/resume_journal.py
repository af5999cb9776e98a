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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

from .. import storage
from ..checksum import crc32c
from ..errors import EncodeError, PCRError, StorageError
from ..format.dataset_index import DATASET_INDEX
from ..format.levels import Levels
from ..format.names import shard_name
from ..format.scan_script import ScanScript
from ..format.schema import Schema
from ..storage.locks import hold_lock
from ..storage.stores import mapped_errors
from .samples import StorageOptions, Unlayered
from .shard_plan import EncodeOptions, Plan
from .shard_writer import WrittenShard

JOURNAL = "encode-journal.json"
LOCK = ".encode.lock"
SKIPPED = "skipped.jsonl"
KEPT = "kept.jsonl"
PARTS = "encode-parts"
# A run's first journal file.
_START = "start"
Part = tuple[int, int]
# Files of a run read at a time.
READS = 16


def report_of(row: Unlayered) -> str:
    """Return the name of the report that lists a file."""
    return SKIPPED if row.outcome == "skipped" else KEPT


def already_holds(name: str, dst: str, *, resume: bool = False) -> EncodeError:
    """Return the error for a folder that another run has written to."""
    folder = "another folder" if resume else "--resume, or another folder"
    return EncodeError(f"already holds {name}: use {folder}", url=dst)


def scratch_of(dst: str) -> str | None:
    """Return the local folder where the parts of a run share files; ``None`` for a remote one."""
    return storage.join(dst, PARTS) if storage.is_local(dst) else None


class ShardResult(NamedTuple):
    """The result of a shard task.

    Attributes:
        written: The shard, ``None`` if every sample was skipped.
        unlayered: Files that are not stored as their own scans.
        num_classes: The highest label in the shard plus 1.
        on_error: The option that applied to files that cannot be layered.
        sources: What it was made from, see :func:`.shard_plan.sources_digest`.
    """

    written: WrittenShard | None
    unlayered: tuple[Unlayered, ...]
    num_classes: int
    on_error: str
    sources: str


Results = dict[int, ShardResult]


class Saved(msgspec.Struct):
    """The content of a journal file: the results of one shard or of all."""

    fingerprint: str
    shards: Results
    options: EncodeOptions = EncodeOptions()
    skipped: tuple[Unlayered, ...] = ()

    @property
    def unlayered(self) -> list[Unlayered]:
        """The files that are not stored as their own scans, in the order of the shards.

        Before them comes what was left out of the listing of the source.
        """
        found = [row for result in self.shards.values() for row in result.unlayered]
        return [*self.skipped, *found]

    def write(self, url: str, options: StorageOptions) -> None:
        """Write a journal file."""
        with storage.atomic_write(url, options=options) as file:
            # Not msgspec's encoder: file names may have bytes that are not UTF-8.
            file.write(json.dumps(msgspec.to_builtins(self)).encode())


def _number(name: str) -> int | None:
    """Return the number of the shard that a journal file is of, ``None`` for that of several."""
    stem = storage.file_name(name).removesuffix(".json")
    return int(stem) if stem.isdecimal() else None


# Journals are read by several threads: see the decoder of schemas, which explains the crash.
msgspec.json.Decoder(Saved)


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


def read_script(dst: str, *, options: StorageOptions = None) -> ScanScript | Levels | None:
    """Return what divides images into scan groups in an earlier run in a folder, or another part.

    Raises:
        EncodeError: The journal is damaged.
        StorageError: It cannot be read.
    """
    for name in (f"{PARTS}/{_START}.json", JOURNAL):
        found = _read(storage.join(dst, name), options)
        if found is not None and not found.options.fmt.is_open:
            return found.options.fmt.scan_script
    return None


def _read(url: str, options: StorageOptions) -> Saved | None:
    """Return the content of a journal file, ``None`` if it does not exist."""
    try:
        data = storage.read_bytes(url, options=options)
        return msgspec.convert(json.loads(data), Saved, str_keys=True)
    except StorageError as error:
        # Not by another request: a part that ends may write the file in between.
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    except (ValueError, RecursionError) as error:
        raise EncodeError(f"not a journal: {error}; remove it to start over", url=url) from error


class Run(NamedTuple):
    """A run of ``encode``, or a part of one; picklable, because all tasks share it.

    Its journal says which shards are complete, so that a run can resume. A journal with a different
    fingerprint is rejected, and a shard whose bad files were handled by a different ``on_error`` is
    encoded again.

    Attributes:
        dst: Folder of the shards.
        options: How they are encoded.
        schema: The schema of all shards.
        fingerprint: The fingerprint of the plan.
        src_options: fsspec storage options of the source.
        dst_options: fsspec storage options of the folder.
        part: (I, N); (0, 1) for a run over all shards.
        token: The content of the permit, a file that exists for as long as the run is active.
    """

    dst: str
    options: EncodeOptions
    schema: Schema
    fingerprint: str
    src_options: StorageOptions
    dst_options: StorageOptions
    part: Part
    token: str

    @property
    def _permit(self) -> str:
        # A temporary file, which is cleaned up if this process is killed.
        number, count = self.part
        return storage.join(self.dst, f".pcrshard-run-{number}-of-{count}.tmp")

    def check(self) -> None:
        """Raise :class:`EncodeError` if the run has ended, or another one has taken over."""
        there = storage.exists(self._permit, options=self.dst_options)
        token = storage.read_bytes(self._permit, options=self.dst_options) if there else b""
        if token != self.token.encode():
            raise EncodeError(
                "the run that requested this shard has ended, another encode is writing to this "
                "folder, or worker processes do not see it, as with memory://, which needs "
                "workers=1",
                url=self.dst,
            )

    def write(self, name: str, results: Results) -> None:
        """Save results, from which an interrupted run can resume, as a file of this name."""
        url = storage.join(self.dst, f"{PARTS}/{name}.json")
        Saved(self.fingerprint, results, self.options).write(url, self.dst_options)

    @contextlib.contextmanager
    def open(self, numbers: range, *, resume: bool) -> Iterator[Results]:
        """Permit tasks to write shards of these numbers; yield those that earlier runs finished.

        Until the end of the block no other run may write to the folder, except parts. If a part
        runs twice at once, or two runs share an object store, which has no locks, the tasks of the
        earlier run fail when they look at their permit.

        Raises:
            EncodeError: Another run is writing to the folder, or has written there and ``resume``
                is false or the runs do not match.
        """
        storage.make_folder(self.dst, options=self.dst_options)
        with self.lock(shared=self.part != (0, 1)):
            finished = self._take_over(numbers, resume)
            permit = storage.atomic_write(self._permit, options=self.dst_options, durable=False)
            with permit as file:
                file.write(self.token.encode())
            try:
                yield finished
            finally:
                self.revoke()

    def revoke(self) -> None:
        """Revoke the permit, unless another run has taken over, so that tasks do not write."""
        with contextlib.suppress(StorageError, EncodeError):
            self.check()
            storage.remove(self._permit, options=self.dst_options)

    @contextlib.contextmanager
    def lock(self, *, shared: bool = False, wait: bool = False) -> Iterator[None]:
        """Hold the lock of a local folder, whose file an exclusive holder removes afterwards."""
        if not storage.is_local(self.dst):
            yield
            return
        path = os.path.join(self.dst, LOCK)
        with contextlib.ExitStack() as stack:
            with mapped_errors(path, "write", (OSError,)):
                held = stack.enter_context(hold_lock(path, shared=shared, wait=wait))
            if held is None:
                raise EncodeError(
                    f"another encode is writing to {self.dst}: wait for it, or use another folder"
                )
            if not shared:
                stack.callback(Path(path).unlink, missing_ok=True)
            yield

    def _take_over(self, numbers: range, resume: bool) -> Results:
        files, fingerprints, results = self._read(numbers)
        names = {DATASET_INDEX, *(shard_name(self.options.name, number) for number in numbers)}
        held = sorted(names & files.keys())
        if held and not (resume and fingerprints):
            raise already_holds(held[0], self.dst, resume=resume)
        others = any(name.startswith(PARTS) and _number(name) is not None for name in files)
        if (results or others) and fingerprints != {self.fingerprint}:
            raise EncodeError(
                "the source or the options differ from those of the run in this folder, "
                "which --resume would continue",
                url=self.dst,
            )
        if self.part == (0, 1):
            storage.remove_temporary_files(self.dst)
        # A run that is killed while it writes its first shards can resume, too.
        self.write(_START, {})
        return {number: results[number] for number in numbers if number in results}

    def _list(self) -> dict[str, int | None]:
        """Return the folder's files with their sizes."""
        try:
            listed = storage.list_files(self.dst, options=self.dst_options)
            return {file.name: file.size for file in listed}
        except StorageError:
            # An empty folder of an object store does not exist.
            if storage.exists(self.dst, options=self.dst_options):
                raise
            return {}

    def _read(
        self, numbers: range | None = None
    ) -> tuple[dict[str, int | None], set[str], Results]:
        """Return the folder's files with their sizes, and what those of the journal say.

        Files of single shards are read if they are among ``numbers``.
        """
        files = self._list()
        # Another part may merge and remove the files meanwhile. It writes the merged file first, so
        # reading that one last misses nothing.
        names = [name for name in files if name.startswith(PARTS) and name.endswith(".json")]
        names.append(JOURNAL)
        wanted = [
            name
            for name in names
            if numbers is None or (number := _number(name)) is None or number in numbers
        ]

        def read(name: str) -> Saved | None:
            return _read(storage.join(self.dst, name), self.dst_options)

        with ThreadPoolExecutor(READS) as threads:
            found = list(threads.map(read, wanted))
        # The files of the tasks are newer.
        saved = [each for each in reversed(found) if each is not None]
        results = {n: result for each in saved for n, result in each.shards.items()}
        return files, {each.fingerprint for each in saved}, results

    def is_complete(self, result: ShardResult, sources: str) -> bool:
        """Return whether a shard is intact, of these sources, and of the option ``on_error``."""
        if result.sources != sources:
            return False
        if result.unlayered and result.on_error != self.options.on_error:
            return False
        if result.written is None:
            return True
        entry, file_crc32c, _ = result.written
        url = storage.join(self.dst, entry.name)
        try:
            data = storage.read_bytes(url, options=self.dst_options, max_bytes=entry.shard_bytes)
        except PCRError:
            return False
        return crc32c(data) == file_crc32c

    def finished(self) -> set[int]:
        """Return the shards that the journal has, by the names of its files: one list, one read."""
        numbers = {_number(name) for name in self._list() if name.startswith(PARTS)}
        merged = _read(storage.join(self.dst, JOURNAL), self.dst_options)
        found = numbers.union(merged.shards if merged else ())
        return {number for number in found if number is not None}

    def written(self) -> Results:
        """Return the results of all parts whose shards have the right size, in order."""
        files, _, results = self._read()

        def is_there(written: WrittenShard) -> bool:
            # Some stores do not report sizes.
            return files.get(written.entry.name, -1) in (written.entry.shard_bytes, None)

        return {
            number: result
            for number, result in sorted(results.items())
            if result.written is None or is_there(result.written)
        }


def new_run(
    dst: str,
    plan: Plan,
    src_options: StorageOptions = None,
    dst_options: StorageOptions = None,
    part: Part = (0, 1),
) -> Run:
    """Return a run that has not started."""
    return Run(
        dst,
        plan.options,
        plan.schema,
        plan.fingerprint,
        src_options,
        dst_options,
        part,
        token=secrets.token_hex(8),
    )
