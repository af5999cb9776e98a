"""A whole dataset to shards, in parallel.

The plan (which sample is in which shard) is a pure function of the source listing and the seed; each shard is then an independent task, so the
bytes do not depend on how many workers there are, or on how often the run was stopped.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .. import storage
from ..errors import CorruptJpeg, EncodeError, FormatError, PCRError
from ..format.dataset_index import DatasetIndex
from ..format.names import JPEG_EXTENSIONS, check_name, shard_name
from ..jpeg.markers import SOI, map_jpeg
from ..jpeg.pixels import to_jpeg
from .resume_journal import SKIPPED, Journal, Part, ShardResult, Skipped, read_skipped
from .shard_writer import (
    EncodedSample,
    ShardFormat,
    encode_sample,
    write_dataset_index,
    write_shard,
)
from .sources import CONVERTIBLE, SampleRef, Source, list_source
from .worker_processes import run_tasks, worker_pool

_log = logging.getLogger("pcrshard")
_SAMPLES_PER_READ = 64
# Tasks given to an executor of the user's at a time: enough for a cluster, few enough for memory.
_IN_FLIGHT = 1024
Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class EncodeOptions:
    """How a dataset is encoded.

    Attributes:
        name: Shards' name before the number.
        num_shards: Number of shards; sizes differ by at most one sample.
        samples_per_shard: At most so many samples a shard, if ``num_shards`` is not given; by default 1024, and up to 8 shards if there are fewer.
        seed: Of the global shuffle before sharding; ``None`` keeps the source's order.
        on_error: ``raise``, or ``skip`` to list bad images in ``skipped.jsonl`` and go on.
        reencode_quality: JPEG quality for sources that are not JPEG; without it they are refused.
        resize_short: Shorter side in pixels that larger images are resized to. Lossy.
        prefix_keys: Put a tar's name before its keys.
        fmt: Script and layout.
    """

    name: str = "data"
    num_shards: int | None = None
    samples_per_shard: int | None = None
    seed: int | None = 0
    on_error: str = "raise"
    reencode_quality: int | None = None
    resize_short: int | None = None
    prefix_keys: bool = False
    fmt: ShardFormat = dataclasses.field(default_factory=ShardFormat)

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.num_shards is not None and self.samples_per_shard is not None:
            raise EncodeError("expected num_shards or samples_per_shard, got both")
        if self.on_error not in ("raise", "skip"):
            raise EncodeError(f"expected on_error 'raise' or 'skip', got {self.on_error!r}")
        for name in ("num_shards", "samples_per_shard", "resize_short"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EncodeError(f"expected {name} above 0, got {value}")
        if self.reencode_quality is not None and not 1 <= self.reencode_quality <= 100:
            raise EncodeError(f"expected reencode_quality of 1 to 100, got {self.reencode_quality}")


class ShardTask(NamedTuple):
    """One shard to write; picklable, so that any executor can run it."""

    url: str
    samples: list[SampleRef]
    names: tuple[tuple[str, ...], tuple[str, ...]]
    options: EncodeOptions
    src_options: storage.Options | None
    dst_options: storage.Options | None


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
    """Encode a dataset: list, shuffle, split into even shards, write them in parallel, then ``pcr.json``.

    Reads each source file once; holds one shard in memory per worker. The same source and options give the same bytes, for any
    number of workers, resumed or not. Worker processes may be spawned: a script that calls this needs ``if __name__ == "__main__":``.

    Args:
        src: Images, tars or a list; see :func:`pcrshard.encoding.sources.list_source`.
        dst: Folder for the shards, local or an fsspec URL.
        options: How.
        workers: Worker processes; by default one for each core.
        resume: Go on with an earlier run in ``dst``: shards that are whole are kept.
        executor: Run the shard tasks on this executor instead of worker processes.
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
    """Encode one part of a dataset's shards; parts run at any time, in any order, on any machines that share ``dst``.

    Every part lists the source. The one that finds all shards done writes ``pcr.json``; a run without parts and with ``resume`` completes what parts
    have left.

    Args:
        src: As for :func:`encode`, like all that is not said here.
        dst: Folder for the shards.
        part: (I, N): the shards whose number is I modulo N, of N parts; ``None`` for all shards.
        options: How; the same for all parts.
        workers: Worker processes.
        resume: Go on with an earlier run of this part.
        executor: Run the shard tasks on this executor.
        progress: Called with this part's samples.
        src_options: fsspec storage options of the source.
        dst_options: fsspec storage options of the destination.

    Returns:
        The dataset index, or ``None`` while other parts have shards to write.

    Raises:
        EncodeError: The source or the destination is not as it should be, or another run is writing there.
    """
    if getattr(
        multiprocessing.current_process(), "_inheriting", False
    ):  # what multiprocessing itself looks at
        raise EncodeError(
            'a worker process imports the program that started it: encode below `if __name__ == "__main__":` only'
        )
    if part is not None and not 0 <= part[0] < part[1]:
        raise EncodeError(f"expected a part I/N with I from 0 to N-1, got {part[0]}/{part[1]}")
    src, dst = os.fspath(src), storage.plain_path(os.fspath(dst))
    source = list_source(src, prefix_keys=options.prefix_keys, options=src_options)
    source = source._replace(samples=convert_names(source.samples, options))
    names = field_names(source.samples)
    if unknown := set(options.fmt.preview_fields) - set(names[1]):
        raise EncodeError(f"expected preview fields of {list(names[1])}, got {sorted(unknown)}")
    if source.ignored:
        _log.warning(
            "%s: left out %d files that are not images: %s",
            src,
            len(source.ignored),
            _some(source.ignored),
        )
    _check_apart(src, source, dst)
    shards = dict(enumerate(plan_shards(source.samples, options)))
    mine = {
        number: samples
        for number, samples in shards.items()
        if part is None or number % part[1] == part[0]
    }
    journal = Journal(dst, _fingerprint(source, options), options.on_error, dst_options, part)
    with journal.open(resume):
        tasks = {
            number: ShardTask(
                storage.join(dst, shard_name(options.name, number)),
                samples,
                names,
                options,
                src_options,
                dst_options,
            )
            for number, samples in mine.items()
            if number not in journal.results
        }
        journal.begin([shard_name(options.name, number) for number in tasks])
        _run(tasks, journal, workers, executor, _Count(sum(map(len, mine.values())), progress))
        return _finish(journal, len(shards), options, source.classes)


