"""Verification that a dataset is intact and shows the same pixels as its source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .. import storage
from ..checksum import crc32c
from ..encoding.resume_journal import read_journal
from ..encoding.samples import SampleRef
from ..encoding.shard_plan import list_samples
from ..encoding.sources import NO_SPLIT, find_splits
from ..encoding.worker_processes import run_tasks
from ..errors import EncodeError, PCRError, UnsupportedJpeg
from ..format.dataset_index import DATASET_INDEX, ShardEntry
from ..format.group_table import GroupTable, decode_tables
from ..format.scan import FULL, Scan, check_scan
from ..format.shard_head import BLOCK, round512
from ..format.shard_index import ShardIndex
from ..format.tar_members import TRAILER, index_name, plan_members, tar_header
from ..jpeg.markers import SOI, map_jpeg
from ..jpeg.other_formats import decode
from ..jpeg.pixels import make_baseline
from ..jpeg.split import with_height
from ..reading.dataset_folder import open_dataset
from ..reading.prefix import Sample, number_lists
from ..reading.shard import Shard
from ..redaction import redact


def verify(
    url: str,
    *,
    against: str | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    storage_options: storage.Options = None,
) -> list[str]:
    """Check every byte of a dataset or shard, and optionally all pixels against the source.

    Args:
        url: A dataset folder, its ``pcr.json``, or one shard.
        against: The source that was encoded. It is listed with the options that ``encode`` recorded
            in the dataset's journal.
        workers: Number of worker processes; by default one per core.
        progress: Called with (samples checked, total samples) after each shard.
        storage_options: fsspec storage options of the dataset and the source.

    Returns:
        One line per problem; empty if the dataset matches its indexes exactly.

    Raises:
        EncodeError: The source cannot be compared with this dataset.
        StorageError: The dataset index or the source cannot be read.
    """
    shards: list[tuple[str, ShardEntry | None]] = [(url, None)]
    folder = url.rpartition("/")[0] or "."
    classes: tuple[str, ...] = ()
    is_shard = storage.file_name(url).endswith(".tar")
    if not is_shard:
        index, urls = open_dataset(url, storage_options=storage_options)
        shards = list(zip(urls, index.shards, strict=True))
        folder = url.removesuffix(DATASET_INDEX)
        classes = index.classes
        if against and index.scan is not None:
            raise EncodeError(
                f"--against needs full fidelity, this staged copy holds scans 1 to {index.scan}: "
                "verify the dataset itself"
            )
    sources = None
    missing: set[str] = set()
    if against:
        journal = read_journal(folder, options=storage_options)
        options = replace(journal.options, classes=classes)
        if options.split not in (None, NO_SPLIT):
            # The source may be the split itself or the folder of all splits.
            splits = find_splits(against, options=storage_options)
            options = replace(options, split=options.split if splits else None)
        samples = list_samples(against, options, storage_options).samples
        sources = {sample.key: sample for sample in samples}
        skipped = {row.key for row in journal.unlayered if row.outcome == "skipped"}
        missing = sources.keys() - skipped
    tasks = {
        number: VerifyTask(
            shard, entry, sources and _sources_of(shard, sources, storage_options), storage_options
        )
        for number, (shard, entry) in enumerate(shards)
    }
    total = sum(entry.num_samples if entry else 1 for _, entry in shards)
    done = 0
    problems: list[str] = []
    with closing(run_tasks(verify_shard, tasks, workers=workers)) as results:
        for number, result in results:
            problems += result.problems
            # If a shard is unreadable, it is unknown which samples are missing.
            missing = missing.difference(result.keys) if result.keys else set()
            entry = shards[number][1]
            done += entry.num_samples if entry else 1
            if progress is not None:
                progress(done, total)
    if not is_shard:
        problems += [f"the source's sample {key} is in no shard" for key in sorted(missing)]
    return problems


def _sources_of(
    url: str,
    sources: dict[str, SampleRef],
    storage_options: storage.Options,
) -> dict[str, SampleRef]:
    """Return only the sources of a shard's samples, to keep the task small."""
    try:
        keys = Shard(url, storage_options=storage_options).index.keys
    except PCRError:
        return {}
    return {key: sources[key] for key in keys if key in sources}


class VerifyTask(NamedTuple):
    """A shard to verify; with ``sources``, also against these samples by key."""

    url: str
    entry: ShardEntry | None
    sources: dict[str, SampleRef] | None = None
    storage_options: storage.Options = None


class VerifyResult(NamedTuple):
    """One line per problem of a shard, and its samples' keys; none if it is unreadable."""

    problems: tuple[str, ...]
    keys: tuple[str, ...]


