"""Which sample goes into which shard: a pure function of the source's listing and the options."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

from ..errors import EncodeError
from ..format.names import check_name, is_jpeg_field
from .shard_writer import FieldNames, ShardFormat
from .sources import CONVERTIBLE, SampleRef


@dataclasses.dataclass(frozen=True)
class EncodeOptions:
    """How a dataset is encoded.

    Attributes:
        name: Name of the shards before their number.
        num_shards: Number of shards; their sizes differ by at most one sample.
        samples_per_shard: The most samples a shard has, if ``num_shards`` is not given; by default
            1024, and fewer where that would make less than 8 shards.
        seed: Seed of the global shuffle before sharding; ``None`` keeps the source's order.
        on_error: ``raise``, or ``skip`` to list bad images in ``skipped.jsonl`` and go on.
        reencode_quality: JPEG quality for sources that are not JPEG; without it they are refused.
        resize_short: Shorter side in pixels that larger images are resized to. Lossy.
        prefix_keys: Whether to put a tar's name before its keys.
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


def convert_names(samples: list[SampleRef], options: EncodeOptions) -> list[SampleRef]:
    """Name the image ``jpg`` where a sample has another image but no JPEG, if it is re-encoded."""
    if options.reencode_quality is None:
        return samples
    return [_convert_name(sample) for sample in samples]


def _convert_name(sample: SampleRef) -> SampleRef:
    names = [ref.name for ref in sample.refs]
    if any(map(is_jpeg_field, names)) or CONVERTIBLE.isdisjoint(names):
        return sample
    refs = list(sample.refs)
    first = next(i for i, name in enumerate(names) if name in CONVERTIBLE)
    refs[first] = refs[first]._replace(name="jpg")
    return sample._replace(refs=tuple(refs))


def field_names(samples: Sequence[SampleRef], preview_fields: Sequence[str] = ()) -> FieldNames:
    """All fields of a dataset, in the order they are first met.

    Raises:
        EncodeError: There is no JPEG field, or one of the fields to preview is not there.
    """
    names = dict.fromkeys(ref.name for sample in samples for ref in sample.refs)
    names |= dict.fromkeys(name for sample in samples for name, _ in sample.known)
    streams = tuple(filter(is_jpeg_field, names))
    others = tuple(itertools.filterfalse(is_jpeg_field, names))
    if not streams:
        if {"pcr", "scan01"} <= names.keys():
            raise EncodeError(
                "expected images or WebDataset tars, got PCR shards; "
                "`pcrshard export` turns them back"
            )
        raise EncodeError(
            f"expected a JPEG field, found {sorted(names)}; "
            "--reencode-quality Q converts PNG, WebP, BMP (lossy)"
        )
    if unknown := set(preview_fields).difference(others):
        raise EncodeError(f"expected preview fields of {list(others)}, got {sorted(unknown)}")
    return FieldNames(streams, others)


def plan_shards(samples: list[SampleRef], options: EncodeOptions) -> list[list[SampleRef]]:
    """Shuffle all samples by the seed, then cut them into even shards.

    Returns:
        Shards whose sizes differ by at most one.

    Raises:
        EncodeError: There are fewer samples than shards.
    """
    total = len(samples)
    count = _num_shards(total, options)
    order = list(range(total))
    if options.seed is not None:
        random.Random(options.seed).shuffle(order)
    bounds = [total * i // count for i in range(count + 1)]
    return [[samples[i] for i in order[start:stop]] for start, stop in itertools.pairwise(bounds)]


def _num_shards(total: int, options: EncodeOptions) -> int:
    if options.samples_per_shard is not None:
        return -(-total // options.samples_per_shard)
    count = options.num_shards or default_num_shards(total)
    if count > total:
        raise EncodeError(f"expected at most {total} shards for {total} samples, got {count}")
    return count


def default_num_shards(num_samples: int) -> int:
    """Number of shards, so that each has at most 1024 samples.

    There are up to 8, of at least 16 samples, so that ranks and workers have something to split.

    >>> [default_num_shards(n) for n in (1, 100, 10_000, 1_281_167)]
    [1, 7, 10, 1252]
    """
    return max(-(-num_samples // 1024), min(8, -(-num_samples // 16)))
