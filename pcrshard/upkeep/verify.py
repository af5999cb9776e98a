"""Verification that a dataset is intact and shows the same pixels as its source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from .. import storage
from ..checksum import crc32c
from ..encoding.resume_journal import SKIPPED, encode_options, read_report
from ..encoding.samples import SampleRef
from ..encoding.shard_plan import list_samples
from ..encoding.sources import NO_SPLIT, list_source
from ..encoding.worker_processes import run_tasks
from ..errors import EncodeError, PCRError, UnsupportedJpeg
from ..format.dataset_index import DATASET_INDEX, ShardEntry
from ..format.group_table import GroupTable, decode_tables
from ..format.names import numbered
from ..format.scan import FULL, Scan, check_scan
from ..format.shard_index import BLOCK, ShardIndex, round512
from ..format.tar_members import TRAILER, index_name, plan_members, tar_header
from ..jpeg.markers import SOI, map_jpeg
from ..jpeg.pixels import decode, make_baseline
from ..jpeg.split import with_height
from ..reading.dataset_folder import open_dataset
from ..reading.prefix import Prefix, Sample, number_lists
from ..reading.shard import Shard
from ..redaction import redact


def verify(
    url: str,
    *,
    against: str | None = None,
    prefix_keys: bool = False,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    storage_options: storage.Options = None,
) -> list[str]:
    """Check every byte of a dataset or shard, and optionally all pixels against the source.

    Args:
        url: A dataset folder, its ``pcr.json``, or one shard.
        against: The source that was encoded. It is listed as by ``encode``, with the options in
            the dataset's journal.
        prefix_keys: As given to ``encode``, for a dataset without a journal.
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
    if against:
        options = encode_options(folder, options=storage_options)
        options = replace(options, prefix_keys=options.prefix_keys or prefix_keys, classes=classes)
        if options.split not in (None, NO_SPLIT):
            # The source may be the split itself or the folder of all splits.
            splits = list_source(against, options=storage_options).splits
            options = replace(options, split=options.split if splits else None)
        samples = list_samples(against, options, storage_options).samples
        sources = {sample.key: sample for sample in samples}
    tasks = {
        number: VerifyTask(
            shard, entry, sources and _sources_of(shard, sources, storage_options), storage_options
        )
        for number, (shard, entry) in enumerate(shards)
    }
    total = sum(entry.num_samples if entry else 1 for _, entry in shards)
    done = 0
    problems: list[str] = []
    missing = set(sources or ()).difference(
        row.key for row in read_report(folder, SKIPPED, options=storage_options)
    )
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
    """The number of samples seen, and one line per problem."""

    num_samples: int
    problems: tuple[str, ...]
    keys: tuple[str, ...]


def verify_shard(task: VerifyTask) -> VerifyResult:
    """Check every byte of a shard: index, checksums, and bytes not covered by checksums.

    Reads the head, the index, the whole shard, and its samples again as a job would (four
    requests), and their sources if given.

    Returns:
        The problems; none if the shard matches its index exactly.
    """
    shard = Shard(task.url, entry=task.entry, storage_options=task.storage_options)
    problems: list[str] = []
    try:
        index = shard.index
        scan = (task.entry and task.entry.scan) or FULL
        stop = index.head.prefix_stop(scan) + (len(TRAILER) if scan == FULL else 0)
        data = storage.read(task.url, 0, stop, options=task.storage_options)
        problems += _check_layout(task.url, index, scan, data.data)
        checksum = crc32c(data)
        del data  # its memory serves the next read
        problems += _check_size(task, stop)
        problems += _check_samples(shard, task, scan)
        if scan == FULL and task.entry and not problems:
            problems += _check_entry(task.url, task.entry, stop, checksum)
    except PCRError as error:
        return _result(task, 0, [*problems, str(error)], ())
    return _result(task, index.num_samples, problems, index.keys)


def _result(
    task: VerifyTask,
    num_samples: int,
    problems: list[str],
    keys: tuple[str, ...],
) -> VerifyResult:
    """Return the result, with secrets redacted from the problems."""
    shown = tuple(redact(problem, task.url) for problem in problems)
    return VerifyResult(num_samples, shown, keys)


def _check_size(task: VerifyTask, expected: int) -> Iterator[str]:
    size = storage.file_bytes(task.url, options=task.storage_options)
    if size not in (expected, None):
        yield f"expected a file of {expected} bytes, got {size} (shard={task.url})"


def _check_entry(
    url: str,
    entry: ShardEntry,
    num_bytes: int,
    checksum: int,
) -> Iterator[str]:
    if (entry.shard_bytes, entry.shard_crc32c) != (num_bytes, checksum):
        problem = f"size or checksum of the file differ from {DATASET_INDEX}; is the index old?"
        yield f"{problem} (shard={url})"


def _check_layout(
    url: str,
    index: ShardIndex,
    scan: Scan,
    view: memoryview,
) -> Iterator[str]:
    """Compare headers, padding and trailer with the index and tables (SPEC.md section 5)."""
    name = storage.file_name(url).removesuffix(".tar")
    stem = _written_stem(index, view) or name
    if stem != name:
        yield f"the shard was renamed: its members say {stem!r} (shard={url})"
    last = check_scan(scan, index.num_groups)
    tables = [
        decode_tables(index, [place], [view[place.start : place.stop]], url=url)
        for place in index.table_places(0, last)
    ]
    for start, expected, complaint in _free_regions(index, tables, stem):
        # A staged copy may end after any group.
        if start < len(view) and view[start : start + len(expected)] != expected:
            yield f"{complaint} (shard={url}, offset={start})"