def _check_apart(src: str, source: Source, dst: str) -> None:
    """Refuse shards among their sources: a later run would take one for the other, or replace it."""
    if not storage.is_local(dst):
        return
    target = os.path.realpath(dst)
    folders = {
        url.rpartition("/")[0]
        for sample in source.samples
        for ref in sample.refs
        if (url := ref.url).endswith(".tar")
    }
    if storage.is_local(src) and os.path.isdir(src):
        folders.add(src)
    for folder in map(os.path.realpath, filter(storage.is_local, folders)):
        if target == folder or (
            folder == os.path.realpath(src) and target.startswith(os.path.join(folder, ""))
        ):
            raise EncodeError(
                f"expected a folder apart from the source, got {dst}, which is in {folder}"
            )


class _Count(NamedTuple):
    """Samples to do, and whom to tell how many are done."""

    total: int
    progress: Progress | None


def _run(
    tasks: dict[int, ShardTask],
    journal: Journal,
    workers: int | None,
    executor: concurrent.futures.Executor | None,
    count: _Count,
) -> None:
    done = count.total - sum(len(task.samples) for task in tasks.values())
    try:
        with worker_pool(workers, len(tasks), executor) as pool:
            if (
                pool is not None
            ):  # the largest first, so that no worker has a large one left when the others are done
                tasks = dict(sorted(tasks.items(), key=lambda item: -_source_bytes(item[1])))
            for number, result in run_tasks(
                pool, encode_shard, tasks, in_flight=_IN_FLIGHT if executor else None
            ):
                journal.add(number, result)
                done += len(tasks[number].samples)
                if count.progress:
                    count.progress(done, count.total)
    finally:
        journal.save()


