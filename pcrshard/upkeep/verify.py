"""Verification that a dataset is intact and shows the same pixels as its source."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .. import storage
from ..encoding.resume_journal import read_journal
from ..encoding.sample_table import keys_of
from ..encoding.samples import SampleRef, read_samples
from ..encoding.shard_plan import list_samples
from ..encoding.shard_writer import count_images
from ..encoding.worker_processes import run_tasks
from ..errors import EncodeError, FormatError, PCRError
from ..format.dataset_index import DATASET_INDEX, DatasetIndex, ImageCounts, ShardEntry
from ..format.group_table import GroupTable, decode_tables
from ..format.sample_columns import COLUMNS, SampleColumns
from ..format.scan import FULL, Scan, check_scan
from ..format.shard_head import BLOCK, TRAILER, round512
from ..format.shard_index import ShardIndex, State
from ..format.tar_members import Member, index_name, plan_members
from ..jpeg.markers import SOI, map_jpeg
from ..jpeg.other_formats import decode
from ..jpeg.pixels import make_baseline
from ..reading.dataset_folder import index_folder, is_shard, open_dataset, read_column
from ..reading.prefix import Prefix, Sample, number_lists
from ..reading.shard import Shard
from ..redaction import redact_url


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
        workers: Number of worker processes; by default one per CPU that this process may use.
        progress: Called with (samples checked, total samples) after each shard.
        storage_options: fsspec storage options of the dataset and the source.

    Returns:
        One line per problem; empty if the dataset matches its indexes exactly.

    Raises:
        EncodeError: The source cannot be compared with this dataset.
        StorageError: The dataset index or the source cannot be read.
    """
    with tempfile.TemporaryDirectory() as scratch:
        return _verify(url, against, workers, progress, storage_options, scratch)


def _verify(
    url: str,
    against: str | None,
    workers: int | None,
    progress: Callable[[int, int], None] | None,
    storage_options: storage.Options,
    scratch: str,
) -> list[str]:
    """Verify a dataset; tars of the source that must be unpacked go to the folder ``scratch``."""
    index, urls = open_dataset(url, storage_options=storage_options)
    if against and index.scan is not None:
        raise EncodeError(
            f"--against needs full fidelity, this staged copy holds scans 1 to {index.scan}: "
            "verify the dataset itself"
        )
    sources: _Sources | None = None
    missing: set[str] = set()
    if against:
        journal = read_journal(storage.parent(urls[0]), options=storage_options)
        options = replace(journal.options, classes=journal.options.classes or index.classes)
        if options.resize_short:
            raise EncodeError(
                f"the images were resized to {options.resize_short} pixels when they were encoded, "
                "so they differ from the source: verify without --against"
            )
        if storage.file_name(against.rstrip("/")) == options.split:
            options = replace(options, split=None)  # the split itself, not the folder of all
        samples = list_samples(against, options, storage_options, scratch=scratch).samples
        sources = _Sources(samples, {key: row for row, key in enumerate(keys_of(samples))})
        skipped = {row.key for row in journal.unlayered if row.outcome == "skipped"}
        missing = set() if is_shard(url) else sources.rows.keys() - skipped

    def task(number: int) -> VerifyTask:
        url = urls[number]
        own = sources and _sources_of(url, sources, storage_options)
        return VerifyTask(url, index.shards[number], own, storage_options)

    claims = _Claims(index, urls, storage_options)
    done = 0
    problems = claims.missing
    with closing(run_tasks(verify_shard, task, range(len(urls)), workers=workers)) as results:
        for number, result in results:
            problems += result.problems
            problems += claims.compare(number, result)
            # If a shard is unreadable, it is unknown which samples are missing.
            if result.keys:
                missing.difference_update(result.keys)
            else:
                missing = set()
            if progress is not None:
                done += index.shards[number].num_samples
                progress(done, index.num_samples)
    problems += claims.compare_counts()
    return problems + [f"the source's sample {key} is in no shard" for key in sorted(missing)]


