"""Rules: what is wrong with the pictures and labels of some parts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import PCRError
from .duplicates import Picture
from .pictures import ABSENT, ILLEGAL, Ints, Part, Pictures

# Pictures that a finding names if their number is not bounded by what was found.
_EXAMPLES = 12
# A class below this, or below this fraction of the median class, has few samples.
_FEW = 5
_FEW_OF_MEDIAN = 0.05
# Pictures below which shares and medians say nothing.
_ENOUGH = 10
# Almost all of a class has a property, and almost none of the others.
_ALMOST_ALL = 0.9
# Differences of medians that are of another fidelity: in quality, in size, in shares.
_QUALITY_STEP = 10
_SIZE_RATIO = 1.5
_SHARE_STEP = 0.25
# Short sides of a picture that is too small: in pixels, and in those of the median.
_TINY = 16
_TINY_OF_MEDIAN = 0.125
_MAX_RATIO = 8


@dataclass(frozen=True)
class Finding:
    """Something found in a dataset.

    Attributes:
        kind: What it is, in a word or two: ``same-picture-in-two-splits``.
        is_wrong: Whether it makes results wrong, or ends a job; otherwise it is worth knowing.
        text: A sentence for people.
        count: How many samples, or classes, are concerned.
        groups: The pictures concerned; those of one group belong together.
    """

    kind: str
    is_wrong: bool
    text: str
    count: int
    groups: list[list[Picture]] = field(default_factory=list)


class Facts(NamedTuple):
    """A part, its pictures, and the names of its classes."""

    part: Part
    pictures: Pictures

    def label_name(self, label: int) -> str:
        """Return the name of a label."""
        if label == ABSENT:
            return "(no label)"
        if label == ILLEGAL:
            return "(not a number)"
        classes = self.part.index.classes
        return classes[label] if label < len(classes) else str(label)

    def name_some(self, number: int, which: NDArray[np.bool_]) -> list[list[Picture]]:
        """Return a few of the pictures of part ``number``; reads the indexes of their shards."""
        own, starts = self.pictures, self.part.starts
        named = []
        for row in np.flatnonzero(which)[:_EXAMPLES].tolist():
            sample = int(own.sample[row])
            shard = int(np.searchsorted(starts, sample, side="right")) - 1
            key = self.part.shards[shard].index.keys[sample - int(starts[shard])]
            named.append([Picture(number, shard, int(own.unit[row]), key, int(own.label[row]))])
        return named


def find_all(
    facts: Sequence[Facts],
    unreadable: Sequence[PCRError],
    same: Sequence[Sequence[Picture]],
    near: Sequence[Sequence[Picture]],
) -> list[Finding]:
    """Return what is found, the worst first.

    Args:
        facts: The parts and their pictures.
        unreadable: Errors of shards that cannot be read.
        same: Groups of pictures with equal pixels.
        near: Groups of pictures that look the same.
    """
    found = [
        *_files(facts, unreadable),
        *_classes(facts),
        *_labels(facts),
        *_counts(facts),
        *_same(facts, same),
        *_near(facts, near),
        *_shortcuts(facts),
        *_mixtures(facts),
        *_splits_differ(facts),
        *_shapes(facts),
    ]
    return sorted(found, key=lambda each: not each.is_wrong)


def _plural(count: int, noun: str) -> str:
    ending = "es" if noun.endswith("s") else "s"
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{ending}"


def _listed(names: Iterable[str], limit: int = 5) -> str:
    every = list(names)
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + more


def _files(facts: Sequence[Facts], unreadable: Sequence[PCRError]) -> Iterator[Finding]:
    if unreadable:
        text = f"{_plural(len(unreadable), 'shard')} cannot be read: {unreadable[0]}"
        yield Finding("unreadable-shard", True, text, len(unreadable))
    for number, each in enumerate(facts):
        broken = each.pictures.is_broken
        if count := int(broken.sum()):
            yield Finding(
                "undecodable",
                True,
                f"{_plural(count, 'file')} of {each.part.name} cannot be decoded, which ends a "
                "job: leave them out with dataset.subset(dataset.decodable), or on_error='replace'",
                count,
                each.name_some(number, broken),
            )


def _classes(facts: Sequence[Facts]) -> Iterator[Finding]:
    """Compare the numbers that parts give to class names."""
    first = facts[0]
    expected = first.part.index.classes
    for each in facts[1:]:
        classes = each.part.index.classes
        other = [
            number
            for number, names in enumerate(zip(expected, classes, strict=False))
            if names[0] != names[1]
        ]
        if other:
            number = other[0]
            yield Finding(
                "classes-differ",
                True,
                f"{first.part.name} and {each.part.name} number their classes differently: class "
                f"{number} is {expected[number]} and {classes[number]}; encode the second again "
                f"with --classes-of {first.part.name}",
                len(other),
            )
        elif bool(classes) != bool(expected) and (each.pictures.label != ABSENT).any():
            named, plain = (first, each) if expected else (each, first)
            yield Finding(
                "classes-unnamed",
                False,
                f"{named.part.name} names its classes and {plain.part.name} does not: whether "
                "they number them alike cannot be seen",
                1,
            )


def _labels(facts: Sequence[Facts]) -> Iterator[Finding]:
    for number, each in enumerate(facts):
        labels, index = each.pictures.label, each.part.index
        if (labels == ABSENT).all():
            continue
        beyond = labels >= (len(index.classes) or index.num_classes)
        for which, what in (
            (labels == ABSENT, "no label"),
            (labels == ILLEGAL, "a label that is no number of a class"),
            (beyond, "a label beyond the classes"),
        ):
            if count := int(which.sum()):
                yield Finding(
                    "bad-label",
                    True,
                    f"{_plural(count, 'sample')} of {each.part.name} have {what}",
                    count,
                    each.name_some(number, which),
                )


def _class_counts(facts: Iterable[Facts]) -> Counter[str]:
    """Return the samples of each class, by its name."""
    counts: Counter[str] = Counter()
    for each in facts:
        _, first = np.unique(each.pictures.sample, return_index=True)
        labels = each.pictures.label[first]
        known = labels[(labels >= 0) & (labels < each.part.index.num_classes)]
        for label, count in zip(*np.unique(known, return_counts=True), strict=True):
            counts[each.label_name(int(label))] += int(count)
    return counts


def _by_split(facts: Sequence[Facts]) -> dict[str, list[Facts]]:
    splits: defaultdict[str, list[Facts]] = defaultdict(list)
    for each in facts:
        splits[each.part.split].append(each)
    return splits


def _counts(facts: Sequence[Facts]) -> Iterator[Finding]:
    """Find classes with few or no samples."""
    (train, own), *others = _by_split(facts).items()
    trained = _class_counts(own)
    if not trained or max(each.part.index.num_classes for each in facts) < 2:
        return

    def say(kind: str, is_wrong: bool, names: Sequence[str], text: str) -> Iterator[Finding]:
        if names:
            what = _plural(len(names), "class")
            yield Finding(kind, is_wrong, f"{what} {text}: {_listed(names)}", len(names))

    least = max(_FEW, _FEW_OF_MEDIAN * float(np.median([*trained.values()])))
    few = [name for name, count in trained.items() if count < least]
    yield from say("few-samples", False, few, f"with few samples in {train}")
    for split, parts in others:
        tested = _class_counts(parts)
        if not tested:
            continue
        untrained = [name for name in tested if name not in trained]
        yield from say("untrained-class", True, untrained, f"of {split} without samples in {train}")
        untested = [name for name in trained if name not in tested]
        yield from say("untested-class", False, untested, f"of {train} without samples in {split}")


def _same(facts: Sequence[Facts], groups: Sequence[Sequence[Picture]]) -> Iterator[Finding]:
    across, other_labels, twice = [], [], []
    for group in groups:
        splits = {facts[each.part].part.split for each in group}
        names = {facts[each.part].label_name(each.label) for each in group}
        if len(splits) > 1:
            across.append(list(group))
        elif len(names) > 1:
            other_labels.append(list(group))
        else:
            twice.append(list(group))
    for kind, is_wrong, found, text in (
        ("same-picture-in-two-splits", True, across, "in two splits"),
        ("same-picture-other-label", True, other_labels, "with two labels"),
        ("same-picture-twice", False, twice, "twice or more"),
    ):
        if found:
            what = f"{_plural(len(found), 'picture')} (equal pixels)"
            yield Finding(kind, is_wrong, f"{what} {text}", len(found), found)


def _near(facts: Sequence[Facts], groups: Sequence[Sequence[Picture]]) -> Iterator[Finding]:
    across = [
        list(group) for group in groups if len({facts[each.part].part.split for each in group}) > 1
    ]
    within = [list(group) for group in groups if list(group) not in across]
    for kind, found, text in (
        ("alike-in-two-splits", across, " in two splits"),
        ("alike", within, ""),
    ):
        if found:
            what = f"{_plural(len(found), 'group')} of pictures that look alike"
            yield Finding(kind, False, f"{what}{text}", len(found), found)


def _properties(pictures: Pictures) -> Iterator[tuple[str, NDArray[np.float64], float]]:
    """Yield properties of pictures that should say nothing about a class.

    Yields:
        A name, its value per picture (NaN if unknown), and the step that makes a difference; for a
        ratio, in logarithms.
    """
    quality = np.where(pictures.quality > 0, pictures.quality, np.nan)
    yield "JPEG quality", quality, _QUALITY_STEP
    short = pictures.sides.min(axis=1).astype(np.float64)
    with np.errstate(divide="ignore"):
        size = np.where(short > 0, np.log(short), np.nan)
    yield "size in pixels", size, float(np.log(_SIZE_RATIO))
    yield "grayscale", pictures.is_gray.astype(np.float64), 0.5
    yield "an ICC profile other than sRGB", pictures.is_wide.astype(np.float64), 0.5


def _shortcuts(facts: Sequence[Facts]) -> Iterator[Finding]:
    """Find properties by which a network could tell a class without looking at the object."""
    for split, parts in _by_split(facts).items():
        labels = np.concatenate([each.pictures.label for each in parts])
        named = parts[0]
        columns = zip(*(_properties(each.pictures) for each in parts), strict=True)
        for column in columns:
            name, _, step = column[0]
            values = np.concatenate([value for _, value, _ in column])
            known = ~np.isnan(values) & (labels >= 0)
            told = list(_told(labels[known], values[known], step))
            if told:
                names = _listed(map(named.label_name, told))
                yield Finding(
                    "shortcut",
                    name == "JPEG quality",
                    f"in {split}, {name} tells the class: {names}; a network can learn that "
                    "instead of the object",
                    len(told),
                )


def _told(labels: Ints, values: NDArray[np.float64], step: float) -> Iterator[int]:
    """Yield the classes almost all of whose values are a step from almost all of the others."""
    classes, counts = np.unique(labels, return_counts=True)
    if len(classes) < 2:
        return
    rest = 1 - _ALMOST_ALL
    for label, count in zip(classes.tolist(), counts.tolist(), strict=True):
        own, others = values[labels == label], values[labels != label]
        if min(count, len(others)) < _ENOUGH:
            continue
        low, high = np.quantile(own, [rest, _ALMOST_ALL], method="nearest")
        low_of_others, high_of_others = np.quantile(others, [rest, _ALMOST_ALL], method="nearest")
        if low >= high_of_others + step or high <= low_of_others - step:
            yield label


def _fidelity(each: Facts) -> tuple[str, float, float]:
    """Return what a reader gets from a part: its scans, the median quality and log of the size."""
    index = each.part.index
    held = "" if index.scan is None else f" at scan {index.scan}"
    quality = each.pictures.quality[each.pictures.quality > 0]
    short = each.pictures.sides.min(axis=1)
    short = short[short > 0]
    return (
        f"script {index.script}{held}",
        float(np.median(quality)) if len(quality) else np.nan,
        float(np.log(np.median(short))) if len(short) else np.nan,
    )


def _difference(one: Facts, other: Facts) -> str:
    """Return how the fidelity of two parts differs, in words; empty if it does not."""
    (kind, quality, size), (kind2, quality2, size2) = _fidelity(one), _fidelity(other)
    found = []
    if kind != kind2:
        found.append(f"{kind} and {kind2}")
    if min(len(one.pictures.hash), len(other.pictures.hash)) >= _ENOUGH:
        if abs(quality - quality2) >= _QUALITY_STEP:
            found.append(f"median JPEG quality {quality:.0f} and {quality2:.0f}")
        if abs(size - size2) >= np.log(_SIZE_RATIO):
            found.append(f"median short side {np.exp(size):.0f} and {np.exp(size2):.0f} pixels")
    return ", ".join(found)


def _mixtures(facts: Sequence[Facts]) -> Iterator[Finding]:
    """Find classes that come from one of several datasets of other fidelity only."""
    for split, parts in _by_split(facts).items():
        counts = [_class_counts([each]) for each in parts]
        totals = sum(counts, Counter[str]())
        for each, own in zip(parts, counts, strict=True):
            others = [other for other in parts if other is not each]
            differences = [_difference(each, other) for other in others]
            only = [name for name in own if own[name] == totals[name]]
            if not only or not others or not all(differences) or len(only) == len(totals):
                continue
            names = _listed(only)
            yield Finding(
                "fidelity-tells-class",
                True,
                f"in {split}, only {each.part.name} has {names}, and its fidelity differs from "
                f"{others[0].part.name}: {differences[0]}; a network can learn that instead of the "
                "object",
                len(only),
            )


def _splits_differ(facts: Sequence[Facts]) -> Iterator[Finding]:
    first, *others = _by_split(facts).values()
    for parts in others:
        one, other = first[0], parts[0]
        found = [text] if (text := _difference(one, other)) else []
        levels = [each.part.index.levels for each in (one, other)]
        if None not in levels and levels[0] != levels[1]:
            found.append(
                "the slopes of levels, so that a scan is another quality: encode the second with "
                f"--levels-of {one.part.name}, or read both by quality="
            )
        if min(len(one.pictures.hash), len(other.pictures.hash)) >= _ENOUGH:
            for name in ("gray", "wide"):
                own, its = (
                    float(getattr(each.pictures, f"is_{name}").mean()) for each in (one, other)
                )
                if abs(own - its) >= _SHARE_STEP:
                    what = "grayscale" if name == "gray" else "color profiles other than sRGB"
                    found.append(f"{what} {own:.0%} and {its:.0%}")
        if found:
            yield Finding(
                "splits-differ",
                False,
                f"{one.part.name} and {other.part.name} differ: {', '.join(found)}",
                1,
            )


def _shapes(facts: Sequence[Facts]) -> Iterator[Finding]:
    for number, each in enumerate(facts):
        sides = each.pictures.sides
        short, long = sides.min(axis=1), sides.max(axis=1)
        known = short > 0
        if not known.any():
            continue
        median = float(np.median(short[known]))
        tiny = known & (short < max(min(_TINY, median / 2), _TINY_OF_MEDIAN * median))
        narrow = known & (long > _MAX_RATIO * short)
        for kind, which, text in (
            ("tiny", tiny, f"far smaller than the median short side of {median:.0f} pixels"),
            ("narrow", narrow, f"more than {_MAX_RATIO} times as long as wide"),
        ):
            if count := int(which.sum()):
                what = f"{_plural(count, 'picture')} of {each.part.name}"
                named = each.name_some(number, which)
                yield Finding(kind, False, f"{what}: {text}", count, named)
