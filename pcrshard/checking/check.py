"""Check training and validation sets for what makes results wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .duplicates import find_same
from .findings import Facts, Finding, find_all
from .pictures import Part, Progress, common_scan, look
from .sheet import write_sheet

# Called with the name of a stage; returns what is called with its progress.
Stages = Callable[[str], Progress]


class CheckReport(NamedTuple):
    """What :meth:`pcrshard.PCRDataset.check` found.

    Attributes:
        facts: The datasets and their pictures.
        findings: What was found, the worst first.
    """

    facts: Sequence[Facts]
    findings: list[Finding]

    @property
    def is_wrong(self) -> bool:
        """Whether a finding makes results wrong, or ends a job."""
        return any(each.is_wrong for each in self.findings)

    def __bool__(self) -> bool:
        """Whether nothing makes results wrong."""
        return not self.is_wrong

    @property
    def datasets(self) -> list[dict[str, Any]]:
        """Samples, classes, sizes, quality, and shares of each dataset."""
        return [_describe(each) for each in self.facts]

    def as_dict(self) -> dict[str, Any]:
        """Return everything, with the keys of all samples concerned, as JSON can hold it."""
        return {
            "datasets": self.datasets,
            "findings": [
                {
                    "kind": each.kind,
                    "wrong": each.is_wrong,
                    "text": each.text,
                    "count": each.count,
                    "samples": [
                        [
                            {
                                "dataset": self.facts[picture.part].part.name,
                                "key": picture.key,
                                "class": self.facts[picture.part].label_name(picture.label),
                            }
                            for picture in group
                        ]
                        for group in each.groups
                    ],
                }
                for each in self.findings
            ],
        }

    def sheet(self, path: str) -> None:
        """Write an HTML file that shows the pictures of the worst findings.

        Reads the prefixes of their shards.

        Args:
            path: Target file.

        Raises:
            StorageError: The file cannot be written.
        """
        write_sheet(self.facts, self.findings, path)

    def __str__(self) -> str:
        lines = []
        for each in self.findings:
            lines.append(f"{'WRONG' if each.is_wrong else 'note'}: {each.text}")
            lines += [f"    {self._named(group)}" for group in each.groups[:3]]
            if len(each.groups) > 3:
                lines.append(f"    ... ({len(each.groups)})")
        return "\n".join(lines or ["nothing found"])

    def _named(self, group: Sequence[Any]) -> str:
        shown = [
            f"{self.facts[each.part].part.name}: {each.key} "
            f"({self.facts[each.part].label_name(each.label)})"
            for each in group[:3]
        ]
        return " = ".join(shown) + (f" = ... ({len(group)})" if len(group) > 3 else "")


def check_parts(
    parts: Sequence[Part],
    *,
    near: bool = False,
    stages: Stages | None = None,
) -> CheckReport:
    """Check parts of training and validation sets, the training set first.

    Args:
        parts: The parts; those with the same ``split`` are trained on together.
        near: Whether to report pictures that only look the same, too.
        stages: Makes a progress function of a stage.
    """
    begin = stages or (lambda _: lambda _done, _total: None)
    facts, unreadable = [], []
    scan = common_scan(parts)
    for part in parts:
        pictures, errors = look(part, scan, begin(f"check {part.name}"))
        facts.append(Facts(part, pictures))
        unreadable += errors
    same, alike = find_same(
        parts, [each.pictures for each in facts], begin("compare the pixels of candidates")
    )
    return CheckReport(facts, find_all(facts, unreadable, same, alike if near else []))


def _describe(each: Facts) -> dict[str, Any]:
    own, part = each.pictures, each.part
    labels = own.label[own.label >= 0]
    counts = np.unique(labels, return_counts=True)[1]
    short = own.sides.min(axis=1)
    quality = own.quality[own.quality > 0]
    return {
        "dataset": part.name,
        "set": part.split,
        "samples": part.num_samples,
        "classes": len(counts),
        "per_class": _range(counts),
        "short_side": _range(short[short > 0]),
        "jpeg_quality": _range(quality),
        "gray": _share(own.is_gray),
        "wide_color": _share(own.is_wide),
        "script": part.index.script,
    }


def _range(values: Any) -> str | None:
    """Return the least, median and largest value as text."""
    if not len(values):
        return None
    low, middle, high = np.quantile(values, [0, 0.5, 1])
    return f"{low:.0f}" if low == high else f"{low:.0f}-{middle:.0f}-{high:.0f}"


def _share(values: Any) -> str:
    return f"{values.mean():.0%}" if len(values) else "-"
