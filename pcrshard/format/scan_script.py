"""Scan scripts: which coefficients each scan group holds (SPEC.md section 3).

Pure functions and plain text; the syntax of a scan is that of ``jpegtran -scans``.
"""

from __future__ import annotations

import itertools
import re
from functools import lru_cache
from typing import NamedTuple

from ..jpeg.markers import ScanHeader

_SCAN = re.compile(r"\s*(\d(?:\s*,\s*\d){0,3})\s*:\s*(\d+)\s*-\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*")
_UNSENT = 99
MAX_GROUPS = 32


class ScanScript(NamedTuple):
    """A named scan script; each group is text, one or more scans separated by ``;``."""

    name: str
    groups: tuple[str, ...]

    @property
    def num_groups(self) -> int:
        """Number of scan groups, the highest scan."""
        return len(self.groups)

    @property
    def scans(self) -> list[ScanHeader]:
        """The scans of all groups, in order."""
        return [scan for group in self.groups for scan in parse_group(group)]


STANDARD = ScanScript(
    "standard",
    (
        "0,1,2: 0-0, 0, 1",
        "0: 1-5, 0, 2",
        "2: 1-63, 0, 1",
        "1: 1-63, 0, 1",
        "0: 6-63, 0, 2",
        "0: 1-63, 2, 1",
        "0,1,2: 0-0, 1, 0",
        "2: 1-63, 1, 0",
        "1: 1-63, 1, 0",
        "0: 1-63, 1, 0",
    ),
)

# For sources of JPEG quality 90 and above; docs/scripts.md describes the search.
Q95 = ScanScript(
    "q95",
    (
        "0,1,2: 0-0, 0, 2",
        "0: 1-2, 0, 3; 0: 3-9, 0, 4",
        "2: 1-63, 0, 3; 1: 1-63, 0, 3; 0: 10-20, 0, 4",
        "0: 3-20, 4, 3; 0: 1-2, 3, 2",
        "0: 21-63, 0, 3; 2: 1-63, 3, 2; 1: 1-63, 3, 2",
        "0: 3-20, 3, 2",
        "0,1,2: 0-0, 2, 1; 0: 21-63, 3, 2; 2: 1-63, 2, 1; 1: 1-63, 2, 1",
        "0: 1-63, 2, 1",
        "0,1,2: 0-0, 1, 0; 2: 1-63, 1, 0; 1: 1-63, 1, 0",
        "0: 1-63, 1, 0",
    ),
)


def parse_scan(text: str) -> ScanHeader:
    """Parse one scan of a script.

    Raises:
        ValueError: The text is not a scan, or a number is out of range.

    >>> parse_scan("0,1,2: 0-0, 0, 1")
    ScanHeader(components=(0, 1, 2), ss=0, se=0, ah=0, al=1)
    """
    match = _SCAN.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a scan like '0: 1-5, 0, 2', got {text!r}")
    ss, se, ah, al = map(int, match.groups()[1:])
    if not (ss <= se <= 63 and al <= 13 and ah <= 13):
        raise ValueError(f"expected a band within 0-63 and bit positions up to 13, got {text!r}")
    components = tuple(map(int, match[1].split(",")))
    return ScanHeader(components, ss, se, ah, al)


def parse_group(text: str) -> list[ScanHeader]:
    """Parse the scans of one group.

    Raises:
        ValueError: A part is not a scan.
    """
    return [parse_scan(part) for part in text.split(";")]


def parse_script(name: str, text: str) -> ScanScript:
    r"""Parse a script file: one scan group per line, scans separated by ``;``, ``#`` comments.

    ``jpegtran -scans`` accepts the same file.

    Raises:
        ValueError: A line does not consist of scans, there are more than 32 groups, or the scans
            do not send every coefficient of three components to its last bit in legal steps
            (T.81 G.1.1.1.1).

    >>> text = "0,1,2: 0-0, 0, 0;\n0: 1-63, 0, 0; 1: 1-63, 0, 0; 2: 1-63, 0, 0;"
    >>> parse_script("two", text).num_groups
    2
    """
    lines = (line.partition("#")[0].strip().rstrip("; ") for line in text.splitlines())
    script = ScanScript(name, tuple(filter(None, lines)))
    if not 1 <= script.num_groups <= MAX_GROUPS:
        raise ValueError(f"expected 1 to {MAX_GROUPS} scan groups, got {script.num_groups}")
    # The lowest bit position sent so far of each (component, coefficient).
    sent: dict[tuple[int, int], int] = {}
    for scan in script.scans:
        for key in scan.coefficients:
            legal = scan.ah == sent[key] == scan.al + 1 if key in sent else scan.ah == 0
            if not legal:
                raise ValueError(
                    f"scan {scan} does not follow on from what was sent of coefficient {key[1]}"
                )
            sent[key] = scan.al
    for component, i in itertools.product(range(3), range(64)):
        if sent.get((component, i), _UNSENT):
            raise ValueError(
                f"coefficient {i} of component {component} is not sent to its last bit"
            )
    return script


def scans_for(
    script: ScanScript,
    color: str,
    num_components: int,
) -> list[ScanHeader]:
    """Return the scans of an image (SPEC.md section 3).

    For YCbCr, those of the script; for other color spaces, each luma scan for every component.

    Args:
        script: A script for YCbCr images.
        color: Color space of the image.
        num_components: Number of its components.

    >>> images = ("ycc", 3), ("gray", 1), ("rgb", 3), ("cmyk", 4)
    >>> [len(scans_for(STANDARD, *image)) for image in images]
    [10, 6, 14, 18]
    """
    if color == "ycc":
        return script.scans
    together = [tuple(range(num_components))]
    alone = [(component,) for component in range(num_components)]
    return [
        scan._replace(components=components)
        for scan in script.scans
        if 0 in scan.components
        for components in (together if scan.ss == 0 else alone)
    ]


@lru_cache(maxsize=256)
def group_scans(
    script: ScanScript,
    scans: tuple[ScanHeader, ...],
    color: str,
) -> tuple[int, ...]:
    """Assign each scan of an image to a scan group, by fidelity (SPEC.md section 3).

    Args:
        script: The shard's script, for YCbCr images.
        scans: The image's scans, in file order.
        color: Its color space; if not ``ycc``, all components count as luma.

    Returns:
        For each scan a group 1..N, never decreasing.

    >>> group_scans(STANDARD, tuple(scans_for(STANDARD, "gray", 1)), "gray")
    (1, 2, 5, 6, 7, 10)
    """
    # Per group, the lowest bit position sent so far of each (component, coefficient).
    sent_by_group: list[dict[tuple[int, int], int]] = [{}]
    for text in script.groups:
        sent = sent_by_group[-1].copy()
        for scan in parse_group(text):
            sent |= dict.fromkeys(scan.coefficients, scan.al)
        sent_by_group.append(sent)

    def first_group(scan: ScanHeader) -> int:
        wanted = scan if color == "ycc" else scan._replace(components=(0,))
        for group, sent in enumerate(sent_by_group):
            if all(sent.get(key, _UNSENT) <= scan.al for key in wanted.coefficients):
                return group
        return script.num_groups

    return tuple(itertools.accumulate(map(first_group, scans), max))
