"""What an encoding run has finished, kept beside its shards, so that it can be resumed."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .. import storage
from ..checksum import crc32c
from ..errors import EncodeError, PCRError, StorageError
from ..format.dataset_index import DATASET_INDEX, ShardEntry
from ..redaction import redact, redact_url
from .folder_lock import FolderLock

JOURNAL = "encode-journal.json"
SKIPPED = "skipped.jsonl"
KEPT = "kept.jsonl"
REPORTS = (SKIPPED, KEPT)
PARTS = "encode-parts"
SECONDS_PER_SAVE = 1.0
Part = tuple[int, int]
# What may have been done about a file, by what is to be done now.
_ALLOWED = {
    "raise": frozenset[str](),
    "skip": frozenset({"skipped"}),
    "keep": frozenset({"kept"}),
    "reencode": frozenset({"reencoded", "skipped"}),
}


class Unlayered(NamedTuple):
    """A file that is not in scans, what was done about it, and why.

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
        """A file with what may be shown of its source, because this is written down."""
        return cls(key, redact_url(source), redact(reason, source), outcome)

    @property
    def report(self) -> str:
        """The name of the file that lists it."""
        return SKIPPED if self.outcome == "skipped" else KEPT


class ShardResult(NamedTuple):
    """What came of a task; no entry if every sample was skipped.

    ``num_classes`` is the highest label + 1 in the shard.
    """

    entry: ShardEntry | None
    unlayered: tuple[Unlayered, ...]
    num_classes: int = 0


Results = dict[int, ShardResult]


class _Saved(NamedTuple):
    """A journal's file."""

    fingerprint: str
    results: Results


