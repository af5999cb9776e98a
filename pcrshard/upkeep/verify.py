"""Prove that a dataset is whole, and that it shows the same pixels as its source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .. import storage
from ..checksum import crc32c
from ..encoding.sources import SampleRef
from ..errors import PCRError
from ..format.dataset_index import DATASET_INDEX, ShardEntry
from ..format.scan import FULL, Scan
from ..format.shard_index import BLOCK, ShardIndex, round512
from ..format.tar_members import TRAILER, index_name, plan_members, tar_header
from ..jpeg.markers import SOI, map_jpeg
from ..jpeg.pixels import decode
from ..jpeg.split import mend_headers
from ..reading.prefix import Sample
from ..reading.shard import Shard
from ..redaction import redact


class VerifyTask(NamedTuple):
    """One shard to verify; with ``sources``, also against these samples by key."""

    url: str
    entry: ShardEntry | None
    sources: dict[str, SampleRef] | None = None
    storage_options: storage.Options = None


class VerifyResult(NamedTuple):
    """Samples seen, and one line for each problem."""

    num_samples: int
    problems: tuple[str, ...]
    keys: tuple[str, ...]


def verify_shard(task: VerifyTask) -> VerifyResult:
    """Check every byte of a shard: index, checksums, and all that they do not cover.

    Reads head, index, the whole shard, and its samples once more as a job would (four requests),
    and their sources if given.

    Returns:
        The problems; none for a shard that is exactly what its index says.
    """
    shard = Shard(task.url, entry=task.entry, storage_options=task.storage_options)
    problems: list[str] = []
    try:
        index = shard.index
        scan = (task.entry and task.entry.scan) or FULL
        stop = index.head.prefix_stop(scan) + (len(TRAILER) if scan == FULL else 0)
        with storage.open_range(task.url, 0, stop, options=task.storage_options) as view:
            problems += _check_layout(task.url, index, view)
            checksum = crc32c(view)
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
    """The result, with what may be shown of the problems."""
    shown = tuple(redact(problem, task.url) for problem in problems)
    return VerifyResult(num_samples, shown, keys)


def _check_size(task: VerifyTask, expected: int) -> Iterator[str]:
    size = storage.file_bytes(task.url, options=task.storage_options)
    if size not in (expected, None):
        yield f"expected {expected} bytes, the file has {size} (shard={task.url})"


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
    view: memoryview,
) -> Iterator[str]:
    """Compare headers, padding and trailer with what the index says (SPEC.md section 5)."""
    name = storage.file_name(url).removesuffix(".tar")
    stem = _written_stem(index, view) or name
    if stem != name:
        yield f"the shard was renamed: its members say {stem!r} (shard={url})"
    for start, expected, complaint in _free_regions(index, stem):
        # A staged copy ends after any group.
        if start < len(view) and view[start : start + len(expected)] != expected:
            yield f"{complaint} (shard={url}, offset={start})"


def _index_header(index: ShardIndex, name: str) -> bytes:
    return tar_header(name, index.head.body_stop - BLOCK)


def _written_stem(index: ShardIndex, view: memoryview) -> str | None:
    """The shard's name as its first member says it, where that header is sound and has the name."""
    name = bytes(view[:100]).rstrip(b"\0").decode(errors="replace")
    is_name = index.schema.layout == "compact" and name.endswith(".pcr")
    if is_name and view[:BLOCK] == _index_header(index, name):
        return name.removesuffix(".pcr")
    return None


def _free_regions(index: ShardIndex, stem: str) -> Iterator[tuple[int, bytes, str]]:
    """(start, expected bytes, complaint) of all that the checksums leave free, in order."""
    differs = "differs from what the index says"
    header = _index_header(index, index_name(index.schema, stem))
    yield 0, header, f"the index member's header {differs}"
    stop = index.head.body_stop
    for member in plan_members(index, stem):
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
    """Check each piece's CRC, each image's size, and that pixels equal the source's."""
    problems = []

    def note(error: PCRError) -> bool:
        problems.append(str(error))
        return True

    dims = dict(zip(shard.index.keys, shard.index.dims.tolist(), strict=True))
    streams = [field for field, _ in shard.index.schema.streams]
    for sample in shard.samples(scan, on_error=note):
        key = sample["__key__"]
        sizes = dict(zip(streams, dims[key], strict=True))
        found = _check_sample(sample, task, sizes)
        problems += [f"{problem} (shard={task.url}, key={key})" for problem in found]
    return problems


def _check_sample(
    sample: Sample,
    task: VerifyTask,
    dims: dict[str, list[int]],
) -> Iterator[str]:
    try:
        for field in dims.keys() & sample.keys():
            height, width = dims[field]
            frame = map_jpeg(sample[field]).frame
            if (frame.height, frame.width) != (height, width):
                yield f"{field} is {frame.width}x{frame.height}, the index says {width}x{height}"
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
    names = [ref.name for ref in source.refs]
    values = storage.read_ranges(ranges, options=options)
    expected = dict(zip(names, values, strict=True)) | dict(source.known)
    for field in sample.keys() - {"__key__"} - expected.keys():
        yield f"the source has no field {field}"
    for field, value in expected.items():
        if isinstance(value, PCRError):
            raise value
        yield from _compare_field(field, value, sample.get(field))


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
    mode = "cmyk" if parts.colour in ("cmyk", "ycck") else "rgb"
    expected = decode(mend_headers(source, parts), mode)
    got = decode(jpeg, mode)
    if expected.shape != got.shape:
        shapes = f"expected shape {expected.shape}, got {got.shape}"
        yield f"pixels of {field} differ from the source: {shapes}"
    elif not np.array_equal(expected, got):
        yield f"pixels of {field} differ from the source"
