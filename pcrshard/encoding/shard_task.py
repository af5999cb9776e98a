"""One shard of a dataset as a task that any worker can run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .. import storage
from ..errors import FormatError, PCRError
from ..format.names import is_jpeg_field, numbered, shard_name
from ..format.schema import Schema
from ..format.shard_index import State
from ..jpeg.other_formats import to_jpeg
from ..redaction import redact, redact_url
from .encode_jpeg import EncodedImage, convert_image, encode_jpeg, keep_whole
from .encode_run import Run
from .labels import check_label, count_classes
from .resume_journal import ShardResult
from .samples import SampleRef, Unlayered, read_samples
from .shard_plan import sources_digest
from .shard_writer import EncodedSample, encode_sample, write_shard

# JPEG quality for re-encoding a file that cannot be rearranged.
_QUALITY = 95


class ShardTask(NamedTuple):
    """One shard to write; picklable, so that any executor can run it.

    Attributes:
        run: What it shares with the other tasks; they end or resume as a whole.
        number: Number of the shard.
        samples: Its samples.
        finished: What an earlier run made of it, to be checked.
    """

    run: Run
    number: int
    samples: list[SampleRef]
    finished: ShardResult | None = None


def encode_shard(task: ShardTask) -> ShardResult:
    """Read, encode and write one shard, unless it is finished.

    Returns:
        Its entry, and the files that are not stored as their own scans.

    Raises:
        CorruptJpeg, UnsupportedJpeg: A bad image, if ``on_error`` is ``raise``.
        EncodeError: A label has no name although class names are given; or the run has ended.
        StorageError: Bytes could not be read or written.
    """
    run = task.run
    run.check()
    sources = sources_digest(task.samples)
    if task.finished is not None and run.is_complete(task.finished, sources):
        return task.finished
    encoded: list[EncodedSample] = []
    rows: list[Unlayered] = []
    for sample, fields in read_samples(task.samples, run.src_options):
        found, notes = _encode(sample, fields, run)
        encoded += found
        rows += notes
    written = None
    if encoded:
        written, _ = write_shard(
            storage.join(run.dst, shard_name(run.options.name, task.number)),
            encoded,
            run.schema,
            options=run.dst_options,
        )
    num_classes = count_classes(sample.fields for sample in encoded)
    result = ShardResult(written, tuple(rows), num_classes, run.options.on_error, sources)
    run.save(task.number, result)
    return result


def _encode(
    sample: SampleRef, fields: dict[str, Any] | PCRError, run: Run
) -> tuple[list[EncodedSample], list[Unlayered]]:
    """Encode a sample; return it (nothing if skipped), and its files not stored as scans."""
    options = run.options
    source = sample.refs[0].url
    rows: list[Unlayered] = []

    def note(outcome: str, reason: str) -> None:
        # The row is written to a file, which must not hold secrets of URLs.
        rows.append(Unlayered(sample.key, redact_url(source), redact(reason, source), outcome))

    def encode_image(name: str, file: bytes) -> EncodedImage:
        try:
            return _encode_image(name, file, run, note)
        except FormatError as error:
            if options.on_error != "reencode":
                raise
            jpeg = to_jpeg(file, options.reencode_quality or _QUALITY, options.resize_short)
            image = encode_jpeg(jpeg, options.fmt.scan_script)
            note("reencoded", f"{error} (key={sample.key}.{name})")
            return image

    try:
        if isinstance(fields, PCRError):
            raise fields
        _gather_lists(fields, run.schema)
        kinds = {name: field.kind for name, field in run.schema.by_name.items()}
        encoded = encode_sample({"__key__": sample.key} | fields, encode_image, kinds)
        check_label(encoded.key, encoded.fields, options.classes)
    except PCRError as error:
        # A failing store must not look like a set of bad images.
        is_of_file = isinstance(error, FormatError) or isinstance(
            error.__cause__, FileNotFoundError
        )
        if not is_of_file:
            raise
        if options.on_error == "raise":
            raise type(error)(
                f"{error}; run again with --resume --on-error keep to store such files unchanged "
                "if they can be read, or --on-error skip to leave them out; --reencode-quality Q "
                "converts PNG, WebP, BMP (lossy)",
                url=source,
            ) from error
        rows.clear()
        note("skipped", str(error))
        return [], rows
    return [encoded], rows


def _encode_image(
    name: str, file: bytes, run: Run, note: Callable[[str, str], None]
) -> EncodedImage:
    """Encode an image, or keep a file whole if the options say so and it cannot be layered."""
    reason = ""
    if is_jpeg_field(name):
        try:
            return encode_jpeg(
                convert_image(file, run.options.reencode_quality, run.options.resize_short),
                run.options.fmt.scan_script,
            )
        except FormatError as error:
            if run.options.on_error != "keep":
                raise
            reason = str(error)
    image = keep_whole(file, run.schema.num_groups)
    if image.state == State.UNDECODABLE:
        note("undecodable", reason or f"no decoder here can decode field {name!r}")
    elif reason:
        note("kept", reason)
    return image


def _gather_lists(fields: dict[str, Any], schema: Schema) -> None:
    """Replace numbered images by lists."""
    for name in schema.lists:
        images: list[Any] = []
        while (field := numbered(name, len(images))) in fields:
            images.append(fields.pop(field))
        fields[name] = images