def verify_shard(task: VerifyTask) -> VerifyResult:
    """Check every byte of a shard: index, checksums, and bytes not covered by checksums.

    Reads the head, the index, the whole shard, and its samples again as a job would (four
    requests), and their sources if given.

    Returns:
        The problems; none if the shard matches its index exactly.
    """
    url, entry = task.url, task.entry
    shard = Shard(url, entry=entry, storage_options=task.storage_options)
    problems: list[str] = []
    keys: tuple[str, ...] = ()
    try:
        index = shard.index
        scan = (entry and entry.scan) or FULL
        stop = index.head.prefix_stop(scan) + (len(TRAILER) if scan == FULL else 0)
        data = storage.read(url, 0, stop, options=task.storage_options)
        problems += _check_layout(url, index, scan, data.data)
        checksum = crc32c(data)
        del data  # its memory serves the next read
        size = storage.file_bytes(url, options=task.storage_options)
        # A staged copy may be growing.
        if scan == FULL and size not in (stop, None):
            problems.append(f"expected a file of {stop} bytes, got {size} (shard={url})")
        problems += _check_samples(shard, task, scan)
        if entry and scan == FULL and (entry.shard_bytes, entry.shard_crc32c) != (stop, checksum):
            # Damage found above explains the difference.
            old = f"size or checksum of the file differ from {DATASET_INDEX}; is the index old?"
            problems = problems or [f"{old} (shard={url})"]
        keys = index.keys
    except PCRError as error:
        problems.append(str(error))
    return VerifyResult(tuple(redact(problem, url) for problem in problems), keys)


def _check_layout(
    url: str,
    index: ShardIndex,
    scan: Scan,
    view: memoryview,
) -> list[str]:
    """Compare headers, padding and trailer with the index and tables (SPEC.md section 5).

    Only the first difference is reported, because a renamed shard differs in each member.
    """
    last = check_scan(scan, index.num_groups)
    tables = [
        decode_tables(index, [place], [view[place.start : place.stop]], url=url)
        for place in index.table_places(0, last)
    ]
    stem = storage.file_name(url).removesuffix(".tar")
    for start, expected, what in _free_regions(index, tables, stem):
        # A staged copy may end after any group.
        if start < len(view) and view[start : start + len(expected)] != expected:
            return [f"expected {what} (shard={url}, offset={start})"]
    return []


def _free_regions(
    index: ShardIndex,
    tables: Sequence[GroupTable],
    stem: str,
) -> Iterator[tuple[int, bytes, str]]:
    """Yield (start, expected bytes, description) of regions without checksums, in order."""
    stop = index.head.body_stop
    name = index_name(index.schema, stem)
    yield 0, tar_header(name, stop - BLOCK), f"the index member's header, named {name}"
    for member in plan_members(index, tables, stem):
        start = round512(stop)
        yield stop, bytes(start - stop), "zero padding"
        header = member.header()
        yield start, header, f"the header of {member.name} as the index gives it"
        stop = start + len(header) + member.size
        literal = member.literal
        yield stop - len(literal), literal, f"the content of {member.name} as the index gives it"
    start = round512(stop)
    yield stop, bytes(start - stop), "zero padding"
    yield start, TRAILER, "two zero blocks at the end"


def _check_samples(
    shard: Shard,
    task: VerifyTask,
    scan: Scan,
) -> list[str]:
    """Check each piece's CRC, each image's size, and pixels against the source."""
    problems = []

    def note(error: PCRError) -> bool:
        problems.append(str(error))
        return True

    with shard.load(scan) as prefix:
        dims = prefix.index.dims
        rows = {key: row for row, key in enumerate(prefix.index.keys)}
        for sample in prefix.samples(on_error=note):
            key = sample["__key__"]
            found: list[str] = []
            try:
                for field in prefix.streams:
                    units = prefix.units_of(rows[key], field)
                    value = sample.get(field, [])
                    images = value if isinstance(value, list) else [value]
                    for image, unit in zip(images, units, strict=False):
                        frame = map_jpeg(image).frame
                        size = [frame.height, frame.width]
                        if size != dims[unit].tolist():
                            found.append(f"{field} is {size}, the index says {dims[unit]}")
                if task.sources is not None:
                    source = task.sources.get(key)
                    found += _compare(number_lists(sample), source, task.storage_options)
            except PCRError as error:
                found.append(str(error))
            problems += [f"{problem} (shard={task.url}, key={key})" for problem in found]
    return problems


def _compare(
    stored: Sample,
    source: SampleRef | None,
    options: storage.Options,
) -> Iterator[str]:
    """Compare a sample with its source: pixels of images, bytes of other fields."""
    if source is None:
        yield "the source has no such sample"
        return
    ranges = [(ref.url, ref.start, ref.stop) for ref in source.refs]
    values = storage.read_ranges(ranges, options=options)
    names = [ref.name for ref in source.refs]
    expected = dict(zip(names, values, strict=True)) | dict(source.known)
    for field in stored.keys() - {"__key__"} - expected.keys():
        yield f"the source has no field {field}"
    for field, original in expected.items():
        if isinstance(original, PCRError):
            raise original
        value = stored.get(field)
        if value is None:
            yield f"field {field} is missing"
        elif value == original:
            continue
        elif value[:2] != SOI:
            yield f"field {field} differs from the source"
        elif original[:2] != SOI:
            yield f"field {field} was re-encoded: its source is not a JPEG"
        elif not _have_equal_pixels(original, value):
            yield f"pixels of {field} differ from the source"


def _have_equal_pixels(source: bytes, jpeg: bytes) -> bool:
    parts = map_jpeg(source)
    mended = with_height(source, parts)
    mode = "cmyk" if parts.color in ("cmyk", "ycck") else "rgb"
    try:
        return np.array_equal(decode(jpeg, mode), decode(mended, mode))
    except UnsupportedJpeg:  # its pixels need too much memory relative to its bytes
        return make_baseline(jpeg) == make_baseline(source)
