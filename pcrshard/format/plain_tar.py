"""What an index says of a plain tar: where its members lie, and of which tar it is (SPEC 2.4).

Bytes in, bytes out; no I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from .columns import ABSENT, Columns, encode_byte_strings
from .shard_head import BLOCK, require, round512

if TYPE_CHECKING:
    from .shard_index import ShardIndex

PLAIN: Literal["tar"] = "tar"
_MAX_VERSION_BYTES = 1024
_MOST_PLACE = 1 << 62
# Bytes of the tar, where this part of it begins, number of this part, number of parts, whether it
# is compressed, whether there are checksums.
_NUMBERS = struct.Struct("<QQIIBB")


def plain_tar_index(name: str, part: int) -> str:
    """Return the name of the file that has the index of a part of a tar.

    >>> plain_tar_index("a.tar", 0), plain_tar_index("a.tar", 2)
    ('a.tar.pcr', 'a.tar.2.pcr')
    """
    return f"{name}.{part}.pcr" if part else f"{name}.pcr"


class PlainTarIndexes(Sequence[str]):
    """The names of the files that have the indexes of plain tars.

    Args:
        names: The name of the tar of each entry; those of the parts of a tar follow each other.

    >>> list(PlainTarIndexes(["a.tar", "a.tar", "b.tar"]))
    ['a.tar.pcr', 'a.tar.1.pcr', 'b.tar.pcr']
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        name = self.names[place]
        first = place
        while first and self.names[first - 1] == name:
            first -= 1
        return plain_tar_index(name, place - first)


@dataclass(frozen=True, eq=False)
class PlainTar:
    """A part of a plain tar with M members: the images, then the values of each other field.

    Attributes:
        num_bytes: Size of the tar as it is stored.
        begin: Where the part begins in the tar, which is that of its first header.
        part: Number of the part, from 0.
        parts: Number of parts of the tar.
        is_packed: Whether the tar is compressed; places are those in the tar without compression.
        version: What the store said of the tar when it was indexed, see
            :class:`pcrshard.storage.Listed`; empty if it says nothing.
        starts: (M,) int64, where the data of each member begins; 0 if it is absent.
        sizes: (M,) uint32, bytes of each member; ``ABSENT`` if it is absent.
        crcs: (M,) uint32, CRC-32C of each member, 0 if it is absent; empty without checksums.
    """

    num_bytes: int
    begin: int
    part: int
    parts: int
    is_packed: bool
    version: str
    starts: NDArray[np.int64]
    sizes: NDArray[np.uint32]
    crcs: NDArray[np.uint32]

    @property
    def is_checked(self) -> bool:
        """Whether the index has checksums."""
        return len(self.crcs) > 0

    @property
    def are_present(self) -> NDArray[np.bool_]:
        """(M,) whether each member is there."""
        present: NDArray[np.bool_] = self.sizes != ABSENT
        return present

    @property
    def stops(self) -> NDArray[np.int64]:
        """(M,) end of the data of each member; 0 if it is absent."""
        return self.starts + np.where(self.are_present, self.sizes, 0)

    @property
    def end(self) -> int:
        """End of the last member's data."""
        return int(self.stops.max(initial=self.begin))

    def encode(self) -> bytes:
        """Return the columns of SPEC 2.4."""
        numbers = _NUMBERS.pack(
            self.num_bytes, self.begin, self.part, self.parts, self.is_packed, self.is_checked
        )
        arrays = (self.starts.astype("<u8"), self.sizes.astype("<u4"), self.crcs.astype("<u4"))
        version = encode_byte_strings([self.version.encode(errors="replace")])
        return b"".join([numbers, version, *(array.tobytes() for array in arrays)])


def decode_plain_tar(columns: Columns, num_members: int) -> PlainTar:
    """Parse the columns of a part of a plain tar; raises :class:`CorruptIndex`."""
    numbers = columns.read(_NUMBERS.size)
    require(len(numbers) == _NUMBERS.size, "a column is longer than the index")
    num_bytes, begin, part, parts, packed, checked = _NUMBERS.unpack(numbers)
    require(packed <= 1 and checked <= 1, "packed and checked are not 0 or 1")
    require(part < parts and not (packed and parts > 1), f"part {part} cannot be one of {parts}")
    (version,) = columns.byte_strings(1)
    text = (version or b"").decode(errors="replace")
    is_text = version is not None and text.encode() == version
    require(is_text and len(text.encode()) <= _MAX_VERSION_BYTES, "the version is not legal")
    starts: NDArray[Any] = columns.array("<u8", num_members)
    sizes = columns.array("<u4", num_members)
    crcs = columns.array("<u4", num_members if checked else 0)
    require(int(starts.max(initial=begin)) < _MOST_PLACE, "a member begins beyond every tar")
    return PlainTar(
        num_bytes, begin, part, parts, bool(packed), text, starts.astype(np.int64), sizes, crcs
    )


def check_plain_tar(index: ShardIndex, tar: PlainTar) -> None:
    """Check the rules of SPEC 2.4; raises :class:`CorruptIndex`."""
    present = tar.are_present
    absent = ~present
    is_nowhere = not tar.starts[absent].any() and not (tar.is_checked and tar.crcs[absent].any())
    require(is_nowhere, "a member that is not there has a place or a checksum")
    alike = np.array_equal(present[: index.num_units], index.states != 0)
    require(alike and not (index.states == 1).any(), "the states are not those of the members")
    begins = tar.starts[present]
    require((begins >= tar.begin + BLOCK).all(), "a member begins before its header")
    end = tar.end
    require(tar.is_packed or end <= tar.num_bytes, "a member ends after the tar")
    stop = index.head.index_stop + round512(end - tar.begin)
    require(index.head.prefix_stops == (stop,), f"expected the tar to end at {stop}")
    for name, values in index.fields.items():
        own = [ABSENT if value is None else len(value) for value in values]
        rows = index.member_rows(name)
        fits = np.array_equal(tar.sizes[rows.start : rows.stop], np.array(own, np.uint32))
        require(fits, f"values of {name!r} are not as long as their members")
