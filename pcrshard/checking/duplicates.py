"""The same picture in several samples: candidates by a hash, confirmed by all pixels."""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import PCRError
from ..format.scan import Scan
from ..format.scan_script import MAX_GROUPS
from ..jpeg.pixels import decode_image
from .pictures import Ints, Part, Pictures, Progress

# Copies of another size or quality differ in a few bits.
MAX_BITS = 4
# Bit ranges of a hash, one more than bits may differ: one range of two close hashes is equal.
_BANDS = ((0, 13), (13, 13), (26, 13), (39, 13), (52, 12))
# A hash of less information is that of a nearly plain picture, to which many are near.
_MIN_ONES = 6
# Mean difference of the brightness of two pictures that are nearly the same, of 255.
_NEAR = 5.0
_THUMBNAIL = 16


class Picture(NamedTuple):
    """A picture that a finding names.

    Attributes:
        part: Number of its part.
        shard: Number of its shard in the part.
        unit: Its unit in the shard.
        key: Key of its sample.
        label: Class of its sample, as in :class:`Pictures`.
    """

    part: int
    shard: int
    unit: int
    key: str
    label: int


class Confirmed(NamedTuple):
    """A candidate: a digest of its pixels at full fidelity, and a small gray version."""

    picture: Picture
    digest: bytes
    small: NDArray[np.float32]


def find_same(
    parts: Sequence[Part], pictures: Sequence[Pictures], progress: Progress
) -> tuple[list[list[Picture]], list[list[Picture]]]:
    """Find groups of images with equal pixels, and groups of near-duplicates.

    Reads the pixels of the shards that hold candidates, one shard at a time, and decodes the
    candidates at the highest scan that all parts hold. Pictures within one sample are not compared.

    Args:
        parts: The parts.
        pictures: The pictures of each, from :func:`look`.
        progress: Called with (pictures, total pictures) that are candidates.

    Returns:
        Groups of two or more pictures of different samples: equal ones, and nearly equal ones, one
        of each equal group among them.
    """
    sizes = [len(each.hash) for each in pictures]
    part_of = np.repeat(np.arange(len(parts)), sizes)
    hashes = np.concatenate([each.hash for each in pictures])
    usable = ~np.concatenate([each.is_broken for each in pictures])
    rows = np.flatnonzero(usable)
    unique, numbers, counts = np.unique(hashes[rows], return_inverse=True, return_counts=True)
    close = close_pairs(unique)
    candidate = counts > 1
    candidate[close.ravel()] = True
    chosen = rows[candidate[numbers]]
    confirmed = dict(
        zip(
            chosen.tolist(),
            _confirm(parts, pictures, part_of, sizes, chosen, progress),
            strict=True,
        )
    )
    by_digest: defaultdict[bytes, list[Picture]] = defaultdict(list)
    for each in confirmed.values():
        if each is not None:
            by_digest[each.digest].append(each.picture)
    same = [group for group in map(_of_samples, by_digest.values()) if len(group) > 1]
    return same, _find_near(rows, numbers, unique, close, confirmed)


def close_pairs(hashes: NDArray[np.uint64]) -> Ints:
    """Return the pairs of distinct hashes that differ in at most 4 bits, (n, 2) positions."""
    found = [np.empty((0, 2), np.int64)]
    for shift, width in _BANDS:
        band = (hashes >> np.uint64(shift)) & np.uint64((1 << width) - 1)
        order = np.argsort(band, kind="stable")
        own, sorted_hashes = band[order], hashes[order]
        first = np.arange(len(order))
        # Compare each hash with the next of equal band, then with the one after that, ...
        for step in range(1, len(order)):
            first = first[first + step < len(order)]
            first = first[own[first] == own[first + step]]
            if not len(first):
                break
            different = np.bitwise_count(sorted_hashes[first] ^ sorted_hashes[first + step])
            near = first[different <= MAX_BITS]
            found.append(np.stack([order[near], order[near + step]], axis=1))
    pairs = np.sort(np.concatenate(found), axis=1)
    return np.unique(pairs, axis=0)