class Journal:
    """Which shards are written; kept in the destination, so that a run can go on where it stopped.

    A run over all shards keeps ``encode-journal.json``. Part I of N keeps
    ``encode-parts/I-of-N.json``, until all are united.

    Args:
        dst: Folder of the shards.
        fingerprint: Identifies source and options; another run's journal is refused.
        on_error: What is done about files that are not in scans; a shard where something else was
            done is made again.
        options: fsspec storage options of the folder.
        part: (I, N), or ``None`` for a run over all shards.
    """

    def __init__(
        self,
        dst: str,
        fingerprint: str,
        on_error: str,
        options: storage.Options,
        part: Part | None = None,
    ) -> None:
        _check_part(part)
        self.dst = dst
        self.fingerprint = fingerprint
        self.on_error = on_error
        self.options = options
        self.part = part
        self.whole_url = storage.join(dst, JOURNAL)
        self.parts_url = storage.join(dst, PARTS)
        self.url = self.whole_url
        if part is not None:
            self.url = storage.join(self.parts_url, f"{part[0]}-of-{part[1]}.json")
        self.results: Results = {}
        self._run = secrets.token_hex(8)
        self._saved = 0.0
        self._goes_on = False
        # Object stores have no locks.
        self._lock = FolderLock(dst) if storage.is_local(dst) else None

    @contextlib.contextmanager
    def open(self, resume: bool) -> Iterator[None]:
        """Take over the whole shards of an earlier run, or make sure that there was none.

        Until the end of the block no other run may write to the folder, but for other parts.

        Raises:
            EncodeError: Another run is writing there, or has written and this one may not go on
                with it.
        """
        storage.make_folder(self.dst, options=self.options)
        number = None if self.part is None else self.part[0]
        with self._lock.held(number) if self._lock else contextlib.nullcontext():
            self._take_over(resume)
            yield

    def _take_over(self, resume: bool) -> None:
        found = self._read_all()
        mine = found
        if self.part is not None:
            mine = {url: found[url] for url in found if url in (self.url, self.whole_url)}
        self._check_allowed(resume, found, mine)
        self._check_parts(found)
        self._goes_on = resume and bool(mine)
        if self.part is None:
            storage.remove_temporary_files(self.dst)
        for number, result in _merged(mine.values()).items():
            if self.is_mine(number) and self._is_kept(result):
                self.results[number] = result

    def _check_allowed(
        self,
        resume: bool,
        found: dict[str, _Saved],
        mine: dict[str, _Saved],
    ) -> None:
        index_url = storage.join(self.dst, DATASET_INDEX)
        there = [url for url, saved in mine.items() if saved.results]
        has_index = storage.exists(index_url, options=self.options)
        if has_index:
            there.append(index_url)
        if there and not resume:
            which = there[0].removeprefix(self.dst).lstrip("/")
            raise EncodeError(
                f"already holds a dataset ({which}): use --resume, or another folder", url=self.dst
            )
        if has_index and not found:
            raise EncodeError(
                f"holds a dataset that --resume cannot go on with: it has no {JOURNAL}",
                url=self.dst,
            )
        if any(known.results and known.fingerprint != self.fingerprint for known in found.values()):
            raise EncodeError(
                "the source or the options differ from the run that is there, "
                "and that --resume would go on with",
                url=self.dst,
            )

    def _check_parts(self, urls: Iterable[str]) -> None:
        if self.part is None:
            return
        matches = (re.search(r"/\d+-of-(\d+)\.json$", url) for url in urls)
        counts = {int(match[1]) for match in matches if match}
        if counts - {self.part[1]}:
            raise EncodeError(
                f"expected parts of {min(counts)}, as those that are there, "
                f"got part {self.part[0]}/{self.part[1]}"
            )

    def is_mine(self, number: int) -> bool:
        """Whether this part writes the shard of this number."""
        return self.part is None or number % self.part[1] == self.part[0]

    def begin(self, names: Iterable[str]) -> None:
        """Put on record that these shards will be written.

        Raises:
            EncodeError: One of them is there, and this does not go on with a run that may have
                written it.
        """
        # An object store has no folder before it has something in it.
        if not self._goes_on and storage.is_folder(self.dst, options=self.options):
            self._check_free(names)
        self.save()

    def _check_free(self, names: Iterable[str]) -> None:
        there = {name for name, _ in storage.list_files(self.dst, options=self.options)}
        if found := sorted(there.intersection(names)):
            raise EncodeError(
                f"already holds {found[0]}, of no run that this goes on with: use another folder",
                url=self.dst,
            )

    def _read_all(self) -> dict[str, _Saved]:
        """Every journal in the folder by its URL."""
        try:
            return self._try_to_read_all()
        except StorageError:
            # Another part has found all shards done, and united the journals meanwhile.
            return self._try_to_read_all()

    def _try_to_read_all(self) -> dict[str, _Saved]:
        urls = []
        if storage.exists(self.whole_url, options=self.options):
            urls.append(self.whole_url)
        if storage.exists(self.parts_url, options=self.options):
            files = storage.list_files(self.parts_url, options=self.options)
            names = [name for name, _ in files if name.endswith(".json")]
            urls += [storage.join(self.parts_url, name) for name in names]
        return {url: self._read(url) for url in urls}

    def _read(self, url: str) -> _Saved:
        data = storage.read_bytes(url, options=self.options)
        try:
            return _parse_journal(data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EncodeError(
                f"not a journal: {error}; remove it to start from the beginning", url=url
            ) from error

    def _is_kept(self, result: ShardResult) -> bool:
        """Whether a shard need not be made again.

        Every byte must be there, and nothing may have been done about a file that is not to be
        done now.
        """
        entry = result.entry
        outcomes = {row.outcome for row in result.unlayered}
        if outcomes - _ALLOWED[self.on_error]:
            return False
        if entry is None:
            return True
        url = storage.join(self.dst, entry.name)
        try:
            with storage.open_range(url, 0, entry.shard_bytes, options=self.options) as view:
                return crc32c(view) == entry.shard_crc32c and self._is_there(result)
        except PCRError:
            return False

    def add(self, number: int, result: ShardResult) -> None:
        """Note a written shard; the file is saved at most once a second."""
        self.results[number] = result
        if time.monotonic() - self._saved > SECONDS_PER_SAVE:
            self.save()

    def save(self) -> None:
        """Save; where there are no locks, make sure that no other run has taken over.

        Raises:
            EncodeError: One has.
        """
        if self._lock is None and self._saved:
            self._check_run()
        self._write(self.url, self.results)
        self._saved = time.monotonic()

    def _check_run(self) -> None:
        raw = json.loads(storage.read_bytes(self.url, options=self.options))
        if raw.get("run") != self._run:
            raise EncodeError(
                "another encode is writing to this folder; wait for it, then use --resume",
                url=self.dst,
            )

    def _write(self, url: str, results: Results) -> None:
        shards = {str(number): result for number, result in sorted(results.items())}
        run = {
            "fingerprint": self.fingerprint,
            "run": self._run,
            "shards": shards,
        }
        text = json.dumps(run)
        with storage.atomic_write(url, options=self.options) as file:
            file.write(text.encode())

    @contextlib.contextmanager
    def finishing(self) -> Iterator[Results]:
        """What this part and all others have written; one process at a time."""
        if self.part is None:
            yield self.results
            return
        with self._lock.finishing() if self._lock else contextlib.nullcontext():
            yield self._find_written() | self.results

    def _find_written(self) -> Results:
        """The shards of all journals that are there."""
        found = _merged(self._read_all().values())
        return {number: result for number, result in found.items() if self._is_there(result)}

    def _is_there(self, result: ShardResult) -> bool:
        """Whether a shard has its size; the part that wrote it has checked the rest."""
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
        storage.remove_temporary_files(self.dst)
        with contextlib.suppress(StorageError):
            if storage.exists(self.parts_url, options=self.options):
                storage.remove(self.parts_url, options=self.options)
        if self._lock is not None:
            self._lock.remove()


def _check_part(part: Part | None) -> None:
    if part is not None and not 0 <= part[0] < part[1]:
        raise EncodeError(f"expected a part I/N with I from 0 to N-1, got {part[0]}/{part[1]}")


def _merged(journals: Iterable[_Saved]) -> Results:
    results: Results = {}
    for saved in journals:
        results |= saved.results
    return results


def read_report(
    dst: str,
    name: str,
    *,
    options: storage.Options | None = None,
) -> list[Unlayered]:
    """The files that an encode has left out, or kept as they are, with the reasons.

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
    """List files as :func:`read_report` reads them, one JSON object a line."""
    with storage.atomic_write(storage.join(dst, name), options=options) as file:
        file.writelines(json.dumps(row._asdict()).encode() + b"\n" for row in rows)


def _parse_journal(data: bytes) -> _Saved:
    raw = json.loads(data)
    return _Saved(
        str(raw["fingerprint"]),
        {int(number): _result_from_json(result) for number, result in raw["shards"].items()},
    )


def _result_from_json(raw: Any) -> ShardResult:
    entry, unlayered, *counted = raw
    if entry is not None:
        entry = ShardEntry(*entry)
        entry = entry._replace(prefix_stops=tuple(entry.prefix_stops))
    rows = tuple(Unlayered.of(*row) for row in unlayered)
    return ShardResult(entry, rows, *map(int, counted))
