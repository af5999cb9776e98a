"""What an encoding run has finished, kept beside the shards so that it can go on where it stopped; and who may write there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from .. import storage
from ..checksum import crc32c
from ..errors import EncodeError, PCRError, StorageError
from ..format.dataset_index import DATASET_INDEX, ShardEntry

JOURNAL = "encode-journal.json"
SKIPPED = "skipped.jsonl"
PARTS = "encode-parts"
LOCK = ".encode.lock"
Part = tuple[int, int]
_SECONDS_PER_SAVE = 1.0
# Bytes of the lock file: part I locks byte I, a whole run all bytes, and whoever writes the dataset index this one.
_FINISHING = 1 << 40
_log = logging.getLogger("pcrshard")


class Skipped(NamedTuple):
    """An image that was left out, and why."""

    key: str
    source: str
    reason: str


class ShardResult(NamedTuple):
    """What came of a task; no entry if every sample was skipped."""

    entry: ShardEntry | None
    skipped: tuple[Skipped, ...]


Results = dict[int, ShardResult]


class Journal:
    """Which shards are written; kept in the destination, so that a run can go on where it stopped.

    A run over all shards keeps ``encode-journal.json``; part I of N keeps ``encode-parts/I-of-N.json``, until all are united.
    """

    def __init__(
        self,
        dst: str,
        fingerprint: str,
        on_error: str,
        options: storage.Options | None,
        part: Part | None = None,
    ) -> None:
        self.dst, self.fingerprint, self.on_error, self.options, self.part = (
            dst,
            fingerprint,
            on_error,
            options,
            part,
        )
        self.whole_url, self.parts_url = storage.join(dst, JOURNAL), storage.join(dst, PARTS)
        self.url = (
            self.whole_url
            if part is None
            else storage.join(self.parts_url, f"{part[0]}-of-{part[1]}.json")
        )
        self.results: Results = {}
        self._run = secrets.token_hex(8)
        self._saved = 0.0
        self._goes_on = False
        self._lock = _Lock(dst if storage.is_local(dst) else None)

    @contextlib.contextmanager
    def open(self, resume: bool) -> Iterator[None]:
        """Take over the whole shards of an earlier run, or make sure there was none; alone in the folder until the end of the block.

        Raises:
            EncodeError: Another run is writing there, or has written and this one may not go on with it.
        """
        storage.make_folder(self.dst, options=self.options)
        with self._lock.held(*((0, 0) if self.part is None else (self.part[0], 1))):
            self._take_over(resume)
            yield

    def _take_over(self, resume: bool) -> None:
        found = self._read_all()
        has_index = storage.exists(storage.join(self.dst, DATASET_INDEX), options=self.options)
        mine = {
            url: known
            for url, known in found.items()
            if self.part is None or url in (self.url, self.whole_url)
        }
        used = [url for url, known in mine.items() if known[1]]
        if not resume and (used or has_index):
            which = used[0].removeprefix(self.dst).lstrip("/") if used else DATASET_INDEX
            raise EncodeError(
                f"{self.dst} already holds a dataset ({which}): use --resume, or another folder"
            )
        if has_index and not found:
            raise EncodeError(
                f"{self.dst} holds a dataset that --resume cannot go on with: it has no {JOURNAL}"
            )
        if any(known[1] and known[0] != self.fingerprint for known in found.values()):
            raise EncodeError(
                "the source or the options differ from the run that is there, and that --resume would go on with",
                url=self.dst,
            )
        self._goes_on = resume and bool(mine)
        self._check_parts(list(found))
        if self.part is None:
            storage.remove_temporary_files(self.dst, options=self.options)
        results = {number: result for _, known in mine.values() for number, result in known.items()}
        if self.part is not None:
            results = {
                number: result
                for number, result in results.items()
                if number % self.part[1] == self.part[0]
            }
        self.results = {
            number: result for number, result in results.items() if self._is_kept(result)
        }

    def begin(self, names: list[str]) -> None:
        """Put on record that these shards will be written.

        Raises:
            EncodeError: One of them is there, and this does not go on with a run that may have written it.
        """
        if not self._goes_on:
            # An object store has no folder before it has something in it.
            made = storage.is_folder(self.dst, options=self.options)
            there = (
                [name for name, _ in storage.list_files(self.dst, options=self.options)]
                if made
                else []
            )
            if found := sorted(set(there).intersection(names)):
                raise EncodeError(
                    f"{self.dst} already holds {found[0]}, of no run that this goes on with: use another folder"
                )
        self.save()

    def _check_parts(self, urls: list[str]) -> None:
        counts = {
            int(match[1]) for url in urls if (match := re.search(r"/\d+-of-(\d+)\.json$", url))
        }
        if self.part is not None and counts - {self.part[1]}:
            raise EncodeError(
                f"expected parts of {min(counts)}, as those that are there, got part {self.part[0]}/{self.part[1]}"
            )

    def _read_all(self) -> dict[str, tuple[str, Results]]:
        """Fingerprint and results of every journal in the folder, by URL."""
        for last in (False, True):
            urls = [self.whole_url] if storage.exists(self.whole_url, options=self.options) else []
            try:
                if storage.exists(self.parts_url, options=self.options):
                    files = storage.list_files(self.parts_url, options=self.options)
                    urls += [
                        storage.join(self.parts_url, name)
                        for name, _ in files
                        if name.endswith(".json")
                    ]
                return {url: self._read(url) for url in urls}
            except StorageError:
                # Another part has found all shards done, and united the journals meanwhile.
                if last:
                    raise
        raise AssertionError

    def _read(self, url: str) -> tuple[str, Results]:
        try:
            raw = json.loads(storage.read_bytes(url, options=self.options))
            fingerprint = str(raw["fingerprint"])
            results = {
                int(number): _result_from_json(result) for number, result in raw["shards"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EncodeError(
                f"not a journal: {error}; remove it to start anew", url=url
            ) from error
        return fingerprint, results

    def _is_kept(self, result: ShardResult) -> bool:
        """Whether a shard need not be made again: every byte is there, and nothing was skipped that is to raise now."""
        entry = result.entry
        if result.skipped and self.on_error == "raise":
            return False
        if entry is None:
            return True
        url = storage.join(self.dst, entry.name)
        try:
            with storage.open_range(url, 0, entry.shard_bytes, options=self.options) as view:
                whole = crc32c(view) == entry.shard_crc32c
            return whole and storage.file_bytes(url, options=self.options) == entry.shard_bytes
        except PCRError:
            return False

    def add(self, number: int, result: ShardResult) -> None:
        """Note a written shard; the file is saved at most once a second."""
        self.results[number] = result
        if time.monotonic() - self._saved > _SECONDS_PER_SAVE:
            self.save()

    def save(self) -> None:
        """Save; where there are no locks, make sure that no other run has taken over.

        Raises:
            EncodeError: One has.
        """
        if not self._lock.path and self._saved and self._owner() != self._run:
            raise EncodeError(
                "another encode is writing to this folder; wait for it, then use --resume",
                url=self.dst,
            )
        self._write(self.url, self.results)
        self._saved = time.monotonic()

    def _owner(self) -> str | None:
        raw = json.loads(storage.read_bytes(self.url, options=self.options))
        return str(raw.get("run"))

    def _write(self, url: str, results: Results) -> None:
        shards = {str(number): result for number, result in sorted(results.items())}
        with storage.atomic_write(url, options=self.options) as file:
            file.write(
                json.dumps(
                    {"fingerprint": self.fingerprint, "run": self._run, "shards": shards}
                ).encode()
            )

    @contextlib.contextmanager
    def finishing(self) -> Iterator[Results]:
        """What this part and all others have written; one process at a time."""
        if self.part is None:
            yield self.results
            return
        with self._lock.finishing():
            found: Results = {}
            for _, results in self._read_all().values():
                found |= {
                    number: result for number, result in results.items() if self._is_there(result)
                }
            yield found | self.results

    def _is_there(self, result: ShardResult) -> bool:
        """Whether another part's shard has its size; that part has checked the rest."""
        if result.entry is None:
            return True
        url = storage.join(self.dst, result.entry.name)
        return (
            storage.exists(url, options=self.options)
            and storage.file_bytes(url, options=self.options) == result.entry.shard_bytes
        )

    def unite(self, results: Results) -> None:
        """Save the results of all parts in one journal."""
        if self.part is not None:
            self._write(self.whole_url, results)

    def clean_up(self) -> None:
        """Remove the parts' journals, and what killed workers and parts left; all are done."""
        storage.remove_temporary_files(self.dst, options=self.options)
        with contextlib.suppress(StorageError):
            if storage.exists(self.parts_url, options=self.options):
                storage.remove(self.parts_url, options=self.options)
        self._lock.remove()