def _confirm(
    parts: Sequence[Part],
    pictures: Sequence[Pictures],
    part_of: Ints,
    sizes: Sequence[int],
    chosen: Ints,
    progress: Progress,
) -> Iterator[Confirmed | None]:
    """Yield the pixels of the selected images, in order; ``None`` if one cannot be decoded."""
    offsets = np.cumsum([0, *sizes])
    scan = _common_scan(parts)
    done = 0
    for number, part in enumerate(parts):
        own = pictures[number]
        rows = chosen[part_of[chosen] == number] - offsets[number]
        starts = part.starts
        shards = np.searchsorted(starts, own.sample[rows], side="right") - 1
        for shard in np.unique(shards).tolist():
            prefix = None
            with suppress(PCRError):  # reported by the first look, or replaced since
                prefix = part.shards[shard].load(scan or part.index.at_most(MAX_GROUPS))
            for row in rows[shards == shard].tolist():
                done += 1
                progress(done, len(chosen))
                unit = int(own.unit[row])
                if prefix is None:
                    yield None
                    continue
                key = prefix.index.keys[int(own.sample[row] - starts[shard])]
                picture = Picture(number, shard, unit, key, int(own.label[row]))
                try:
                    pixels = decode_image(prefix.pieces(unit))
                except PCRError:
                    yield None
                    continue
                yield _confirmed(picture, pixels)
            del prefix  # before the next shard takes memory


def _common_scan(parts: Sequence[Part]) -> Scan | None:
    """Return the highest scan that all parts hold, if they have one script: equal pixels there."""
    indexes = [part.index for part in parts]
    held = [index.scan for index in indexes if index.scan is not None]
    is_one = len({index.schema.groups for index in indexes}) == 1
    return min(held) if held and is_one else None


def _confirmed(picture: Picture, pixels: NDArray[np.uint8]) -> Confirmed:
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(pixels).data)
    luma = pixels.astype(np.float32).mean(axis=2)
    # Means of 16 x 16 parts.
    for axis in (0, 1):
        edges = np.linspace(0, luma.shape[axis], _THUMBNAIL, endpoint=False).astype(int)
        widths = np.maximum(np.diff([*edges, luma.shape[axis]]), 1)
        shape = (-1, 1) if axis == 0 else (1, -1)
        luma = np.add.reduceat(luma, edges, axis=axis) / widths.reshape(shape)
    return Confirmed(picture, digest.digest(), luma)


def _of_samples(group: list[Picture]) -> list[Picture]:
    """Return one picture of each sample."""
    return list({(each.part, each.shard, each.key): each for each in group}.values())


def _find_near(
    rows: Ints,
    numbers: Ints,
    unique: NDArray[np.uint64],
    close: Ints,
    confirmed: dict[int, Confirmed | None],
) -> list[list[Picture]]:
    """Return groups of pictures that look the same but have other pixels."""
    ones = np.bitwise_count(unique)
    is_plain = (ones < _MIN_ONES) | (ones > 64 - _MIN_ONES)
    by_hash: defaultdict[int, dict[bytes, Confirmed]] = defaultdict(dict)
    for row, number in zip(rows.tolist(), numbers.tolist(), strict=True):
        found = confirmed.get(row)
        if found is not None and not is_plain[number]:
            by_hash[number].setdefault(found.digest, found)
    pairs = []
    for left, right in [*zip(by_hash, by_hash, strict=True), *close.tolist()]:
        # One of equal hashes stands for the others, so that many cost no more than each alone.
        one = next(iter(by_hash.get(left, {}).values()), None)
        others = by_hash.get(right, {}).values() if one else ()
        pairs += [(one, other) for other in others if one and _are_near(one, other)]
    groups: defaultdict[bytes, dict[bytes, Picture]] = defaultdict(dict)
    root = _roots((one.digest, other.digest) for one, other in pairs)
    for each in itertools.chain.from_iterable(pairs):
        groups[root[each.digest]][each.digest] = each.picture
    alike = (_of_samples(list(each.values())) for each in groups.values())
    return [group for group in alike if len(group) > 1]


def _roots(pairs: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return one member of the group of each member of some pairs."""
    groups: dict[bytes, list[bytes]] = {}
    for left, right in pairs:
        own, its = (groups.setdefault(each, [each]) for each in (left, right))
        if own is not its:
            own += its
            groups |= dict.fromkeys(its, own)
    return {member: group[0] for member, group in groups.items()}


def _are_near(one: Confirmed, other: Confirmed) -> bool:
    return float(np.abs(one.small - other.small).mean()) <= _NEAR
