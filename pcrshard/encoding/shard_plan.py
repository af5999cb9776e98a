"""Which sample goes into which shard: a pure function of the source's listing and the options."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Sequence

from .. import storage
from ..errors import EncodeError
from ..format.names import check_name, is_jpeg_field
from ..format.shard_format import FieldNames, ShardFormat
from .labels import check_classes
from .sources import CONVERTIBLE, FieldRef, SampleRef

ON_ERROR = ("raise", "keep", "reencode", "skip")
# The split that takes a folder's splits for classes.
NO_SPLIT = "none"
# Ranks of the jobs that a dataset is likely to meet, and how idle they may be without a word.
_USUAL_RANKS = (2, 4, 8)
_MOST_IDLE = 0.1
# The options that are numbers of something.
_COUNTS = (
    "num_shards",
    "samples_per_shard",
    "resize_short",
    "for_ranks",
    "for_workers",
)


@dataclasses.dataclass(frozen=True)
class EncodeOptions:
    """How a dataset is encoded.

    Attributes:
        name: Name of the shards before their number.
        num_shards: Number of shards; their sizes differ by at most one sample.
        samples_per_shard: The most samples a shard has, if ``num_shards`` is not given; by default
            1024, and fewer where that would make less than 8 shards.
        seed: Seed of the global shuffle before sharding; ``None`` keeps the source's order.
        on_error: What is done about a file that cannot be rearranged into scans: ``raise``;
            ``keep`` it as it is; ``reencode`` it as a JPEG (lossy); or ``skip`` it. The last three
            list such files, in ``kept.jsonl`` or ``skipped.jsonl``, and go on; ``reencode`` skips
            what cannot be decoded.
        reencode_quality: JPEG quality for sources that are not JPEG; without it they are refused,
            or kept.
        resize_short: Shorter side in pixels that larger images are resized to. Lossy.
        prefix_keys: Whether to put a tar's name before its keys.
        classes: Names of the labels 0, 1, ...; by default those that the source has. A source with
            names is numbered by their places here.
        split: Which split of a source to encode that has several (``train``, ``val``...); labels
            are numbered by the classes of all. ``none`` takes the folders for classes.
        lists: Which numbered fields of tars become lists of images: ``("images.jpg",)`` for
            ``images.0.jpg``, ``images.1.jpg``... By default those whose number differs from sample
            to sample, and that are counted from 0 without a gap; ``()`` for none.
        stratify: Whether every shard gets the same share of each class (field ``cls``), to one
            sample; reads the labels of tars before.
        for_ranks: Processes that will train; they and ``for_workers`` together divide the number
            of shards.
        for_workers: DataLoader workers of each.
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
    lists: tuple[str, ...] | None = None
    stratify: bool = False
    for_ranks: int = 1
    for_workers: int = 1
    fmt: ShardFormat = dataclasses.field(default_factory=ShardFormat)

    def __post_init__(self) -> None:
        check_name(self.name)
        check_classes(self.classes)
        if self.num_shards is not None and self.samples_per_shard is not None:
            raise EncodeError("expected num_shards or samples_per_shard, got both")
        if self.on_error not in ON_ERROR:
            raise EncodeError(f"expected on_error to be of {ON_ERROR}, got {self.on_error!r}")
        for name in _COUNTS:
            _check_count(name, getattr(self, name))
        _check_quality(self.reencode_quality)


