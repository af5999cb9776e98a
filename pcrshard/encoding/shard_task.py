"""One shard of a dataset as a task that any worker can do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .. import storage
from ..errors import CorruptJpeg, FormatError, PCRError
from ..format.dataset_index import ShardEntry
from ..format.names import is_jpeg_field
from ..format.shard_format import FieldNames
from ..jpeg.markers import SOI, map_jpeg
from ..jpeg.other_formats import to_jpeg
from .labels import check_label, count_classes
from .resume_journal import ShardResult, Unlayered
from .shard_plan import EncodeOptions
from .shard_tables import EncodedSample
from .shard_writer import encode_sample, write_shard
from .sources import SampleRef, StorageOptions

_SAMPLES_PER_READ = 64
# Of a JPEG that is made of the pixels of a file that cannot be layered.
_QUALITY = 95


class Recipe(NamedTuple):
    """What all tasks of a run have in common."""

    names: FieldNames
    options: EncodeOptions
    src_options: StorageOptions
    dst_options: StorageOptions


class ShardTask(NamedTuple):
    """One shard to write; picklable, so that any executor can run it."""

    url: str
    samples: list[SampleRef]
    recipe: Recipe

    @property
    def source_bytes(self) -> int:
        """Bytes of the sources, as far as listing them has told."""
        refs = (ref for sample in self.samples for ref in sample.refs)
        return sum(ref.stop - ref.start for ref in refs if ref.stop is not None)


def encode_shard(task: ShardTask) -> ShardResult:
    """Read, encode and write one shard.

    Returns:
        Its entry, and the files that are not in scans.

    Raises:
        CorruptJpeg, UnsupportedJpeg: A bad image, if ``on_error`` is ``raise``.
        EncodeError: A label has no name, although classes have names.
        StorageError: Bytes could not be read or written.
    """
    options = task.recipe.options
    encoded: list[EncodedSample] = []
    rows: list[Unlayered] = []
    for sample, values in _read(task.samples, task.recipe.src_options):
        source = sample.refs[0].url if sample.refs else ""
        note = _Note(options, sample.key, source)
        try:
            encoded.append(_encode(sample, values, options, note))
        except PCRError as error:
            note.skip(error)
        rows += note.rows
    entry = _write(task, encoded) if encoded else None
    counted = count_classes(sample.fields for sample in encoded)
    return ShardResult(entry, tuple(rows), counted)


def _write(task: ShardTask, encoded: Sequence[EncodedSample]) -> ShardEntry:
    names, options, _, dst_options = task.recipe
    return write_shard(
        task.url,
        encoded,
        options.fmt,
        names=_with_kept(names, encoded),
        options=dst_options,
    )


@dataclasses.dataclass
class _Note:
    """What was done about the files of one sample that cannot be rearranged into scans."""

    options: EncodeOptions
    key: str
    source: str
    rows: list[Unlayered] = dataclasses.field(default_factory=list)

    def instead(self, image: bytes, error: PCRError) -> bytes | None:
        """What is stored in place of a file: itself, a JPEG of its pixels, or nothing."""
        on_error = self.options.on_error
        if not isinstance(error, FormatError) or on_error not in ("keep", "reencode"):
            return None
        jpeg = image
        if on_error == "reencode":
            quality = self.options.reencode_quality or _QUALITY
            jpeg = to_jpeg(image, quality, self.options.resize_short)
        outcome = "kept" if on_error == "keep" else "reencoded"
        self.rows.append(Unlayered.of(self.key, self.source, str(error), outcome))
        return jpeg

    def skip(self, error: PCRError) -> None:
        """Leave the sample out, or raise the error."""
        if not _is_bad_file(error):
            raise error
        if self.options.on_error == "raise":
            raise type(error)(
                f"{error}; run again with --resume --on-error keep to store such files as they "
                "are, or --on-error skip to leave them out",
                url=self.source,
            ) from error
        self.rows = [Unlayered.of(self.key, self.source, str(error))]


def _with_kept(names: FieldNames, encoded: Sequence[EncodedSample]) -> FieldNames:
    """The fields of a shard that has some files as they are."""
    kept = dict.fromkeys(name for sample in encoded for name in sample.fields)
    others = dict.fromkeys([*names.others, *kept])
    return names._replace(others=tuple(others))


def _is_bad_file(error: PCRError) -> bool:
    """Whether one file is to blame; a store that fails must not look like a set of bad images."""
    return isinstance(error, FormatError) or isinstance(error.__cause__, FileNotFoundError)


def _read(
    samples: list[SampleRef], options: StorageOptions
) -> Iterator[tuple[SampleRef, list[bytes | PCRError]]]:
    """Each sample with the bytes of its fields, or why there are none."""
    for start in range(0, len(samples), _SAMPLES_PER_READ):
        batch = samples[start : start + _SAMPLES_PER_READ]
        ranges = [(ref.url, ref.start, ref.stop) for sample in batch for ref in sample.refs]
        # Ranges of one tar must be of one version of it.
        tars = {url for url, start, stop in ranges if (start, stop) != (0, None)}
        with storage.unchanged(tars, options=options):
            values = iter(storage.read_ranges(ranges, options=options))
        for sample in batch:
            yield sample, [next(values) for _ in sample.refs]


def _encode(
    sample: SampleRef,
    values: Sequence[bytes | PCRError],
    options: EncodeOptions,
    note: _Note,
) -> EncodedSample:
    fields: dict[str, Any] = {"__key__": sample.key}
    for ref, value in zip(sample.refs, values, strict=True):
        if isinstance(value, PCRError):
            raise value
        file = _prepare(value, options) if is_jpeg_field(ref.name) else value
        if ref.place is None:
            fields[ref.name] = file
        else:
            fields.setdefault(ref.name, []).append(file)
    script = options.fmt.scan_script
    encoded = encode_sample(fields | dict(sample.known), script, note.instead)
    check_label(encoded.key, encoded.fields, options.classes)
    return encoded


def _prepare(image: bytes, options: EncodeOptions) -> bytes:
    """The JPEG to rearrange; a file that is none as it is, where it is not refused."""
    try:
        return _to_jpeg(image, options)
    except FormatError:
        if options.on_error in ("keep", "reencode"):
            return image
        raise


def _to_jpeg(image: bytes, options: EncodeOptions) -> bytes:
    """Convert what is not a JPEG or is to be resized; leave any other image as it is."""
    if image[:2] == SOI:
        if options.resize_short is None:
            return image
        frame = map_jpeg(image).frame
        if min(frame.height, frame.width) <= options.resize_short:
            return image
    elif options.reencode_quality is None or not image:
        _check_jpeg(image)
        return image
    return to_jpeg(image, options.reencode_quality, options.resize_short)


def _check_jpeg(image: bytes) -> None:
    """Say what a file is that is not a JPEG, and how to convert it where that helps."""
    try:
        map_jpeg(image)
    except CorruptJpeg as error:
        hint = "; --reencode-quality Q converts it (lossy)" if "got a " in str(error) else ""
        raise CorruptJpeg(f"{error}{hint}") from error