class _Claims:
    """What ``pcr.json`` and ``pcr.columns`` say of the samples of all shards."""

    def __init__(self, index: DatasetIndex, urls: Sequence[str], options: storage.Options) -> None:
        self._claimed, self._urls = index.counts, urls
        self._found: ImageCounts | None = ImageCounts()
        self._starts = np.cumsum([0, *index.shards.num_samples])
        folder, store = index_folder(index, urls), storage.Store.of(options)
        names = [each.name for each in index.columns]
        read = [read_column(index, folder, name, storage_options=store) for name in names]
        known = zip(names, read, strict=True)
        self._columns = {name: column for name, column in known if column is not None}
        self.missing = [
            f"{COLUMNS}: the {name} are missing, damaged or of other shards"
            for name in names
            if name not in self._columns
        ]

    def compare(self, number: int, result: VerifyResult) -> Iterator[str]:
        """Yield what differs from a shard, and count its images."""
        self._found = self._found and result.counts and self._found.plus(result.counts)
        for name, claimed in self._columns.items():
            own = getattr(result.columns, name, None)
            start, stop = self._starts[number : number + 2]
            if own is not None and not np.array_equal(claimed[start:stop], own):
                yield f"{COLUMNS}: the {name} are not those of {redact_url(self._urls[number])}"

    def compare_counts(self) -> Iterator[str]:
        """Yield what differs from the images of all shards, if they could be read."""
        if self._found and self._claimed not in (None, self._found):
            yield f"{DATASET_INDEX}: expected {self._found}, got {self._claimed}"


def _sources_of(
    url: str,
    sources: _Sources,
    storage_options: storage.Options,
) -> dict[str, SampleRef]:
    """Return only the sources of a shard's samples, to keep the task small."""
    try:
        keys = Shard(url, storage_options=storage_options).index.keys
    except PCRError:
        return {}
    rows = sources.rows
    return {key: sources.samples[rows[key]] for key in keys if key in rows}


class _Sources(NamedTuple):
    """The samples of the source, and the place of each key."""

    samples: Sequence[SampleRef]
    rows: dict[str, int]


class VerifyTask(NamedTuple):
    """A shard to verify; with ``sources``, also against these samples by key."""

    url: str
    entry: ShardEntry | None
    sources: dict[str, SampleRef] | None = None
    storage_options: storage.Options = None


class VerifyResult(NamedTuple):
    """What is known of a shard.

    Attributes:
        problems: One line per problem.
        keys: Keys of the samples; none if it is unreadable.
        counts: Numbers of images; ``None`` if it is unreadable.
        columns: The columns of its samples; ``None`` if it is unreadable.
    """

    problems: tuple[str, ...]
    keys: tuple[str, ...]
    counts: ImageCounts | None = None
    columns: SampleColumns | None = None


def verify_shard(task: VerifyTask) -> VerifyResult:
    """Check every byte of a shard: index, checksums, and bytes not covered by checksums.

    Reads the head, the index, the whole shard, and its samples again as a job would (four
    requests), and their sources if given. Of a plain tar, the samples are all that is checked: the
    tar is the one that was indexed, and has the checksums of the index, if it has any.

    Returns:
        The problems; none if the shard matches its index exactly.
    """
    url, entry = task.url, task.entry
    shard = Shard(url, entry=entry, storage_options=task.storage_options)
    problems: list[PCRError] = []
    keys: tuple[str, ...] = ()
    counts = columns = None
    try:
        index = shard.index
        scan = (entry and entry.scan) or FULL
        keys = index.keys
        if not shard.is_plain_tar:
            problems += _check_file(url, index, scan, task.storage_options)
        problems += _check_samples(shard, task, scan)
        counts, columns = count_images(index), SampleColumns.of(index)
    except PCRError as error:
        problems.append(error)
    return VerifyResult(tuple(map(str, problems)), keys, counts, columns)


