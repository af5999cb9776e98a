"""A whole dataset to shards, in parallel.

The plan (which sample is in which shard) is a pure function of the source's listing and the seed.
Each shard is then an independent task, so the bytes do not depend on how many workers there are, or
on how often the run was stopped.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import logging
import multiprocessing
import os
from collections.abc import Callable

from .. import storage
from ..errors import EncodeError
from ..format.dataset_index import DatasetIndex
from ..format.names import shard_name
from .resume_journal import SKIPPED, Journal, Part, read_skipped, write_skipped
from .shard_plan import EncodeOptions, convert_names, field_names, plan_shards
from .shard_task import ShardTask, encode_shard
from .shard_writer import FieldNames, write_dataset_index
from .sources import Source, list_source
from .worker_processes import run_tasks, worker_pool

__all__ = ["EncodeOptions", "encode", "encode_part"]

Progress = Callable[[int, int], None]
_log = logging.getLogger("pcrshard")
# Tasks given to an executor of the user's at a time: enough for a cluster, few enough for memory.
_IN_FLIGHT = 1024


def encode(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    options: EncodeOptions = EncodeOptions(),
    *,
    workers: int | None = None,
    resume: bool = False,
    executor: concurrent.futures.Executor | None = None,
    progress: Progress | None = None,
    src_options: storage.Options | None = None,
    dst_options: storage.Options | None = None,
) -> DatasetIndex:
    """Encode a dataset: list, shuffle, split into even shards, write them in parallel.

    Reads each source file once and holds one shard in memory per worker. ``pcr.json`` is written
    last. The same source and options give the same bytes, for any number of workers, resumed or
    not. Worker processes may be spawned: a script that calls this needs
    ``if __name__ == "__main__":``.

    Args:
        src: Images, tars or a list; see :func:`pcrshard.encoding.sources.list_source`.
        dst: Folder for the shards, local or an fsspec URL.
        options: How the dataset is split, ordered and encoded.
        workers: Number of worker processes; by default one for each core.
        resume: Whether to go on with an earlier run in ``dst``: shards that are whole are kept.
        executor: Executor to run the shard tasks on instead of worker processes.
        progress: Called with (samples done, samples in all) after each shard.
        src_options: fsspec storage options of the source.
        dst_options: fsspec storage options of the destination.

    Returns:
        The dataset index. ``skipped.jsonl`` lists skipped images, if there are any.

    Raises:
        EncodeError: The source or the destination is not as it should be.
        CorruptJpeg, UnsupportedJpeg: A bad image, unless ``on_error="skip"``.
        StorageError: Bytes could not be read or written.
    """
    index = encode_part(
        src,
        dst,
        None,
        options,
        workers=workers,
        resume=resume,
        executor=executor,
        progress=progress,
        src_options=src_options,
        dst_options=dst_options,
    )
    assert index is not None, "a run without parts is complete when it ends"
    return index


def encode_part(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    part: Part | None,
    options: EncodeOptions = EncodeOptions(),
    *,
    workers: int | None = None,
    resume: bool = False,
    executor: concurrent.futures.Executor | None = None,
    progress: Progress | None = None,
    src_options: storage.Options | None = None,
    dst_options: storage.Options | None = None,
) -> DatasetIndex | None:
    """Encode one part of a dataset's shards.

    Parts run at any time, in any order, on any machines that share ``dst``. Each lists the source,
    and the one that finds all shards done writes ``pcr.json``. A run without parts and with
    ``resume`` completes what parts have left.

    Args:
        src: The source, as for :func:`encode`.
        dst: Folder for the shards.
        part: (I, N) for the shards whose number is I modulo N, of N parts; ``None`` for all shards.
        options: As for :func:`encode`; the same for all parts.
        workers: Number of worker processes; by default one for each core.
        resume: Whether to go on with an earlier run of this part.
        executor: Executor to run the shard tasks on instead of worker processes.
        progress: Called with (samples done, samples in all) of this part after each shard.
        src_options: fsspec storage options of the source.
        dst_options: fsspec storage options of the destination.

    Returns:
        The dataset index, or ``None`` while other parts have shards to write.

    Raises:
        EncodeError: The source or the destination is not as it should be, or another run is writing
            there.
    """
    _check_main_program()
    if part is not None and not 0 <= part[0] < part[1]:
        raise EncodeError(f"expected a part I/N with I from 0 to N-1, got {part[0]}/{part[1]}")
    src = os.fspath(src)
    dst = storage.plain_path(os.fspath(dst))
    source = _list(src, options, src_options)
    _check_apart(src, source, dst)

    shards = dict(enumerate(plan_shards(source.samples, options)))
    names = _check_names(source, options)
    mine = {
        number: ShardTask(
            storage.join(dst, shard_name(options.name, number)),
            samples,
            names,
            options,
            src_options,
            dst_options,
        )
        for number, samples in shards.items()
        if part is None or number % part[1] == part[0]
    }
    journal = Journal(dst, _fingerprint(source, options), options.on_error, dst_options, part)
    with journal.open(resume):
        tasks = {number: task for number, task in mine.items() if number not in journal.results}
        journal.begin([shard_name(options.name, number) for number in tasks])
        count = _Count(mine, tasks, progress)
        _write_shards(tasks, journal, count, workers, executor)
        return _finish(journal, len(shards), options, source.classes)


def _check_main_program() -> None:
    # What multiprocessing itself looks at before it starts a process.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise EncodeError(
            "a worker process imports the program that started it: "
            'encode below `if __name__ == "__main__":` only'
        )


def _list(src: str, options: EncodeOptions, src_options: storage.Options | None) -> Source:
    source = list_source(src, prefix_keys=options.prefix_keys, options=src_options)
    if count := len(source.ignored):
        some = ", ".join(source.ignored[:5])
        _log.warning("%s: left out %d files that are not images, such as %s", src, count, some)
    return source._replace(samples=convert_names(source.samples, options))


def _check_names(source: Source, options: EncodeOptions) -> FieldNames:
    names = field_names(source.samples)
    if unknown := set(options.fmt.preview_fields).difference(names.others):
        raise EncodeError(f"expected preview fields of {list(names.others)}, got {sorted(unknown)}")
    return names


def _check_apart(src: str, source: Source, dst: str) -> None:
    """Refuse shards among their sources: a later run would take one for the other, or replace it."""
    if not storage.is_local(dst):
        return
    target = os.path.realpath(dst)
    urls = {ref.url for sample in source.samples for ref in sample.refs}
    folders = {url.rpartition("/")[0] for url in urls if url.endswith(".tar")}
    taken = {os.path.realpath(folder) for folder in folders if storage.is_local(folder)}
    if storage.is_local(src) and os.path.isdir(src):
        folder = os.path.realpath(src)
        taken.add(folder)
        if target.startswith(os.path.join(folder, "")):
            taken.add(target)
    if target in taken:
        raise EncodeError(f"expected a folder apart from the source {src}, got {dst}")


class _Count:
    """Tells how many samples are done of all that this run is to have done in the end."""

    def __init__(
        self, mine: dict[int, ShardTask], tasks: dict[int, ShardTask], progress: Progress | None
    ) -> None:
        self._total = sum(len(task.samples) for task in mine.values())
        self._left = sum(len(task.samples) for task in tasks.values())
        self._progress = progress

    def add(self, task: ShardTask) -> None:
        self._left -= len(task.samples)
        if self._progress is not None:
            self._progress(self._total - self._left, self._total)


def _write_shards(
    tasks: dict[int, ShardTask],
    journal: Journal,
    count: _Count,
    workers: int | None,
    executor: concurrent.futures.Executor | None,
) -> None:
    in_flight = None if executor is None else _IN_FLIGHT
    try:
        with worker_pool(workers, len(tasks), executor) as pool:
            if pool is not None:
                # The largest first, so that no worker has a large one left when the others are done.
                by_size = sorted(tasks.items(), key=lambda item: -item[1].source_bytes)
                tasks = dict(by_size)
            for number, result in run_tasks(pool, encode_shard, tasks, in_flight=in_flight):
                journal.add(number, result)
                count.add(tasks[number])
    finally:
        journal.save()


def _fingerprint(source: Source, options: EncodeOptions) -> str:
    """Identifies the source's listing and the options.

    How errors are treated is left out, so that a stopped run may go on with ``skip``.
    """
    digest = hashlib.sha256(repr(dataclasses.replace(options, on_error="raise")).encode())
    for sample in source.samples:
        digest.update(repr(sample).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _finish(
    journal: Journal, num_shards: int, options: EncodeOptions, classes: tuple[str, ...]
) -> DatasetIndex | None:
    """Write the dataset index if all shards are there, from this part or from others."""
    dst = journal.dst
    with journal.finishing() as found:
        if missing := num_shards - len(found):
            _log.info("%d of %d shards are left to other parts", missing, num_shards)
            return None
        results = [found[number] for number in sorted(found)]
        skipped = [row for result in results for row in result.skipped]
        if skipped or read_skipped(dst, options=journal.options):
            write_skipped(dst, skipped, options=journal.options)
        entries = tuple(result.entry for result in results if result.entry is not None)
        if not entries:
            report = storage.join(dst, SKIPPED)
            raise EncodeError(f"every image was skipped; the reasons are in {report}")
        script = options.fmt.scan_script
        index = DatasetIndex(script.name, script.num_groups, entries, classes)
        journal.unite(found)
        write_dataset_index(dst, index, options=journal.options)
        journal.clean_up()
    return index
