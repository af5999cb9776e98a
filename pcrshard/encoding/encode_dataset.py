"""A whole dataset to shards, in parallel.

The plan (which sample is in which shard) is a pure function of the source's listing and the seed.
Each shard is then an independent task, so the bytes do not depend on how many workers there are, or
on how often the run was stopped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Executor

from .. import storage
from ..errors import EncodeError
from ..format.dataset_index import DatasetIndex, ShardEntry
from ..format.names import shard_name
from ..redaction import get_logger, redact_url
from .labels import read_labels, renumber
from .resume_journal import (
    REPORTS,
    SKIPPED,
    Journal,
    Part,
    Unlayered,
    read_report,
    write_report,
)
from .sample_refs import gather_lists
from .shard_plan import (
    NO_SPLIT,
    EncodeOptions,
    convert_names,
    field_names,
    plan_shards,
)
from .shard_task import Recipe, ShardTask, encode_shard
from .shard_writer import write_dataset_index
from .sources import Source, StorageOptions, list_source
from .worker_processes import run_tasks, worker_pool

__all__ = ["EncodeOptions", "encode", "encode_part"]

Path = str | os.PathLike[str]
Progress = Callable[[int, int], None]
_log = get_logger("pcrshard")
# Tasks given to an executor of the user's at a time: enough for a cluster, few enough for memory.
_IN_FLIGHT = 1024


def encode(
    src: Path,
    dst: Path,
    options: EncodeOptions = EncodeOptions(),
    *,
    workers: int | None = None,
    resume: bool = False,
    executor: Executor | None = None,
    progress: Progress | None = None,
    src_options: StorageOptions = None,
    dst_options: StorageOptions = None,
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
        The dataset index. ``skipped.jsonl`` lists what was skipped, ``kept.jsonl`` what was
            kept as it is or encoded again, if there is any.

    Raises:
        EncodeError: The source or the destination is not as it should be.
        CorruptJpeg, UnsupportedJpeg: A bad image, with ``on_error="raise"``.
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
    src: Path,
    dst: Path,
    part: Part | None,
    options: EncodeOptions = EncodeOptions(),
    *,
    workers: int | None = None,
    resume: bool = False,
    executor: Executor | None = None,
    progress: Progress | None = None,
    src_options: StorageOptions = None,
    dst_options: StorageOptions = None,
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
    src = os.fspath(src)
    dst = storage.plain_path(os.fspath(dst))
    source = _list(src, options, src_options)
    _check_apart(src, source, dst)
    names = field_names(source.samples, options)
    _tell_ignored(src, source)
    tasks = _tasks(dst, source, Recipe(names, options, src_options, dst_options))
    journal = Journal(
        dst,
        _fingerprint(source, options),
        options.on_error,
        dst_options,
        part,
    )
    with journal.open(resume):
        mine = {number: task for number, task in tasks.items() if journal.is_mine(number)}
        _write_shards(mine, journal, workers, executor, progress)
        return _finish(journal, len(tasks), options, source.classes)


def _tell_ignored(src: str, source: Source) -> None:
    if count := len(source.ignored):
        some = ", ".join(source.ignored[:5])
        shown = redact_url(src)
        _log.warning("%s: left out %d files that are not images, such as %s", shown, count, some)


def _tasks(
    dst: str,
    source: Source,
    recipe: Recipe,
) -> dict[int, ShardTask]:
    """The task of every shard by its number."""
    options = recipe.options
    labels = read_labels(source.samples, recipe.src_options) if options.stratify else None
    return {
        number: ShardTask(storage.join(dst, shard_name(options.name, number)), samples, recipe)
        for number, samples in enumerate(plan_shards(source.samples, options, labels))
    }


def _check_main_program() -> None:
    # What multiprocessing itself looks at before it starts a process.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise EncodeError(
            "a worker process imports the program that started it: "
            'encode below `if __name__ == "__main__":` only'
        )


def _list(
    src: str,
    options: EncodeOptions,
    src_options: StorageOptions,
) -> Source:
    source = list_source(src, prefix_keys=options.prefix_keys, options=src_options)
    if options.split != NO_SPLIT and (options.split or source.splits):
        source = _take_split(src, source, options, src_options)
    samples = gather_lists(convert_names(source.samples, options), options.lists)
    source = source._replace(samples=samples)
    return renumber(source, options.classes)


def _take_split(
    src: str,
    source: Source,
    options: EncodeOptions,
    src_options: StorageOptions,
) -> Source:
    """One split of a source, its labels numbered by the classes of all splits."""
    _check_split(src, source, options.split)
    assert options.split is not None
    listed = {
        split: list_source(where, prefix_keys=options.prefix_keys, options=src_options)
        for split, where in source.splits.items()
        # Tars have no names of classes to compare, and to list them takes time.
        if source.classes or split == options.split
    }
    classes = sorted({name for each in listed.values() for name in each.classes})
    return renumber(listed[options.split], tuple(classes))


def _check_split(
    src: str,
    source: Source,
    split: str | None,
) -> None:
    names = ", ".join(source.splits)
    shown = redact_url(src)
    if split is None:
        raise _would_mix(shown, list(source.splits))
    if split not in source.splits:
        raise EncodeError(f"expected a split of {shown} ({names or 'it has none'}), got {split!r}")


def _would_mix(shown: str, splits: list[str]) -> EncodeError:
    return EncodeError(
        f"{shown} holds the splits {', '.join(splits)}, which one dataset would mix: encode each "
        f"into a folder of its own (`pcrshard encode --split all {shown} DST`, or "
        f"--split {splits[0]} for one), or take the folders for classes by --split {NO_SPLIT}"
    )


def _check_apart(
    src: str,
    source: Source,
    dst: str,
) -> None:
    """Refuse shards among their sources: a later run would take them for sources."""
    if not storage.is_local(dst):
        return
    target = os.path.realpath(dst)
    if _is_inside(target, src) or target in _tar_folders(source):
        shown = redact_url(src)
        raise EncodeError(f"expected a folder apart from the source {shown}, got {dst}")


def _is_inside(target: str, src: str) -> bool:
    """Whether a folder is the source's, if it has one, or below it."""
    if not storage.is_local(src) or not os.path.isdir(src):
        return False
    folder = os.path.join(os.path.realpath(src), "")
    return f"{target}/".startswith(folder)


