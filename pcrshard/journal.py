"""What an encoding run has finished, kept beside the shards so that it can go on where it stopped."""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple

from . import storage
from .dataset_index import DATASET_INDEX, ShardEntry
from .errors import EncodeError, PCRError
from .index import crc32c

JOURNAL = "encode-journal.json"
SKIPPED = "skipped.jsonl"
_SECONDS_PER_SAVE = 1.0


class Skipped(NamedTuple):
    """An image that was left out, and why."""

    key: str
    source: str
    reason: str


class ShardResult(NamedTuple):
    """What came of a task; no entry if every sample was skipped."""

    entry: ShardEntry | None
    skipped: tuple[Skipped, ...]


class Journal:
    """Which shards are written; kept in the destination, so that a run can go on where it stopped."""

    def __init__(self, dst: str, fingerprint: str, on_error: str, options: storage.Options | None) -> None:
        self.dst, self.fingerprint, self.on_error, self.options = dst, fingerprint, on_error, options
        self.url = storage.join(dst, JOURNAL)
        self.results: dict[int, ShardResult] = {}
        self._saved = 0.0

    def open(self, resume: bool) -> None:
        """Take over the whole shards of an earlier run, or make sure there was none."""
        storage.make_folder(self.dst, options=self.options)
        used = [name for name in (JOURNAL, DATASET_INDEX) if storage.exists(storage.join(self.dst, name), options=self.options)]
        fingerprint, results = self._load() if JOURNAL in used else (self.fingerprint, {})
        if not resume and (results or DATASET_INDEX in used):
            raise EncodeError(f"{self.dst} already holds a dataset ({used[0]}): use --resume, or another folder")
        if DATASET_INDEX in used and JOURNAL not in used:
            raise EncodeError(f"{self.dst} holds a dataset that --resume cannot go on with: it has no {JOURNAL}")
        if results and fingerprint != self.fingerprint:
            raise EncodeError("the source or the options differ from the run that --resume would go on with", url=self.url)
        storage.remove_temporary_files(self.dst, options=self.options)
        self.results = {number: result for number, result in results.items() if self._is_kept(result)}

    def _load(self) -> tuple[str, dict[int, ShardResult]]:
        try:
            raw = json.loads(storage.read_bytes(self.url, options=self.options))
            fingerprint = str(raw["fingerprint"])
            results = {int(number): _result_from_json(result) for number, result in raw["shards"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EncodeError(f"not a journal: {error}; remove it to start anew", url=self.url) from error
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
            self.close()

    def close(self) -> None:
        """Save."""
        shards = {str(number): result for number, result in sorted(self.results.items())}
        with storage.atomic_write(self.url, options=self.options) as file:
            file.write(json.dumps({"fingerprint": self.fingerprint, "shards": shards}).encode())
        self._saved = time.monotonic()


def read_skipped(dst: str, *, options: storage.Options | None = None) -> list[Skipped]:
    """The images that ``--on-error skip`` left out of a dataset, with the reasons."""
    url = storage.join(dst, SKIPPED)
    if not storage.exists(url, options=options):
        return []
    return [Skipped(**json.loads(line)) for line in storage.read_bytes(url, options=options).splitlines()]


def _result_from_json(raw: Any) -> ShardResult:
    entry, skipped = raw
    if entry is not None:
        entry = ShardEntry(*entry)
        entry = entry._replace(prefix_stops=tuple(entry.prefix_stops))
    return ShardResult(entry, tuple(Skipped(*row) for row in skipped))