class _Lock:
    """Of a local folder, by POSIX record locks: they end with the process, workers that it forked do not hold them, and NFS, Lustre and GPFS know them."""

    _taken: set[str] = set()  # noqa: RUF012  # of all objects: record locks do not keep a process from itself

    def __init__(self, folder: str | None) -> None:
        self.path = None if folder is None else os.path.join(os.path.realpath(folder), LOCK)
        self._handle = -1

    @contextlib.contextmanager
    def held(self, start: int, length: int) -> Iterator[None]:
        """Hold a range of bytes; length 0 means all."""
        if self.path is None:
            yield
            return
        name = f"{self.path} {start} {length}"
        if name in self._taken:
            raise _busy(self.path, length)
        self._open(start, length)
        self._taken.add(name)
        try:
            yield
        finally:
            self._taken.discard(name)
            if length == 0:
                self.remove()
            os.close(self._handle)

    def _open(self, start: int, length: int) -> None:
        assert self.path is not None
        while True:
            try:
                self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise StorageError(
                    f"cannot write: {type(error).__name__}: {error}", url=self.path
                ) from error
            try:
                fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    os.close(self._handle)
                    raise _busy(self.path, length) from error
                _log.warning(
                    "%s: this file system has no locks; let no other encode write there", self.path
                )
                return
            with contextlib.suppress(FileNotFoundError):
                # By name: to open the file once more and close it would end the lock.
                if os.path.samestat(os.fstat(self._handle), os.stat(self.path)):
                    return
            os.close(self._handle)

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Wait until no other part looks whether all is done."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._handle, fcntl.LOCK_EX, 1, _FINISHING)
        try:
            yield
        finally:
            if self.path is not None:
                with contextlib.suppress(OSError):
                    fcntl.lockf(self._handle, fcntl.LOCK_UN, 1, _FINISHING)

    def remove(self) -> None:
        """Remove the file; whoever has opened it looks for it again once it has the lock."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def _busy(path: str, length: int) -> EncodeError:
    who = "this part, or one without parts," if length else "or a part of one"
    return EncodeError(
        f"another encode, {who} is writing to {os.path.dirname(path)}: wait for it, or use another folder"
    )


def read_skipped(dst: str, *, options: storage.Options | None = None) -> list[Skipped]:
    """The images that ``--on-error skip`` left out of a dataset, with the reasons."""
    url = storage.join(dst, SKIPPED)
    if not storage.exists(url, options=options):
        return []
    return [
        Skipped(**json.loads(line))
        for line in storage.read_bytes(url, options=options).splitlines()
    ]


def _result_from_json(raw: Any) -> ShardResult:
    entry, skipped = raw
    if entry is not None:
        entry = ShardEntry(*entry)
        entry = entry._replace(prefix_stops=tuple(entry.prefix_stops))
    return ShardResult(entry, tuple(Skipped(*row) for row in skipped))
