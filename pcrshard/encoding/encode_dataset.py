"""Parallel encoding of a whole dataset: plan, encode each shard, commit.

The plan (which sample is in which shard) is a pure function of the source's listing and the
options. Each shard is then an independent task, so the bytes do not depend on the number of
workers or on how often the run was interrupted.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import pathlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from .. import storage
from ..errors import EncodeError, StorageError
from ..format.dataset_index import (
    DATASET_INDEX,
    DatasetIndex,
    ImageCounts,
    ShardEntry,
    ShardTable,
)
from ..format.names import shard_name
from ..format.sample_columns import SampleColumns
from ..format.shard_head import HEAD_STOP, read_head
from ..format.shard_index import decode_index
from ..redaction import get_logger, redact_url
from .encode_run import Part, Run, new_run
from .resume_journal import (
    JOURNAL,
    KEPT,
    PARTS,
    READS,
    SKIPPED,
    Saved,
    already_holds,
    read_script,
    report_of,
    scratch_of,
)
from .samples import StorageOptions
from .shard_plan import EncodeOptions, Plan, announce, plan, sources_digest
from .shard_task import ShardTask, encode_shard
from .shard_writer import write_dataset_index
from .worker_processes import run_tasks

__all__ = ["EncodeOptions", "commit", "encode"]

Path = str | os.PathLike[str]
Progress = Callable[[int, int], object]
_log = get_logger("pcrshard")
# Shards that a message names.
_NAMED = 5


def encode(
    src: Path,
    dst: Path,
    options: EncodeOptions = EncodeOptions(),
    *,
    part: Part | None = None,
    workers: int | None = None,
    resume: bool = False,
    executor: Executor | None = None,
    progress: Progress = lambda *_: None,
    src_options: StorageOptions = None,
    dst_options: StorageOptions = None,
) -> DatasetIndex | None:
    """Encode a dataset: list, shuffle, split into even shards, write them in parallel.

    Reads each source file once and holds one shard in memory per worker. ``pcr.json`` is written
    last. The same source and options give the same bytes for any number of workers, whether or not
    the run was resumed. Worker processes may be spawned, so a script that calls this needs
    ``if __name__ == "__main__":``. After this returns or raises, no worker writes.

    Args:
        src: Images, tars or a list; see :func:`pcrshard.encoding.sources.list_source`.
        dst: Folder for the shards, local or an fsspec URL.
        options: How the dataset is split, ordered and encoded.
        part: (I, N) encodes only the shards whose number is I modulo N. Parts can run at any time,
            in any order, on any machines that share ``dst``; each lists the source, and the one
            that finds all shards complete writes ``pcr.json``. A run with ``resume`` and without
            ``part`` completes the remaining shards of all parts.
        workers: Number of worker processes; by default one per CPU that this process may use.
        resume: Whether to resume an earlier run in ``dst``. Complete shards are kept, those whose
            sources have changed since (by size, and ETag or time of writing) are made again.
        executor: Any executor to run the shard tasks on instead of worker processes, such as
            ``distributed.Client(...).get_executor(pure=False)``.
        progress: Called with (samples done, total samples): first of the sample of the images that
            is read for levels, then of this part, after each shard.
        src_options: fsspec storage options of the source.
        dst_options: fsspec storage options of the destination.

    Returns:
        The dataset index, or ``None`` after a part if others still have shards to write.
        ``skipped.jsonl`` lists skipped files, and ``kept.jsonl`` files that were stored unchanged
        or re-encoded.

    Raises:
        EncodeError: The source, the destination, or the options are invalid, or another run is
            writing to ``dst``.
        CorruptJpeg, UnsupportedJpeg: A bad image, with ``on_error="raise"``.
        StorageError: Bytes could not be read or written.
    """
    # multiprocessing itself checks this attribute before it starts a process.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise EncodeError(
            "worker processes import the main script: "
            'call encode only under `if __name__ == "__main__":`'
        )
    src = os.fspath(src)
    dst = storage.plain_path(os.fspath(dst))
    first, step = part = part or (0, 1)
    if not 0 <= first < step:
        raise EncodeError(f"expected a part I/N with I from 0 to N-1, got {first}/{step}")
    _check_apart(src, dst)
    index_url = storage.join(dst, DATASET_INDEX)
    if not resume and part == (0, 1) and storage.exists(index_url, options=dst_options):
        # Before large tars are listed or unpacked.
        raise already_holds(DATASET_INDEX, dst)
    continues = resume or part != (0, 1)
    known = read_script(dst, options=dst_options) if continues else None
    scratch = scratch_of(dst)
    planned = plan(src, options, src_options, scratch=scratch, known=known, progress=progress)
    _log.info("%s", announce(planned))
    shards = planned.shards
    run = new_run(dst, planned, src_options, dst_options, part)
    numbers = range(first, len(shards), step)
    with run.open(numbers, resume=resume) as finished:

        def task(number: int) -> ShardTask:
            return ShardTask(run, number, list(shards[number]), finished.get(number))

        unknown = [n for n in finished if not all(r.version for r in shards[n][0].refs)]
        if unknown:
            _log.warning(
                "%s are kept, though their store does not say whether files have changed since",
                _names_of(run, unknown),
            )
        total = sum(len(shards[number]) for number in numbers)
        done = 0
        running = run_tasks(
            encode_shard, task, numbers, workers=workers, executor=executor, on_stop=run.revoke
        )
        stale = []
        with contextlib.closing(running) as results:
            for number, result in results:
                if number in finished and finished[number].sources != result.sources:
                    stale.append(number)
                done += len(shards[number])
                progress(done, total)
    if stale:
        _log.warning(
            "%s were made again, because their sources have changed", _names_of(run, stale)
        )
    return commit(run, planned)


def _names_of(run: Run, numbers: Sequence[int]) -> str:
    """Return how many shards there are, and the names of the first."""
    names = [shard_name(run.options.name, number) for number in sorted(numbers)]
    more = ", ..." if len(names) > _NAMED else ""
    return f"{len(names)} shards ({', '.join(names[:_NAMED])}{more})"


def _check_apart(src: str, dst: str) -> None:
    """Refuse to write shards among their sources, where a later run would list them as sources."""
    target = pathlib.Path(os.path.realpath(dst))
    if storage.is_local(dst) and target.is_relative_to(os.path.realpath(src)):
        raise EncodeError(f"expected a folder outside the source {redact_url(src)}, got {dst}")


def commit(run: Run, planned: Plan) -> DatasetIndex | None:
    """Write the reports and the dataset index if this and all other parts are complete.

    Returns:
        The index, or ``None`` if shards are missing.
    """
    dst, options = run.dst, run.dst_options
    # Of many parts, only the last ones read the results of all.
    missing = len(planned.shards) - len(run.journal.finished())
    found = {} if missing else run.journal.written()
    if missing := missing or len(planned.shards) - len(found):
        _log.info("%d shards remain for other parts", missing)
        return None
    stale = [
        n for n, samples in enumerate(planned.shards) if found[n].sources != sources_digest(samples)
    ]
    if stale:
        _log.warning(
            "%s were made from sources that have changed since: run again with --resume, without "
            "--part",
            _names_of(run, stale),
        )
        return None
    # The last two parts may end at the same time.
    with run.lock(wait=True):
        journal = Saved(run.fingerprint, found, run.options, planned.skipped)
        for name in (SKIPPED, KEPT):
            lines = [
                json.dumps({k: v for k, v in row._asdict().items() if v is not None}) + "\n"
                for row in journal.unlayered
                if report_of(row) == name
            ]
            url = storage.join(dst, name)
            # An empty report replaces the one of an earlier run.
            if lines or storage.exists(url, options=options):
                with storage.atomic_write(url, options=options) as file:
                    file.write("".join(lines).encode())
        journal.write(storage.join(dst, JOURNAL), options)
        storage.remove_temporary_files(dst)
        with contextlib.suppress(StorageError):
            storage.remove(storage.join(dst, PARTS), options=options)
        shards = [result.written for result in found.values() if result.written is not None]
        if not shards:
            report = storage.join(dst, SKIPPED)
            raise EncodeError(f"every image was skipped; the reasons are in {report}")
        num_classes = max(result.num_classes for result in found.values())
        index = DatasetIndex(
            run.schema,
            ShardTable.of(shard.entry for shard in shards),
            run.options.classes,
            num_classes,
            planned.levels,
            planned.similarity,
            counts=functools.reduce(ImageCounts.plus, (shard.counts for shard in shards)),
        )
        columns = _read_columns(dst, index.shards, options)
        return write_dataset_index(dst, index, columns, options=options)


def _read_columns(dst: str, table: ShardTable, options: StorageOptions) -> SampleColumns:
    """Read the columns of finished shards from their indexes."""

    def read(entry: ShardEntry) -> SampleColumns:
        url = storage.join(dst, entry.name)
        data = storage.read(url, 0, entry.index_stop, options=options).data
        head = read_head(data, url=url)
        return SampleColumns.of(decode_index(head, data[HEAD_STOP : head.body_stop], url=url))

    with ThreadPoolExecutor(READS) as threads:
        return SampleColumns.join(list(threads.map(read, table)))