def _source_bytes(task: ShardTask) -> int:
    """Bytes of a shard's sources, as far as listing them has told."""
    return sum(
        ref.stop - ref.start
        for sample in task.samples
        for ref in sample.refs
        if ref.stop is not None
    )


def _some(names: Sequence[str], count: int = 5) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


def convert_names(samples: list[SampleRef], options: EncodeOptions) -> list[SampleRef]:
    """Rename the image of samples that have no JPEG but another image, if they are to be re-encoded."""
    if options.reencode_quality is None:
        return samples
    return [_convert_name(sample) for sample in samples]


def _convert_name(sample: SampleRef) -> SampleRef:
    if any(_is_jpeg_name(ref.name) for ref in sample.refs):
        return sample
    image = next((ref for ref in sample.refs if ref.name in CONVERTIBLE), None)
    return sample._replace(
        refs=tuple(ref._replace(name="jpg") if ref is image else ref for ref in sample.refs)
    )


def _is_jpeg_name(name: str) -> bool:
    return name.rpartition(".")[2] in JPEG_EXTENSIONS


def field_names(samples: Sequence[SampleRef]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All (streams, other fields) of a dataset, each in the order they are first met.

    Raises:
        EncodeError: There is no JPEG field.
    """
    names = dict.fromkeys(
        name
        for sample in samples
        for name in (*(ref.name for ref in sample.refs), *(k for k, _ in sample.known))
    )
    streams = tuple(name for name in names if _is_jpeg_name(name))
    if not streams and {"pcr", "scan01"} <= names.keys():
        raise EncodeError(
            "expected images or WebDataset tars, got PCR shards; `pcrshard export` turns them back"
        )
    if not streams:
        raise EncodeError(
            f"expected a JPEG field, found {sorted(names)}; --reencode-quality Q converts PNG, WebP, BMP (lossy)"
        )
    return streams, tuple(name for name in names if not _is_jpeg_name(name))


def plan_shards(samples: list[SampleRef], options: EncodeOptions) -> list[list[SampleRef]]:
    """Shuffle all samples by the seed, then cut them into even shards; pure.

    Returns:
        Shards whose sizes differ by at most one.
    """
    total = len(samples)
    if options.num_shards is not None:
        count = options.num_shards
        if count > total:
            raise EncodeError(f"expected at most {total} shards for {total} samples, got {count}")
    elif options.samples_per_shard is not None:
        count = -(-total // options.samples_per_shard)
    else:
        count = default_num_shards(total)
    order = list(range(total))
    if options.seed is not None:
        random.Random(options.seed).shuffle(order)
    bounds = [total * i // count for i in range(count + 1)]
    return [[samples[i] for i in order[a:b]] for a, b in itertools.pairwise(bounds)]


def default_num_shards(num_samples: int) -> int:
    """Shards of at most 1024 samples, and up to 8 of them, of at least 16 samples, so that ranks and workers have something to split.

    >>> [default_num_shards(n) for n in (1, 100, 10_000, 1_281_167)]
    [1, 7, 10, 1252]
    """
    return max(-(-num_samples // 1024), min(8, -(-num_samples // 16)))


def encode_shard(task: ShardTask) -> ShardResult:
    """Read, encode and write one shard; runs in a worker."""
    encoded: list[EncodedSample] = []
    skipped: list[Skipped] = []
    for begin in range(0, len(task.samples), _SAMPLES_PER_READ):
        batch = task.samples[begin : begin + _SAMPLES_PER_READ]
        for sample, values in zip(batch, _read(batch, task.src_options), strict=True):
            try:
                encoded.append(_encode_one(sample, values, task.options))
            except PCRError as error:
                source = sample.refs[0].url
                if not _is_bad_file(error):
                    raise
                if task.options.on_error == "raise":
                    raise type(error)(
                        f"{error}; run again with --resume --on-error skip to leave such files out",
                        url=source,
                    ) from error
                skipped.append(Skipped(sample.key, source, str(error)))
    if not encoded:
        return ShardResult(None, tuple(skipped))
    entry = write_shard(
        task.url, encoded, task.options.fmt, names=task.names, options=task.dst_options
    )
    return ShardResult(entry, tuple(skipped))


def _is_bad_file(error: PCRError) -> bool:
    """Whether one file is to blame; a store that fails must not look like a set of bad images."""
    return isinstance(error, FormatError) or isinstance(error.__cause__, FileNotFoundError)


def _read(
    samples: Sequence[SampleRef], options: storage.Options | None
) -> Iterator[list[bytes | PCRError]]:
    """The bytes of each sample's fields, or why there are none."""
    ranges = [(ref.url, ref.start, ref.stop) for sample in samples for ref in sample.refs]
    parts = iter(storage.read_ranges(ranges, options=options))
    for sample in samples:
        yield [next(parts) for _ in sample.refs]


def _encode_one(
    sample: SampleRef, values: Sequence[bytes | PCRError], options: EncodeOptions
) -> EncodedSample:
    fields: dict[str, Any] = {"__key__": sample.key}
    for ref, value in zip(sample.refs, values, strict=True):
        if isinstance(value, PCRError):
            raise value
        fields[ref.name] = _prepare(value, options) if _is_jpeg_name(ref.name) else value
    return encode_sample(fields | dict(sample.known), options.fmt.scan_script)


def _prepare(image: bytes, options: EncodeOptions) -> bytes:
    """Convert what is not a JPEG, or is to be resized; leave any other image as it is."""
    if image[:2] == SOI:
        return image if options.resize_short is None else _resize(image, options)
    if options.reencode_quality is not None and image:
        return to_jpeg(image, options.reencode_quality, options.resize_short)
    try:
        map_jpeg(image)
    except CorruptJpeg as error:
        known = "got a " in str(error)
        raise CorruptJpeg(
            f"{error}; --reencode-quality Q converts it (lossy)" if known else str(error)
        ) from error
    return image


def _resize(image: bytes, options: EncodeOptions) -> bytes:
    frame = map_jpeg(image).frame
    if min(frame.height, frame.width) <= (options.resize_short or 0):
        return image
    return to_jpeg(image, options.reencode_quality, options.resize_short)


def _fingerprint(source: Source, options: EncodeOptions) -> str:
    """Identifies source listing and options; not how errors are treated, so that a stopped run may go on with ``skip``."""
    digest = hashlib.sha256(repr(dataclasses.replace(options, on_error="raise")).encode())
    for sample in source.samples:
        digest.update(repr(sample).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _finish(
    journal: Journal, num_shards: int, options: EncodeOptions, classes: tuple[str, ...]
) -> DatasetIndex | None:
    """Write the dataset index if all shards are there, from this part or from others."""
    with journal.finishing() as found:
        if missing := set(range(num_shards)) - found.keys():
            _log.info("%d of %d shards are left to other parts", len(missing), num_shards)
            return None
        dst, dst_options = journal.dst, journal.options
        results = [found[number] for number in sorted(found)]
        skipped = [row for result in results for row in result.skipped]
        if skipped or read_skipped(dst, options=dst_options):
            with storage.atomic_write(storage.join(dst, SKIPPED), options=dst_options) as file:
                file.writelines(json.dumps(row._asdict()).encode() + b"\n" for row in skipped)
        entries = tuple(result.entry for result in results if result.entry is not None)
        if not entries:
            raise EncodeError(
                f"every image was skipped; the reasons are in {storage.join(dst, SKIPPED)}"
            )
        script = options.fmt.scan_script
        index = DatasetIndex(script.name, script.num_groups, entries, classes)
        journal.unite(found)
        write_dataset_index(dst, index, options=dst_options)
        journal.clean_up()
    return index
