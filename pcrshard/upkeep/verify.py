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
from ..format.shard_index import BLOCK, HEAD_STOP, ShardIndex, round512
from ..format.tar_members import TRAILER, index_name, plan_members, tar_header
from ..jpeg.markers import SOI, map_jpeg
from ..jpeg.pixels import decode
from ..jpeg.split import mend_headers
from ..reading.prefix import Sample
from ..reading.shard import Shard


class VerifyTask(NamedTuple):
    """One shard to verify; with ``sources``, also against these samples by key."""

    url: str
    entry: ShardEntry | None
    sources: dict[str, SampleRef] | None = None
    storage_options: storage.Options | None = None


class VerifyResult(NamedTuple):
    """Samples seen, and one line for each problem."""

    num_samples: int
    problems: tuple[str, ...]
    keys: tuple[str, ...]


def verify_shard(task: VerifyTask) -> VerifyResult:
    """Check every byte of a shard: index, checksums, and all that they do not cover.

    Reads head, index, the whole shard, and its samples once more as a job would (four requests), and their sources if given.

    Returns:
        The problems; none for a shard that is exactly what its index says.
    """
    shard = Shard(task.url, entry=task.entry, storage_options=task.storage_options)
    problems: list[str] = []
    try:
        head, index = shard.head, shard.index
        scan: Scan = FULL if task.entry is None or task.entry.scan is None else task.entry.scan
        stop = head.prefix_stop(scan) + (len(TRAILER) if scan == FULL else 0)
        with storage.open_range(task.url, 0, stop, options=task.storage_options) as view:
            problems += _check_bytes(task.url, index, view)
            whole = (stop, crc32c(view))
        if (size := storage.file_bytes(task.url, options=task.storage_options)) not in (stop, None):
            problems.append(f"expected {stop} bytes, the file has {size} (shard={task.url})")
        problems += _check_samples(shard, task, scan)
        if (
            scan == FULL
            and not problems
            and task.entry
            and (task.entry.shard_bytes, task.entry.shard_crc32c) != whole
        ):
            problems.append(
                f"size or checksum of the file differ from {DATASET_INDEX}; is the index old? (shard={task.url})"
            )
    except PCRError as error:
        return VerifyResult(0, (*problems, str(error)), ())
    return VerifyResult(index.num_samples, tuple(problems), index.keys)


def _check_bytes(url: str, index: ShardIndex, view: memoryview) -> Iterator[str]:
    """Compare headers, padding and trailer with what the index says they are (SPEC.md section 5)."""
    stem = storage.file_name(url).removesuffix(".tar")
    body_stop = HEAD_STOP + index.head.body_bytes
    name = bytes(view[:100]).rstrip(b"\0").decode(errors="replace")
    renamed = (
        index.schema.layout == "compact"
        and name.endswith(".pcr")
        and name != index_name(index.schema, stem)
    )
    if renamed and view[:BLOCK] == tar_header(name, body_stop - BLOCK):
        stem = name.removesuffix(".pcr")
        yield f"the shard was renamed: its members say {stem!r} (shard={url})"
    if view[:BLOCK] != tar_header(index_name(index.schema, stem), body_stop - BLOCK):
        yield f"the index member's header differs from what its index says (shard={url}, offset=0)"
    if any(view[body_stop : round512(body_stop)]):
        yield f"expected zero padding (shard={url}, offset={body_stop})"
    pos = round512(body_stop)
    for member in plan_members(index, stem):
        if pos >= len(view):  # a staged copy ends behind any group
            return
        header = member.header()
        if view[pos : pos + len(header)] != header:
            yield f"header of {member.name} differs from what the index says (shard={url}, offset={pos})"
        stop = pos + len(header) + member.size
        literal = view[stop - len(member.literal) : stop]
        if literal != member.literal:
            yield f"content of {member.name} differs from what the index says (shard={url}, offset={stop})"
        if any(view[stop : round512(stop)]):
            yield f"expected zero padding (shard={url}, offset={stop})"
        pos = round512(stop)
    if pos < len(view) and view[pos:] != TRAILER:
        yield f"expected two zero blocks at the end (shard={url}, offset={pos})"


def _check_samples(shard: Shard, task: VerifyTask, scan: Scan) -> list[str]:
    """Check each piece's CRC, that images are as large as the index says, and that pixels equal the source's."""
    problems: list[str] = []

    def note(error: PCRError) -> bool:
        problems.append(str(error))
        return True

    dims = dict(zip(shard.index.keys, shard.index.dims.tolist(), strict=True))
    streams = [field for field, _ in shard.index.schema.streams]
    for sample in shard.samples(scan, on_error=note):
        key = str(sample["__key__"])
        where = f"(shard={task.url}, key={key})"
        try:
            problems += [f"{line} {where}" for line in _check_images(sample, streams, dims[key])]
            if task.sources is not None:
                problems += [
                    f"{line} {where}"
                    for line in _compare(sample, task.sources.get(key), task.storage_options)
                ]
        except PCRError as error:
            problems.append(f"{error} {where}")
    return problems


def _check_images(sample: Sample, streams: list[str], dims: list[list[int]]) -> Iterator[str]:
    for field, (height, width) in zip(streams, dims, strict=True):
        jpeg = sample.get(field)
        if isinstance(jpeg, bytes):
            frame = map_jpeg(jpeg).frame
            if (frame.height, frame.width) != (height, width):
                yield f"{field} is {frame.width}x{frame.height}, the index says {width}x{height}"


def _compare(
    sample: Sample, source: SampleRef | None, options: storage.Options | None
) -> Iterator[str]:
    """Compare a sample with its source: pixels of images, bytes of other fields."""
    if source is None:
        yield "the source has no such sample"
        return
    ranges = [(ref.url, ref.start, ref.stop) for ref in source.refs]
    values = storage.read_ranges(ranges, options=options)
    expected: dict[str, bytes | PCRError] = {
        ref.name: value for ref, value in zip(source.refs, values, strict=True)
    }
    expected |= dict(source.known)
    for field in sample.keys() - {"__key__"} - expected.keys():
        yield f"the source has no field {field}"
    for field, value in expected.items():
        if isinstance(value, PCRError):
            raise value
        yield from _compare_field(field, value, sample.get(field))


def _compare_field(field: str, source: bytes, value: str | bytes | None) -> Iterator[str]:
    if not isinstance(value, bytes):
        yield f"field {field} is missing"
    elif value != source:
        if value[:2] != SOI:
            yield f"field {field} differs from the source"
        elif source[:2] != SOI:
            yield f"field {field} was re-encoded: its source is not a JPEG"
        else:
            yield from _compare_pixels(field, source, value)


def _compare_pixels(field: str, source: bytes, jpeg: bytes) -> Iterator[str]:
    found = map_jpeg(source)
    mode = "cmyk" if found.colour in ("cmyk", "ycck") else "rgb"
    expected, got = decode(mend_headers(source, found), mode), decode(jpeg, mode)
    if not np.array_equal(expected, got):
        shapes = (
            f": expected shape {expected.shape}, got {got.shape}"
            if expected.shape != got.shape
            else ""
        )
        yield f"pixels of {field} differ from the source{shapes}"