def _tar_folders(source: Source) -> set[str]:
    """The local folders that tars of the source are in."""
    urls = {ref.url for sample in source.samples for ref in sample.refs}
    folders = {url.rpartition("/")[0] for url in urls if url.endswith(".tar")}
    return set(map(os.path.realpath, filter(storage.is_local, folders)))


def _write_shards(
    mine: dict[int, ShardTask],
    journal: Journal,
    workers: int | None,
    executor: Executor | None,
    progress: Progress | None,
) -> None:
    tasks = {number: task for number, task in mine.items() if number not in journal.results}
    journal.begin(storage.file_name(task.url) for task in tasks.values())
    total = _num_samples(mine)
    done = total - _num_samples(tasks)
    try:
        with worker_pool(workers, len(tasks), executor) as pool:
            if pool is not None:
                tasks = _largest_first(tasks)
            in_flight = _IN_FLIGHT if executor else None
            for number, result in run_tasks(pool, encode_shard, tasks, in_flight=in_flight):
                journal.add(number, result)
                done += len(tasks[number].samples)
                if progress is not None:
                    progress(done, total)
    finally:
        journal.save()


def _largest_first(tasks: dict[int, ShardTask]) -> dict[int, ShardTask]:
    """So that no worker has a large one left when the others are done."""
    return dict(sorted(tasks.items(), key=lambda item: -item[1].source_bytes))


def _num_samples(tasks: dict[int, ShardTask]) -> int:
    return sum(len(task.samples) for task in tasks.values())


def _fingerprint(source: Source, options: EncodeOptions) -> str:
    """Identifies the source's listing and the options.

    How errors are treated is left out, so that a stopped run may go on with ``skip``.
    """
    digest = hashlib.sha256(repr(dataclasses.replace(options, on_error="raise")).encode())
    for sample in source.samples:
        digest.update(repr(sample).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _finish(
    journal: Journal,
    num_shards: int,
    options: EncodeOptions,
    classes: tuple[str, ...],
) -> DatasetIndex | None:
    """Write the dataset index if all shards are there, from this part or from others."""
    dst = journal.dst
    with journal.finishing() as found:
        if missing := num_shards - len(found):
            _log.info("%d of %d shards are left to other parts", missing, num_shards)
            return None
        results = [found[number] for number in sorted(found)]
        _write_reports(journal, [row for result in results for row in result.unlayered])
        entries = tuple(result.entry for result in results if result.entry is not None)
        if not entries:
            report = storage.join(dst, SKIPPED)
            raise EncodeError(f"every image was skipped; the reasons are in {report}")
        num_classes = max(result.num_classes for result in results)
        index = _make_index(options, entries, classes, num_classes)
        journal.unite(found)
        write_dataset_index(dst, index, options=journal.options)
        journal.clean_up()
    return index


def _make_index(
    options: EncodeOptions,
    entries: tuple[ShardEntry, ...],
    classes: tuple[str, ...],
    num_classes: int,
) -> DatasetIndex:
    script = options.fmt.scan_script
    return DatasetIndex(
        script.name,
        script.num_groups,
        entries,
        classes,
        num_classes,
    )


def _write_reports(journal: Journal, rows: list[Unlayered]) -> None:
    """List what is not in scans, also if there is nothing any more but an earlier run had some."""
    for name in REPORTS:
        listed = [row for row in rows if row.report == name]
        if listed or read_report(journal.dst, name, options=journal.options):
            write_report(journal.dst, name, listed, options=journal.options)