def _check_count(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise EncodeError(f"expected {name} above 0, got {value}")


def _check_quality(quality: int | None) -> None:
    if quality is not None and not 1 <= quality <= 100:
        raise EncodeError(f"expected reencode_quality of 1 to 100, got {quality}")


def convert_names(samples: list[SampleRef], options: EncodeOptions) -> list[SampleRef]:
    """Name the image ``jpg`` where a sample has another image but no JPEG, if it is re-encoded.

    Where files are kept, and none of a folder is a JPEG by its name, each image has the name of its
    own extension instead; beside JPEGs it stays ``jpg``, so that a job finds all images in one
    field.
    """
    if options.reencode_quality is not None:
        return list(map(_convert_name, samples))
    refs = [ref for sample in samples for ref in sample.refs]
    if options.on_error == "keep" and not any(map(_is_jpeg_file, refs)):
        return list(map(_keep_name, samples))
    return samples


def _is_jpeg_file(ref: FieldRef) -> bool:
    return is_jpeg_field(ref.name) and not _own_extension(ref)


def _own_extension(ref: FieldRef) -> str:
    """The extension of a file that is an image but no JPEG by its name; nothing for others."""
    path, _ = storage.split_query(ref.url)
    extension = path.rpartition(".")[2].lower()
    return extension if extension in CONVERTIBLE else ""


def _keep_name(sample: SampleRef) -> SampleRef:
    refs = [ref._replace(name=_own_extension(ref) or ref.name) for ref in sample.refs]
    return sample._replace(refs=tuple(refs))


def _convert_name(sample: SampleRef) -> SampleRef:
    names = [ref.name for ref in sample.refs]
    if any(map(is_jpeg_field, names)) or CONVERTIBLE.isdisjoint(names):
        return sample
    refs = list(sample.refs)
    first = next(i for i, name in enumerate(names) if name in CONVERTIBLE)
    refs[first] = refs[first]._replace(name="jpg")
    return sample._replace(refs=tuple(refs))


def field_names(samples: Sequence[SampleRef], options: EncodeOptions) -> FieldNames:
    """All fields of a dataset, in the order they are first met.

    Raises:
        EncodeError: There is no JPEG field, and other images are not kept, or one of the fields to
            preview is not there.
    """
    refs = [ref for sample in samples for ref in sample.refs]
    known = dict.fromkeys(name for sample in samples for name, _ in sample.known)
    names = dict.fromkeys(ref.name for ref in refs) | known
    lists = dict.fromkeys(ref.name for ref in refs if ref.place is not None)
    streams = tuple(name for name in names if is_jpeg_field(name) and name not in lists)
    others = tuple(itertools.filterfalse(is_jpeg_field, names))
    if not (streams or lists):
        _check_without_jpeg(names, options)
    if unknown := set(options.fmt.preview_fields).difference(others):
        raise EncodeError(f"expected preview fields of {list(others)}, got {sorted(unknown)}")
    return FieldNames(streams, others, tuple(lists))


def _check_without_jpeg(names: Iterable[str], options: EncodeOptions) -> None:
    """Refuse a source without a JPEG, unless its images are to be kept as they are."""
    if {"pcr", "scan01"} <= {*names}:
        raise EncodeError(
            "expected images or WebDataset tars, got PCR shards; `pcrshard export` turns them back"
        )
    if options.on_error != "keep":
        raise EncodeError(
            f"expected a JPEG field, found {sorted(names)}; --on-error keep stores other images "
            "as they are, --reencode-quality Q converts PNG, WebP, BMP (lossy)"
        )


def plan_shards(
    samples: list[SampleRef],
    options: EncodeOptions,
    labels: Sequence[bytes | None] | None = None,
) -> list[list[SampleRef]]:
    """Shuffle all samples by the seed, then cut them into even shards.

    Args:
        samples: The source.
        options: How many shards, and the seed.
        labels: A label of each sample, which the shards then share evenly.

    Returns:
        Shards whose sizes differ by at most one, and so do the samples of each label in them.

    Raises:
        EncodeError: There are fewer samples than shards, or the number of shards cannot be shared
            out among ranks and workers.
    """
    total = len(samples)
    count = _num_shards(total, options)
    order = list(range(total))
    rng = random.Random(options.seed)
    if options.seed is not None:
        rng.shuffle(order)
    if labels is None:
        shards = _cut(order, count)
    else:
        shards = _deal(order, labels, count)
        for shard in shards:
            shard.sort() if options.seed is None else rng.shuffle(shard)
    return [[samples[i] for i in shard] for shard in shards]


def _cut(order: list[int], count: int) -> list[list[int]]:
    bounds = [len(order) * i // count for i in range(count + 1)]
    return [order[start:stop] for start, stop in itertools.pairwise(bounds)]


def _deal(
    order: list[int],
    labels: Sequence[bytes | None],
    count: int,
) -> list[list[int]]:
    """Deal samples out as cards, one class after the other.

    >>> _deal([0, 1, 2, 3, 4], [b"a", b"b", b"a", b"b", b"a"], 2)
    [[0, 4, 3], [2, 1]]
    """
    by_label = sorted(order, key=lambda i: (labels[i] is None, labels[i] or b""))
    return [by_label[number::count] for number in range(count)]


def _num_shards(total: int, options: EncodeOptions) -> int:
    unit = options.for_ranks * options.for_workers
    named = f"{options.for_ranks} ranks x {options.for_workers} workers"
    if options.num_shards is not None:
        count = options.num_shards
        _check_divided(count, unit, named)
    elif options.samples_per_shard is not None:
        count = _round_up(-(-total // options.samples_per_shard), unit)
    else:
        count = _round_up(default_num_shards(total), unit)
    if count > total:
        why = f" that {named} divide" if unit > 1 else ""
        raise EncodeError(f"expected at most {total} shards for {total} samples, got {count}{why}")
    return count


def _check_divided(
    count: int,
    unit: int,
    named: str,
) -> None:
    if count % unit:
        raise EncodeError(
            f"expected a number of shards that {named} divide, such as "
            f"{_round_up(count, unit)}, got {count}"
        )


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def idle_share(num_shards: int, ranks: int) -> float:
    """The share of its time that an average rank waits, where ranks read whole shards.

    >>> [round(idle_share(10, ranks), 2) for ranks in (2, 4, 8)]
    [0.0, 0.17, 0.38]
    """
    return 1 - num_shards / _round_up(num_shards, ranks)


def advise(num_shards: int) -> str:
    """What to say of a number of shards that leaves ranks of usual jobs idle; often nothing."""
    idle = _list_idle(num_shards)
    if not idle:
        return ""
    noun = "shard leaves" if num_shards == 1 else "shards leave"
    return (
        f"{num_shards} {noun} ranks idle where each reads whole shards, as in WebDataset: "
        f"{', '.join(idle)}; --for-ranks R --for-workers W takes a number that they divide"
    )


def _list_idle(num_shards: int) -> list[str]:
    shares = {ranks: idle_share(num_shards, ranks) for ranks in _USUAL_RANKS}
    return [f"{share:.0%} on {ranks}" for ranks, share in shares.items() if share > _MOST_IDLE]


def default_num_shards(num_samples: int) -> int:
    """Number of shards, so that each has at most 1024 samples.

    There are up to 8, of at least 16 samples, so that ranks and workers have something to split.

    >>> [default_num_shards(n) for n in (1, 100, 10_000, 1_281_167)]
    [1, 7, 10, 1252]
    """
    return max(-(-num_samples // 1024), min(8, -(-num_samples // 16)))
