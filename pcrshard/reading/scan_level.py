"""The scan to read: a number, ``"full"``, or a level that a training job may change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, overload

from ..errors import ScanUnavailable, naming
from ..format.dataset_index import ShardEntry, resolve_scan, tables_of
from ..format.scan import FULL, Scan, check_scan
from ..format.scan_script import MAX_GROUPS
from .shared_integers import SharedIntegers

FirstScan = Scan | Literal["highest"]
# Values of a level's shared number besides scans.
_FULL_NUMBER = 0
_HIGHEST_NUMBER = -1


def highest_scan(entries: Sequence[ShardEntry]) -> Scan:
    """Return ``"full"``, or the highest scan that every shard of a staged copy holds."""
    staged = (table.staged for table in tables_of(entries))
    return min((scan for scan in staged if scan), default=FULL)


class Followed(NamedTuple):
    """What a dataset needs of a scan.

    Attributes:
        entries: The shards of the dataset index.
        firsts: The first scan of each field that the job reads, N + 1 for ``"full"``.
        name: Name of the dataset in messages.
    """

    entries: Sequence[ShardEntry]
    firsts: Mapping[str, int]
    name: str

    def check(self, scan: Scan) -> None:
        """Raise ``ScanUnavailable`` unless every shard has the scan, and the scan every field."""
        with naming(where=self.name):
            for table in tables_of(self.entries):
                table.stops(scan)
            num_groups = self.entries[0].num_groups
            position = check_scan(scan, num_groups, 0)
            for field, first in self.firsts.items():
                if position < first:
                    begin = FULL if first > num_groups else first
                    raise ScanUnavailable(f"field {field!r} begins at scan {begin}, got {scan}")


class ScanLevel:
    """The scan that readers use from their next shard on, shared with DataLoader workers.

    It reaches workers with the dataset, under fork, spawn and forkserver, and is stored in shared
    memory, so that running workers see ``level.value = 5`` in the training loop.

    >>> level = ScanLevel(2)
    >>> level.value = "full"
    >>> level
    ScanLevel('full')

    Args:
        scan: Highest scan to read, 1-based, or ``"full"``. By default ``"full"``, and for a
            :class:`PCRDataset` that is a staged copy the highest scan that it holds.

    Attributes:
        highest: The highest scan that the level may be set to.
    """

    # A mistyped name is an error, not an attribute without effect.
    __slots__ = ("_followers", "_number", "highest")

    def __init__(self, scan: FirstScan = "highest") -> None:
        self._number = SharedIntegers([_HIGHEST_NUMBER])
        self._followers: dict[str, Followed] = {}
        self.highest: Scan = FULL
        if scan != "highest":
            self.value = scan

    @property
    def value(self) -> Scan:
        """The highest scan to read, 1-based, or ``"full"``.

        Setting it raises ``TypeError`` for a value that is not a scan, and ``ScanUnavailable`` for
        a scan that is missing from the dataset that follows the level.
        """
        number: int = self._number[0]
        return self.highest if number == _HIGHEST_NUMBER else number or FULL

    @value.setter
    def value(self, scan: Scan) -> None:
        self.check(scan)
        self._number[0] = _FULL_NUMBER if scan == FULL else scan

    def check(self, scan: Scan) -> None:
        """Raise the error that setting the level to this scan would raise."""
        check_scan(scan, MAX_GROUPS)
        for followed in self._followers.values():
            followed.check(scan)

    def follow(self, followed: Followed) -> None:
        """Let a dataset follow this level; the one with the fewest scans sets the limit.

        One of the same name is replaced: a copy that has been staged to a higher scan since then.

        Raises:
            ScanUnavailable: The dataset lacks the scan that the level is set to, or a field begins
                at a higher one.
        """
        if self._number[0] != _HIGHEST_NUMBER:
            followed.check(self.value)
        self._followers[followed.name] = followed
        highest = (highest_scan(each.entries) for each in self._followers.values())
        self.highest = min((scan for scan in highest if scan != FULL), default=FULL)

    def __repr__(self) -> str:
        return f"ScanLevel({self.value!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ScanLevel:
        """Return the level itself, so that a copied pipeline follows it."""
        return self


class ScanPerDataset(NamedTuple):
    """The scans of several datasets at one quality.

    Attributes:
        scans: The scan of each dataset.
    """

    scans: tuple[Scan, ...]


ScanChoice = Scan | ScanLevel | ScanPerDataset
# Values of ``scan=`` where there is a dataset index.
ScanOrFraction = Annotated[
    Scan | ScanLevel | float, "a scan number, a fraction in (0, 1), 'full' or a ScanLevel"
]


@overload
def current_scan(scan: Scan | ScanLevel) -> Scan: ...
@overload
def current_scan(scan: ScanChoice) -> Scan | ScanPerDataset: ...
def current_scan(scan: ScanChoice) -> Scan | ScanPerDataset:
    """Return the scan to read now: a level's value, or the scan itself."""
    return scan.value if isinstance(scan, ScanLevel) else scan


def resolve_choice(
    entries: Sequence[ShardEntry],
    scan: ScanOrFraction,
    name: str,
    firsts: Mapping[str, int] = MappingProxyType({}),
) -> Scan | ScanLevel:
    """Convert a fraction to a scan of a dataset, or let a level follow the dataset.

    Args:
        entries: The shards of the dataset index.
        scan: The requested scan.
        name: Name of the dataset in messages.
        firsts: The first scan of each field that the job reads.

    Raises:
        ScanUnavailable: The scan does not exist, a staged copy does not hold it, or a field begins
            at a higher one.
        TypeError: The scan is neither an integer, nor a fraction, nor ``"full"``.
    """
    followed = Followed(entries, firsts, name)
    if isinstance(scan, ScanLevel):
        scan.follow(followed)
        return scan
    resolved: Scan = resolve_scan(entries, scan)
    followed.check(resolved)
    return resolved