def _index_header(index: ShardIndex, name: str) -> bytes:
    return tar_header(name, index.head.body_stop - BLOCK)


def _written_stem(index: ShardIndex, view: memoryview) -> str | None:
    """Return the shard's name from its first member, if that header is valid and includes it."""
    name = bytes(view[:100]).rstrip(b"\0").decode(errors="replace")
    is_name = index.schema.layout == "compact" and name.endswith(".pcr")
    if is_name and view[:BLOCK] == _index_header(index, name):
        return name.removesuffix(".pcr")
    return None


def _free_regions(
    index: ShardIndex,
    tables: Sequence[GroupTable],
    stem: str,
) -> Iterator[tuple[int, bytes, str]]:
    """Yield (start, expected bytes, complaint) of regions without checksums, in order."""
    differs = "differs from what the index says"
    header = _index_header(index, index_name(index.schema, stem))
    yield 0, header, f"the index member's header {differs}"
    stop = index.head.body_stop
    for member in plan_members(index, tables, stem):
        start = round512(stop)
        yield stop, bytes(start - stop), "expected zero padding"
        header = member.header()
        yield start, header, f"header of {member.name} {differs}"
        stop = start + len(header) + member.size
        literal = member.literal
        yield stop - len(literal), literal, f"content of {member.name} {differs}"
    start = round512(stop)
    yield stop, bytes(start - stop), "expected zero padding"
    yield start, TRAILER, "expected two zero blocks at the end"


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
        rows = {key: row for row, key in enumerate(prefix.index.keys)}
        for sample in prefix.samples(on_error=note):
            key = sample["__key__"]
            found = _check_sample(sample, task, _image_sizes(prefix, rows[key]))
            problems += [f"{problem} (shard={task.url}, key={key})" for problem in found]
    return problems


def _image_sizes(prefix: Prefix, row: int) -> dict[str, list[list[int]]]:
    """Return the height and width of each image of a sample, by field."""
    dims = prefix.index.dims
    return {field: [dims[unit].tolist() for unit in units] for field, units in prefix.units(row)}


def _check_sample(
    sample: Sample,
    task: VerifyTask,
    dims: dict[str, list[list[int]]],
) -> Iterator[str]:
    try:
        for field, sizes in dims.items():
            value = sample.get(field, [])
            images = value if isinstance(value, list) else [value]
            for image, (height, width) in zip(images, sizes, strict=False):
                frame = map_jpeg(image).frame
                if (frame.height, frame.width) != (height, width):
                    size = f"{frame.width}x{frame.height}"
                    yield f"{field} is {size}, the index says {width}x{height}"
        if task.sources is not None:
            source = task.sources.get(sample["__key__"])
            yield from _compare(sample, source, task.storage_options)
    except PCRError as error:
        yield str(error)


def _compare(
    sample: Sample,
    source: SampleRef | None,
    options: storage.Options,
) -> Iterator[str]:
    """Compare a sample with its source: pixels of images, bytes of other fields."""
    if source is None:
        yield "the source has no such sample"
        return
    ranges = [(ref.url, ref.start, ref.stop) for ref in source.refs]
    values = storage.read_ranges(ranges, options=options)
    names = [
        ref.name if ref.place is None else numbered(ref.name, ref.place) for ref in source.refs
    ]
    expected = dict(zip(names, values, strict=True)) | dict(source.known)
    stored = number_lists(sample)
    for field in stored.keys() - {"__key__"} - expected.keys():
        yield f"the source has no field {field}"
    for field, value in expected.items():
        if isinstance(value, PCRError):
            raise value
        yield from _compare_field(field, value, stored.get(field))


def _compare_field(
    field: str,
    source: bytes,
    value: bytes | None,
) -> Iterator[str]:
    if value is None:
        yield f"field {field} is missing"
    elif value == source:
        return
    elif value[:2] != SOI:
        yield f"field {field} differs from the source"
    elif source[:2] != SOI:
        yield f"field {field} was re-encoded: its source is not a JPEG"
    else:
        yield from _compare_pixels(field, source, value)


def _compare_pixels(
    field: str,
    source: bytes,
    jpeg: bytes,
) -> Iterator[str]:
    parts = map_jpeg(source)
    mended = with_height(source, parts)
    mode: Literal["cmyk", "rgb"] = "cmyk" if parts.color in ("cmyk", "ycck") else "rgb"
    try:
        got, expected = decode(jpeg, mode), decode(mended, mode)
    except UnsupportedJpeg:  # its pixels need too much memory relative to its bytes
        if make_baseline(jpeg) != make_baseline(mended):
            yield f"coefficients of {field} differ from the source"
        return
    if expected.shape != got.shape:
        shapes = f"expected shape {expected.shape}, got {got.shape}"
        yield f"pixels of {field} differ from the source: {shapes}"
    elif not np.array_equal(expected, got):
        yield f"pixels of {field} differ from the source"
