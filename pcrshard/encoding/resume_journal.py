"""The journal of an encoding run, stored next to its shards, from which the run can resume.

Each task saves its result as a file of the folder ``encode-parts``, so nothing is lost with the
process that started it. The end of the run replaces these files by ``encode-journal.json``.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from .. import storage
from ..errors import EncodeError, StorageError
from ..format.levels import Levels
from ..format.scan_script import ScanScript
from .samples import StorageOptions, Unlayered
from .shard_plan import EncodeOptions
from .shard_writer import WrittenShard

JOURNAL = "encode-journal.json"
SKIPPED = "skipped.jsonl"
KEPT = "kept.jsonl"
PARTS = "encode-parts"
# A run's first journal file.
START = "start"
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


def number_of(name: str) -> int | None:
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
    for name in (f"{PARTS}/{START}.json", JOURNAL):
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


class Journal(NamedTuple):
    """The journal files of a dataset's folder.

    Attributes:
        dst: Folder of the shards.
        options: fsspec storage options of the folder.
    """

    dst: str
    options: StorageOptions

    def _files(self) -> dict[str, int | None]:
        """Return the folder's files with their sizes."""
        try:
            listed = storage.list_files(self.dst, options=self.options)
            return {file.name: file.size for file in listed}
        except StorageError:
            # An empty folder of an object store does not exist.
            if storage.exists(self.dst, options=self.options):
                raise
            return {}

    def read(self, numbers: range | None = None) -> tuple[dict[str, int | None], set[str], Results]:
        """Return the folder's files with their sizes, and what those of the journal say.

        Files of single shards are read if they are among ``numbers``.
        """
        files = self._files()
        # Another part may merge and remove the files meanwhile. It writes the merged file first, so
        # reading that one last misses nothing.
        names = [name for name in files if name.startswith(PARTS) and name.endswith(".json")]
        names.append(JOURNAL)
        wanted = [
            name
            for name in names
            if numbers is None or (number := number_of(name)) is None or number in numbers
        ]

        def read(name: str) -> Saved | None:
            return _read(storage.join(self.dst, name), self.options)

        with ThreadPoolExecutor(READS) as threads:
            found = list(threads.map(read, wanted))
        # The files of the tasks are newer.
        saved = [each for each in reversed(found) if each is not None]
        results = {n: result for each in saved for n, result in each.shards.items()}
        return files, {each.fingerprint for each in saved}, results

    def finished(self) -> set[int]:
        """Return the shards that the journal has, by the names of its files: one list, one read."""
        numbers = {number_of(name) for name in self._files() if name.startswith(PARTS)}
        merged = _read(storage.join(self.dst, JOURNAL), self.options)
        found = numbers.union(merged.shards if merged else ())
        return {number for number in found if number is not None}

    def written(self) -> Results:
        """Return the results of all parts whose shards have the right size, in order."""
        files, _, results = self.read()

        def is_there(written: WrittenShard) -> bool:
            # Some stores do not report sizes.
            return files.get(written.entry.name, -1) in (written.entry.shard_bytes, None)

        return {
            number: result
            for number, result in sorted(results.items())
            if result.written is None or is_there(result.written)
        }
