"""A run of ``encode``: which runs and tasks may write to a folder.

Four things keep runs apart:

- the *lock* of a local folder: one run at a time, or any number of parts of one run;
- the *permit*, a file with the run's token: tasks look at it before they write, so that those of a
  run that was killed, or overtaken where there are no locks, stop;
- the *fingerprint* of the plan in the journal: a run of another source or other options is refused;
- the *sources* and ``on_error`` of a shard's result: a shard that they do not match is made again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .. import storage
from ..checksum import crc32c
from ..errors import EncodeError, PCRError, StorageError
from ..format.dataset_index import DATASET_INDEX
from ..format.names import shard_name
from ..format.schema import Schema
from ..storage.locks import hold_lock
from ..storage.stores import mapped_errors
from .resume_journal import (
    PARTS,
    START,
    Journal,
    Results,
    Saved,
    ShardResult,
    already_holds,
    number_of,
)
from .samples import StorageOptions
from .shard_plan import EncodeOptions, Plan

LOCK = ".encode.lock"
# (I, N): every N-th shard from the I-th on.
Part = tuple[int, int]


class Run(NamedTuple):
    """A run of ``encode``, or a part of one; picklable, because all tasks share it.

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
    def journal(self) -> Journal:
        """What says which shards are complete."""
        return Journal(self.dst, self.dst_options)

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

    def save(self, number: int, result: ShardResult) -> None:
        """Save the result of a shard, from which an interrupted run can resume."""
        self._save(f"{number:06d}", {number: result})

    def _save(self, name: str, results: Results) -> None:
        url = storage.join(self.dst, f"{PARTS}/{name}.json")
        Saved(self.fingerprint, results, self.options).write(url, self.dst_options)

    @contextlib.contextmanager
    def open(self, numbers: range, *, resume: bool) -> Iterator[Results]:
        """Let tasks write the shards with these numbers; yield the results of earlier runs.

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
        files, fingerprints, results = self.journal.read(numbers)
        names = {DATASET_INDEX, *(shard_name(self.options.name, number) for number in numbers)}
        held = sorted(names & files.keys())
        if held and not (resume and fingerprints):
            raise already_holds(held[0], self.dst, resume=resume)
        others = any(name.startswith(PARTS) and number_of(name) is not None for name in files)
        if (results or others) and fingerprints != {self.fingerprint}:
            raise EncodeError(
                "the source or the options differ from those of the run in this folder, "
                "which --resume would continue",
                url=self.dst,
            )
        if self.part == (0, 1):
            storage.remove_temporary_files(self.dst)
        # A run that is killed while it writes its first shards can resume, too.
        self._save(START, {})
        return {number: results[number] for number in numbers if number in results}

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
