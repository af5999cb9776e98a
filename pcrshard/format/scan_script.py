"""Scan scripts: which coefficients each scan group holds (SPEC.md section 3).

Pure functions and plain text; the syntax of a scan is that of ``jpegtran -scans``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

from ..jpeg.markers import Scan

_SCAN = re.compile(r"\s*(\d(?:\s*,\s*\d)*)\s*:\s*(\d+)\s*-\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*")
_UNSENT = 99
_MAX_GROUPS = 32


class ScanScript(NamedTuple):
    """A named scan script; each group is text, one or more scans separated by ``;``."""

    name: str
    groups: tuple[str, ...]

    @property
    def num_groups(self) -> int:
        """Scan groups, that is, the highest scan that can be asked for."""
        return len(self.groups)


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

# For sources of JPEG quality 90 and above; docs/scripts.md has the search and the figures.
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


def parse_scan(text: str) -> Scan:
    """Parse one scan of a script.

    >>> parse_scan("0,1,2: 0-0, 0, 1")
    Scan(components=(0, 1, 2), ss=0, se=0, ah=0, al=1)
    """
    match = _SCAN.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a scan like '0: 1-5, 0, 2', got {text!r}")
    ss, se, ah, al = (int(number) for number in match.groups()[1:])
    if not (ss <= se <= 63 and al <= 13 and ah <= 13):
        raise ValueError(f"expected a band within 0-63 and bit positions up to 13, got {text!r}")
    return Scan(tuple(int(c) for c in match[1].split(",")), ss, se, ah, al)


def parse_script(name: str, text: str) -> ScanScript:
    r"""Parse a script file: one scan group a line, its scans separated by ``;``, ``#`` comments.

    The same file serves ``jpegtran -scans``.

    Raises:
        ValueError: A line is not made of scans, there are more than 32 groups, or the scans do not send every coefficient of
            three components to its last bit in legal steps (T.81 G.1.1.1.1).

    >>> parse_script("two", "0,1,2: 0-0, 0, 0;\n0: 1-63, 0, 0; 1: 1-63, 0, 0; 2: 1-63, 0, 0;").num_groups
    2
    """
    lines = [line.partition("#")[0].strip().rstrip("; ") for line in text.splitlines()]
    script = ScanScript(name, tuple(line for line in lines if line))
    if not 1 <= script.num_groups <= _MAX_GROUPS:
        raise ValueError(f"expected 1 to {_MAX_GROUPS} scan groups, got {script.num_groups}")
    bits: dict[tuple[int, int], int] = {}
    for scan in (parse_scan(part) for group in script.groups for part in group.split(";")):
        for key in ((c, i) for c in scan.components for i in range(scan.ss, scan.se + 1)):
            if scan.ah != bits.get(key, 0) or (key in bits and scan.al != scan.ah - 1):
                raise ValueError(
                    f"scan {scan} does not follow on from what was sent of coefficient {key[1]}"
                )
            bits[key] = scan.al
    missing = [(c, i) for c in range(3) for i in range(64) if bits.get((c, i), _UNSENT)]
    if missing:
        raise ValueError(
            f"coefficient {missing[0][1]} of component {missing[0][0]} is not sent to its last bit"
        )
    return script


def scans_for(script: ScanScript, colour: str, num_components: int) -> list[Scan]:
    """The scans of an image: those of the script for YCbCr; else each luma scan for every component (SPEC.md section 3).

    Args:
        script: Written for a YCbCr image.
        colour: Colour space of the image.
        num_components: Its components.

    >>> [len(scans_for(STANDARD, *image)) for image in (("ycc", 3), ("gray", 1), ("rgb", 3), ("cmyk", 4))]
    [10, 6, 14, 18]
    """
    scans = [parse_scan(text) for group in script.groups for text in group.split(";")]
    if colour == "ycc":
        return scans
    every = tuple(range(num_components))
    luma = [scan for scan in scans if 0 in scan.components]
    return [
        scan._replace(components=components)
        for scan in luma
        for components in ([every] if scan.ss == 0 else [(c,) for c in every])
    ]


def group_scans(script: ScanScript, scans: Sequence[Scan], colour: str) -> list[int]:
    """Say which scan group each scan of an image belongs to, by fidelity (SPEC.md section 3).

    Args:
        script: The shard's script, written for a YCbCr image.
        scans: The image's scans, in file order.
        colour: Its colour space; components of all but ``ycc`` rank as luma.

    Returns:
        For each scan a group 1..N, never decreasing.

    >>> gray = [Scan((0,), 0, 0, 0, 1), Scan((0,), 1, 5, 0, 2), Scan((0,), 6, 63, 0, 2)]
    >>> group_scans(STANDARD, gray, "gray")
    [1, 2, 5]
    """
    return list(_group_scans(script, tuple(scans), colour == "ycc"))


@functools.lru_cache(maxsize=256)
def _group_scans(script: ScanScript, scans: tuple[Scan, ...], ycc: bool) -> tuple[int, ...]:
    bits = _bits_sent(script)
    groups: list[int] = []
    for scan in scans:
        components = scan.components if ycc else (0,)
        wanted = [(c, i) for c in components for i in range(scan.ss, scan.se + 1)]
        first = next(
            (
                g
                for g, sent in enumerate(bits, 1)
                if all(sent.get(key, _UNSENT) <= scan.al for key in wanted)
            ),
            script.num_groups,
        )
        groups.append(max(first, groups[-1] if groups else 1))
    return tuple(groups)


def _bits_sent(script: ScanScript) -> list[dict[tuple[int, int], int]]:
    """For each group, the lowest bit position sent so far of each (component, coefficient)."""
    sent: dict[tuple[int, int], int] = {}
    result = []
    for group in script.groups:
        for scan in map(parse_scan, group.split(";")):
            sent.update(
                {(c, i): scan.al for c in scan.components for i in range(scan.ss, scan.se + 1)}
            )
        result.append(dict(sent))
    return result