def _check_file(
    url: str, index: ShardIndex, scan: Scan, options: storage.Options
) -> list[PCRError]:
    """Check what of the file of a shard no checksum covers, and its size."""
    stop = index.head.prefix_stop(scan) + (len(TRAILER) if scan == FULL else 0)
    data = storage.read(url, 0, stop, options=options)
    problems = check_layout(url, index, scan, data.data)
    del data  # its memory serves the next read
    size = storage.file_bytes(url, options=options)
    # A staged copy may be growing.
    if scan == FULL and size not in (stop, None):
        problems.append(PCRError(f"expected a file of {stop} bytes, got {size}", url=url))
    return problems


def check_layout(
    url: str,
    index: ShardIndex,
    scan: Scan,
    view: memoryview,
) -> list[PCRError]:
    """Compare headers, padding and trailer with the index and tables (SPEC.md section 5).

    Only the first difference is reported, because a renamed shard differs in each member. In the
    copy of a plain tar, headers and padding are whatever they were.
    """
    if index.tar is not None:
        return []
    last = check_scan(scan, index.num_groups)
    tables = [decode_tables(index, [place], view, url=url) for place in index.table_places(0, last)]
    stem = storage.file_name(url).removesuffix(".tar")
    for start, expected, what in _free_regions(index, tables, stem):
        # A staged copy may end after any group.
        if start < len(view) and view[start : start + len(expected)] != expected:
            return [PCRError(f"expected {what}", url=url, offset=start)]
    return []


def _free_regions(
    index: ShardIndex,
    tables: Sequence[GroupTable],
    stem: str,
) -> Iterator[tuple[int, bytes, str]]:
    """Yield (start, expected bytes, description) of regions without checksums, in order."""
    first = Member(index_name(index.schema, stem), 0, index.head.body_stop - BLOCK)
    stop = 0
    for member in (first, *plan_members(index, tables, stem)):
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


def _check_samples(shard: Shard, task: VerifyTask, scan: Scan) -> Iterator[PCRError]:
    """Check each piece's CRC, each image's size, and pixels against the source."""
    prefix = shard.load(scan)
    for row, key in enumerate(prefix.index.keys):
        try:
            for problem in _check_sample(prefix, row, task):
                yield PCRError(problem, url=task.url, key=key)
        except PCRError as error:
            yield error if error.key else PCRError(str(error), url=task.url, key=key)


def _check_sample(prefix: Prefix, row: int, task: VerifyTask) -> Iterator[str]:
    sample = prefix.sample(row)
    for field in prefix.streams:
        value = sample.get(field, [])
        images = value if isinstance(value, list) else [value]
        for image, unit in zip(images, prefix.units_of(row, field), strict=False):
            if prefix.index.states[unit] != State.LAYERED:
                continue
            frame = map_jpeg(image).frame
            size = [frame.height, frame.width]
            dims = prefix.index.dims[unit].tolist()
            if size != dims:
                yield f"{field} is {size}, the index says {dims}"
    if task.sources is not None:
        source = task.sources.get(sample["__key__"])
        yield from _compare(number_lists(sample), source, task.storage_options)


def _compare(
    stored: Sample,
    source: SampleRef | None,
    options: storage.Options,
) -> Iterator[str]:
    """Compare a sample with its source: pixels of images, bytes of other fields."""
    if source is None:
        yield "the source has no such sample"
        return
    ((_, expected),) = read_samples([source], options)
    if isinstance(expected, PCRError):
        raise expected
    for field in stored.keys() - {"__key__"} - expected.keys():
        yield f"the source has no field {field}"
    for field, original in expected.items():
        value = stored.get(field)
        if value is None:
            yield f"field {field} is missing"
        elif value != original and not (
            value[:2] == original[:2] == SOI and _have_equal_pixels(original, value)
        ):
            yield f"pixels or bytes of {field} differ from the source"


def _have_equal_pixels(source: bytes, jpeg: bytes) -> bool:
    mode = "cmyk" if map_jpeg(source).color in ("cmyk", "ycck") else "rgb"
    try:
        return np.array_equal(decode(jpeg, mode), decode(source, mode))
    except FormatError:  # too much memory for its bytes, or sampling that no decoder upsamples
        return make_baseline(jpeg) == make_baseline(source)
