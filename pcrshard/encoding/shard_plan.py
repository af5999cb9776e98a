"""The assignment of samples to shards, a pure function of the source's listing and the options."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from typing import NamedTuple

import numpy as np

from .. import storage
from ..errors import EncodeError, FormatError
from ..format.dataset_index import DATASET_INDEX, most_shards
from ..format.kinds import plan_kinds, read_kinds
from ..format.levels import Levels
from ..format.names import (
    OTHER_IMAGE_EXTENSIONS,
    check_name,
    is_jpeg_field,
    shard_name,
)
from ..format.scan_script import ScanScript
from ..format.schema import Schema
from ..format.shard_format import ShardFormat
from ..redaction import redact_url
from .calibrate import Similarity, calibrate, draw_sample
from .encode_jpeg import convert_image
from .labels import check_classes, read_labels
from .sample_table import Rows, SampleTable
from .samples import SampleRef, Source, StorageOptions, Unlayered
from .sources import list_source

ON_ERROR = ("raise", "keep", "reencode", "skip")
# The largest accepted numbers.
_MOST = dict.fromkeys(
    ("num_shards", "samples_per_shard", "resize_short", "for_ranks", "for_workers"), 1 << 24
) | {"reencode_quality": 100}
# Files of the sample that are read at a time.
_PROBES = 32
IF_NOT_JPEG = (
    "--on-error keep stores other images unchanged, --reencode-quality Q converts PNG, WebP, BMP "
    "(lossy)"
)


@dataclasses.dataclass(frozen=True)
class EncodeOptions:
    """How a dataset is encoded.

    Attributes:
        name: Prefix of the shard names, before the number.
        num_shards: Number of shards; their sizes differ by at most one sample.
        samples_per_shard: Maximum samples per shard, if ``num_shards`` is not given. Default: 1024,
            or fewer to make up to 8 shards or a multiple of 8, which ranks can split evenly.
        seed: Seed of the global shuffle before sharding; ``None`` keeps the source's order.
        on_error: What to do with a file that cannot be rearranged into scans: ``raise`` an error;
            ``keep`` it unchanged; ``reencode`` it as a JPEG (lossy); or ``skip`` it. The last three
            list such files in ``kept.jsonl`` or ``skipped.jsonl``. ``reencode`` skips files that
            cannot be decoded.
        reencode_quality: Convert PNG, WebP, BMP and other images to JPEG of this quality, 1 to 100
            (lossy). Default: ``on_error`` applies to such images.
        resize_short: Resize larger images to a shorter side of this many pixels (lossy).
        prefix_keys: Prefix keys with the name of their tar.
        classes: Names of the labels 0, 1, ... Default: the names in the source.
        split: Split of the source to encode (``train``, ``val``...); labels are numbered by the
            classes of all splits. Use ``none`` to treat the split folders as classes.
        label: The column of a list that has the labels. Default: the one with a usual name, such as
            label, class, category or target.
        no_labels: Leave out the labels that class folders or the column of a list give.
        keep_numbered: Keep numbered images of tars (``images.0.jpg``, ``images.1.jpg``...) in their
            fields. Otherwise, images numbered from 0 become a list, ``images.jpg``.
        stratify: Give every shard the same number of samples of each class (field ``cls``), to
            within one; reads the labels of tars first.
        for_ranks: Number of training processes; picks a shard count divisible by ``for_ranks *
            for_workers``.
        for_workers: DataLoader workers per training process.
        kinds: What fields hold, where their names do not say: ``{"mask.png": "mask",
            "json:objects.bbox": "boxes:xywh"}``. A mask is stored losslessly; a part of a JSON
            field is named by its path.
        lists: Fields with a list of images per sample, even if no sample of this source shows it.
        fmt: Scan script and layout.
    """

    name: str = "data"
    num_shards: int | None = None
    samples_per_shard: int | None = None
    seed: int | None = 0
    on_error: str = "raise"
    reencode_quality: int | None = None
    resize_short: int | None = None
    prefix_keys: bool = False
    classes: tuple[str, ...] = ()
    split: str | None = None
    label: str | None = None
    no_labels: bool = False
    keep_numbered: bool = False
    stratify: bool = False
    for_ranks: int = 1
    for_workers: int = 1
    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lists: tuple[str, ...] = ()
    fmt: ShardFormat = dataclasses.field(default_factory=ShardFormat)

    def __post_init__(self) -> None:
        read_kinds(self.kinds, self.lists)
        check_name(self.name)
        check_classes(self.classes)
        if self.label is not None and self.no_labels:
            raise EncodeError("expected label or no_labels, got both")
        if None not in (self.num_shards, self.samples_per_shard):
            raise EncodeError("expected num_shards or samples_per_shard, got both")
        if self.on_error not in ON_ERROR:
            raise EncodeError(f"expected on_error among {ON_ERROR}, got {self.on_error!r}")
        for name, most in _MOST.items():
            count = getattr(self, name)
            if count is not None and not 1 <= count <= most:
                raise EncodeError(f"expected {name} from 1 to {most}, got {count}")


class Plan(NamedTuple):
    """The assignment of a source's samples to shards, with the resolved options.

    Attributes:
        shards: The samples of each shard.
        schema: The schema of all samples.
        options: The options, with the scan script and the class names resolved.
        similarity: For each scan group, the estimated MS-SSIM of its prefix: mean over a sample of
            the images, and 5th percentile; empty if nothing could be estimated.
        skipped: What was left out of the listing.
        fingerprint: Hash of the keys in each shard and of the options, except ``on_error``, so
            that a run that failed on a bad file can resume with another choice.
    """

    shards: list[Rows[SampleRef]]
    schema: Schema
    options: EncodeOptions
    similarity: Similarity
    skipped: tuple[Unlayered, ...]
    fingerprint: str

    @property
    def levels(self) -> Levels | None:
        """The levels, if the dataset has some."""
        script = self.options.fmt.script
        return script if isinstance(script, Levels) else None


def sources_digest(samples: Iterable[SampleRef]) -> str:
    """Return a hash of what samples are made from.

    That is where their fields are, the versions of the files, and the bytes known from the listing.
    A file without a version is known by its URL.
    """
    digest = hashlib.sha256()
    for key, refs, known in samples:
        own = [(ref.name, ref.start, ref.stop, ref.version or ref.url) for ref in refs]
        digest.update(repr((key, own, known)).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def plan(
    src: str,
    options: EncodeOptions,
    src_options: StorageOptions = None,
    *,
    scratch: str | None = None,
    known: ScanScript | Levels | None = None,
    progress: Callable[[int, int], object] = lambda *_: None,
) -> Plan:
    """List a source and assign its samples to shards.

    Tars that cannot be read in ranges are unpacked into the local folder ``scratch``. Reads a
    sample of the images: 64, to choose slopes 1 % of them and at most 1,000, unless an earlier run
    is ``known`` to have chosen. With ``stratify``, reads the labels of tars. ``progress`` is called
    with the images of the sample that were read, and their number.

    Raises:
        EncodeError: The source or the options are invalid.
        StorageError: The source cannot be read.
    """
    source = list_samples(src, options, src_options, scratch=scratch)
    jpegs = _read_jpegs(source.samples, options, src_options, progress)
    fmt = options.fmt
    if known is not None and fmt.is_open:
        fmt = dataclasses.replace(fmt, script=known)
    script, similarity = calibrate(fmt, jpegs)
    options = dataclasses.replace(options, fmt=dataclasses.replace(fmt, script=script))
    schema = plan_schema(source.samples, options)
    labels = read_labels(source.samples, src_options) if options.stratify else None
    shards = plan_shards(source.samples, options, labels)
    _check_index_bytes(len(shards), options)
    digest = hashlib.sha256(repr((dataclasses.replace(options, on_error="raise"), schema)).encode())
    for shard in shards:
        digest.update("\0".join(shard.keys()).encode() + b"\0\0")
    return Plan(
        shards,
        schema,
        dataclasses.replace(options, classes=source.classes),
        similarity,
        source.skipped,
        digest.hexdigest(),
    )


def _check_index_bytes(num_shards: int, options: EncodeOptions) -> None:
    """Refuse a number of shards whose dataset index no reader would accept.

    Raises:
        EncodeError: Already its entries would take more than 256 MiB.
    """
    name = shard_name(options.name, num_shards)
    most = most_shards(options.fmt.num_groups, len(name))
    if num_shards > most:
        raise EncodeError(
            f"expected at most {most} shards, whose {DATASET_INDEX} readers accept, "
            f"got {num_shards}: give each shard more samples (--samples-per-shard)"
        )


def list_samples(
    src: str,
    options: EncodeOptions,
    src_options: StorageOptions = None,
    *,
    scratch: str | None = None,
) -> Source:
    """List a source as it is encoded: one split, numbered labels, final field names.

    Raises:
        EncodeError: There is nothing to encode, or the dataset would mix several splits.
        StorageError: The source cannot be listed.
    """
    source = list_source(
        src,
        prefix_keys=options.prefix_keys,
        split=options.split,
        classes=options.classes,
        label=options.label,
        no_labels=options.no_labels,
        skip=options.on_error != "raise",
        options=src_options,
        scratch=scratch,
    )
    return convert_names(source, options)


def _read_jpegs(
    samples: Sequence[SampleRef],
    options: EncodeOptions,
    src_options: StorageOptions,
    progress: Callable[[int, int], object],
) -> Iterator[bytes]:
    """Yield the JPEGs of a random sample of a source, as they are encoded; not what fails."""
    for start in range(0, len(drawn := draw_sample(len(samples))), _PROBES):
        progress(start, len(drawn))
        some = [samples[number] for number in drawn[start : start + _PROBES]]
        refs = [ref for sample in some for ref in sample.refs if is_jpeg_field(ref.name)]
        ranges = [(ref.url, ref.start, ref.stop if ref.start else None) for ref in refs]
        for image in storage.read_ranges(ranges, options=src_options):
            with contextlib.suppress(FormatError):
                if isinstance(image, bytes):
                    yield convert_image(image, options.reencode_quality, options.resize_short)


def convert_names(source: Source, options: EncodeOptions) -> Source:
    """Decide in which field the image of each sample without a JPEG is.

    The first image becomes ``jpg`` if it is converted, and in folders and lists where others are
    JPEGs, so that a job finds all images in one field. It stays in its field in tars, and where no
    sample has a JPEG.

    Raises:
        EncodeError: A tar has samples with and without JPEGs, and ``on_error`` is ``raise``.
    """
    converts = options.reencode_quality is not None or options.on_error == "reencode"
    table = source.samples
    fields = table.fields if isinstance(table, SampleTable) else []
    has_jpegs = any(map(is_jpeg_field, fields))
    if OTHER_IMAGE_EXTENSIONS.isdisjoint(fields) or not (converts or has_jpegs):
        return source
    samples, skipped = [], list(source.skipped)
    for sample in source.samples:
        refs = list(sample.refs)
        image = next((i for i, ref in enumerate(refs) if ref.name in OTHER_IMAGE_EXTENSIONS), None)
        if image is not None and not any(is_jpeg_field(ref.name) for ref in refs):
            name, url, start, *_ = refs[image]
            reason = f"expected a JPEG as in other samples, got {name} (key={sample.key}.{name})"
            if converts or not start:
                refs[image] = refs[image]._replace(name="jpg")
            elif options.on_error == "raise":
                raise EncodeError(f"{reason}; {IF_NOT_JPEG}", url=url)
            elif options.on_error == "skip":
                skipped.append(Unlayered(sample.key, redact_url(url), reason, "skipped"))
                continue
        samples.append(sample._replace(refs=tuple(refs)))
    return source._replace(samples=SampleTable.of(samples), skipped=tuple(skipped))


def plan_schema(samples: Sequence[SampleRef], options: EncodeOptions) -> Schema:
    """Return the schema of a dataset, from the names of its samples' fields and the options.

    Raises:
        EncodeError: There is no JPEG field and other images are not kept, samples contradict each
            other, or an option names a field that does not exist.
    """
    # Few samples differ in the names of their fields.
    table = samples if isinstance(samples, SampleTable) else SampleTable.of(samples)
    kinds, parts = plan_kinds(
        table.name_sets(), options.kinds, options.lists, keep_numbered=options.keep_numbered
    )
    if options.on_error != "keep" and not any(map(is_jpeg_field, kinds)):
        raise EncodeError(f"expected a JPEG field, found {sorted(kinds)}; {IF_NOT_JPEG}")
    return options.fmt.schema(kinds, parts)


def plan_shards(
    samples: Sequence[SampleRef],
    options: EncodeOptions,
    labels: Sequence[bytes | None] | None = None,
) -> list[Rows[SampleRef]]:
    """Shuffle all samples with the seed, then cut them into even shards.

    Args:
        samples: The source.
        options: Number of shards and seed.
        labels: Label of each sample, to stratify the shards by.

    Returns:
        Shards whose sizes differ by at most one; with labels, so do their counts of each label.

    Raises:
        EncodeError: There are fewer samples than shards, or the number of shards is not divisible
            by ranks x workers.
    """
    total = len(samples)
    most = options.samples_per_shard
    unit = options.for_ranks * options.for_workers
    least = options.num_shards or (-(-total // most) if most else default_num_shards(total))
    count = -(-least // unit) * unit
    if options.num_shards not in (None, count):
        raise EncodeError(
            f"expected a number of shards divisible by {options.for_ranks} ranks x "
            f"{options.for_workers} workers, such as {count}, got {least}"
        )
    if count > total:
        raise EncodeError(f"expected at most {total} shards for {total} samples, got {count}")
    order: MutableSequence[int] = array("I", range(total))
    rng = random.Random(options.seed)
    if options.seed is not None:
        rng.shuffle(order)
    shards: list[Sequence[int]]
    if labels is None:
        shards = [order[total * i // count : total * (i + 1) // count] for i in range(count)]
    else:
        # Deal the samples round-robin, class by class.
        dealt = sorted(order, key=lambda i: (labels[i] is None, labels[i] or b""))
        hands = [dealt[number::count] for number in range(count)]
        for hand in hands:
            hand.sort() if options.seed is None else rng.shuffle(hand)
        shards = [*hands]
    return [Rows(samples, np.array(shard, np.int32)) for shard in shards]


def announce(planned: Plan) -> str:
    """Return what will be written."""
    samples = sum(map(len, planned.shards))
    script = planned.schema.script
    return f"writing {samples} samples to {len(planned.shards)} shards, script {script}"


def default_num_shards(num_samples: int) -> int:
    """Return a number of shards with at most 1024 samples each.

    Small datasets get up to 8 shards of about 16 samples or more and others a multiple of 8, so
    that ranks and workers can split them.

    >>> [default_num_shards(n) for n in (1, 100, 10_000, 1_281_167)]
    [1, 7, 16, 1256]
    """
    return -(-num_samples // 8192) * 8 if num_samples > 8192 else min(8, -(-num_samples // 16))
