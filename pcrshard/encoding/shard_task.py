"""One shard of a dataset as a task that any worker can run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import storage
from ..errors import FormatError, PCRError
from ..format.names import shard_name
from ..jpeg.markers import SOI, map_jpeg
from ..jpeg.other_formats import to_jpeg
from ..redaction import redact, redact_url
from .encode_jpeg import EncodedImage, encode_jpeg
from .labels import check_label, count_classes
from .resume_journal import Run, ShardResult, Unlayered
from .samples import SampleRef, read_samples
from .shard_plan import EncodeOptions
from .shard_writer import EncodedSample, encode_sample, write_shard

# JPEG quality for re-encoding a file that cannot be rearranged.
_QUALITY = 95


class ShardTask(NamedTuple):
    """One shard to write; picklable, so that any executor can run it.

    Attributes:
        run: What it shares with the other tasks; they end or resume as a whole.
        number: Number of the shard.
        samples: Its samples.
    """

    run: Run
    number: int
    samples: list[SampleRef]


def encode_shard(task: ShardTask) -> ShardResult:
    """Read, encode and write one shard.

    Returns:
        Its entry, and the files that are not stored as their own scans.

    Raises:
        CorruptJpeg, UnsupportedJpeg: A bad image, if ``on_error`` is ``raise``.
        EncodeError: A label has no name although class names are given; or the run has ended.
        StorageError: Bytes could not be read or written.
    """
    run = task.run
    run.check()
    encoded: list[EncodedSample] = []
    rows: list[Unlayered] = []
    for sample, values in read_samples(task.samples, run.src_options):
        found, notes = _encode(sample, values, run.options)
        encoded += found
        rows += notes
    entry = None
    if encoded:
        entry = write_shard(
            storage.join(run.dst, shard_name(run.options.name, task.number)),
            encoded,
            run.options.fmt,
            names=run.names,
            options=run.dst_options,
        )
    num_classes = count_classes(sample.fields for sample in encoded)
    result = ShardResult(entry, tuple(rows), num_classes, run.options.on_error)
    run.save(task.number, result)
    return result


def _encode(
    sample: SampleRef,
    values: Sequence[bytes | PCRError],
    options: EncodeOptions,
) -> tuple[list[EncodedSample], list[Unlayered]]:
    """Encode a sample; return it (nothing if skipped), and its files not stored as scans."""
    fields: dict[str, Any] = {"__key__": sample.key}
    source = sample.refs[0].url if sample.refs else ""
    rows: list[Unlayered] = []

    def note(outcome: str, reason: str) -> None:
        # The row is written to a file, which must not hold secrets of URLs.
        rows.append(Unlayered(sample.key, redact_url(source), redact(reason, source), outcome))

    def encode_image(name: str, file: bytes) -> EncodedImage | None:
        try:
            return encode_jpeg(_to_jpeg(file, options), options.fmt.scan_script)
        except FormatError as error:
            outcome, stored = _store_unlayered(file, error, options)
            note(outcome, f"{error} (key={sample.key}.{name})")
            return stored

    try:
        for ref, value in zip(sample.refs, values, strict=True):
            if isinstance(value, PCRError):
                raise value
            if ref.place is None:
                fields[ref.name] = value
            else:
                fields.setdefault(ref.name, []).append(value)
        encoded = encode_sample(fields | dict(sample.known), encode_image)
        check_label(encoded.key, encoded.fields, options.classes)
    except PCRError as error:
        # A failing store must not look like a set of bad images.
        if not isinstance(error, FormatError) and not isinstance(
            error.__cause__, FileNotFoundError
        ):
            raise
        if options.on_error == "raise":
            raise type(error)(
                f"{error}; run again with --resume --on-error keep to store such files "
                "unchanged, or --on-error skip to leave them out; --reencode-quality Q converts "
                "PNG, WebP, BMP (lossy)",
                url=source,
            ) from error
        rows.clear()
        note("skipped", str(error))
        return [], rows
    return [encoded], rows


def _store_unlayered(
    file: bytes, error: FormatError, options: EncodeOptions
) -> tuple[str, EncodedImage | None]:
    """Return the outcome for a file that cannot be layered, and its image if any; or raise."""
    if options.on_error == "keep":
        return "kept", None
    if options.on_error == "reencode":
        jpeg = to_jpeg(file, options.reencode_quality or _QUALITY, options.resize_short)
        return "reencoded", encode_jpeg(jpeg, options.fmt.scan_script)
    raise error


def _to_jpeg(image: bytes, options: EncodeOptions) -> bytes:
    """Convert an image that is not a JPEG or needs resizing; return any other image unchanged."""
    if image[:2] != SOI:
        if options.reencode_quality is None or not image:
            return image
    elif options.resize_short is None:
        return image
    else:
        frame = map_jpeg(image).frame
        if min(frame.height, frame.width) <= options.resize_short:
            return image
    return to_jpeg(image, options.reencode_quality, options.resize_short)
