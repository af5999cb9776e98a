"""Scattered reads: each piece in its object, the file asked once, and nothing else read."""

from __future__ import annotations

import os
import resource
import sys
import tracemalloc
from pathlib import Path
from typing import Any
from unittest import mock

import crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcrshard.native import scatter
from pcrshard.native.scatter import Groups

pytestmark = pytest.mark.skipif(not scatter.available, reason="NO SCATTERED READS HERE")
DATA = np.random.default_rng(0).bytes(1 << 20)
NOTHING = Groups(np.zeros((1, 0), np.uint32), np.zeros(1, np.int64))


@pytest.fixture(scope="module")
def fd(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("scatter") / "data"
    path.write_bytes(DATA)
    handle = os.open(path, os.O_RDONLY)
    yield handle
    os.close(handle)


def groups(
    sizes: list[list[int]], starts: list[int], base: int = 0, offsets: list[int] | None = None
) -> Groups:
    places = None if offsets is None else np.array(offsets, np.uint64)
    return Groups(np.array(sizes, np.uint32), np.array(starts, np.int64), base, places)


def read(*where: Any, **how: Any) -> list[bytes | None]:
    """The items, ``None`` in the place of each that is damaged."""
    values, damaged = scatter.read(*where, **how)
    return [None if i in damaged else value for i, value in enumerate(values)]


def plain(found: Groups, ending: bytes, data: bytes = DATA) -> list[bytes | None]:
    """The same by slices."""
    parts: list[list[bytes]] = [[] for _ in range(found.sizes.shape[1])]
    if found.offsets is not None:
        for i, start in enumerate(found.offsets.tolist()):
            offset = start
            for size in found.sizes[: found.base, i].tolist():
                parts[i].append(data[offset : offset + size])
                offset += size
    for row in range(found.base, len(found.sizes)):
        offset = int(found.starts[row])
        for i, size in enumerate(found.sizes[row].tolist()):
            parts[i].append(data[offset : offset + size])
            offset += size
    return [b"".join(part) + ending if any(part) else None for part in parts]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, Groups]:
    """A range, and groups of pieces in it: with and without gaps, by item or by batch."""
    start = at = draw(st.integers(0, 5000))
    num_items, num_rows = draw(st.integers(1, 40)), draw(st.integers(1, 11))
    base = draw(st.integers(0, num_rows))
    sizes = st.one_of(
        st.just(0), st.integers(1, 50), st.integers(1, 3000), st.integers(200_000, 300_000)
    )
    gaps = st.sampled_from([0, 0, 0, 1, 512, 4096, 10_000])
    table = np.zeros((num_rows, num_items), np.uint32)
    starts, offsets = np.zeros(num_rows, np.int64), np.zeros(num_items, np.uint64)

    def place(row: int, i: int) -> int:
        size = draw(sizes)
        table[row, i] = size if at + size <= len(DATA) - 9000 else 0
        return int(table[row, i])

    for i in range(num_items if base else 0):
        offsets[i] = at = min(at + draw(gaps), len(DATA) - 9000)
        for row in range(base):
            at += place(row, i)
    for row in range(base, num_rows):
        starts[row] = at = min(at + draw(gaps), len(DATA) - 9000)
        for i in range(num_items):
            at += place(row, i)
    return (
        start,
        draw(st.integers(at, at + 9000)),
        Groups(table, starts, base, offsets if base else None),
    )


@given(layout=layouts(), ending=st.sampled_from([b"", b"\xff\xd9"]))
def test_every_piece_is_in_its_object(
    fd: int, layout: tuple[int, int, Groups], ending: bytes
) -> None:
    """Whatever the sizes and gaps: objects are what slices of the file would have given."""
    start, stop, found = layout
    expected = plain(found, ending)
    assert read(fd, start, stop, found, ending=ending) == expected
    crcs = np.array([crc32c.crc32c(item or b"") for item in plain(found, b"")], np.uint32)
    assert read(fd, start, stop, found, ending=ending, crcs=crcs) == expected
    crcs[0] ^= 1 << 31
    assert read(fd, start, stop, found, ending=ending, crcs=crcs) == [None, *expected[1:]]


@given(layout=layouts())
def test_memory_gives_what_a_file_gives(fd: int, layout: tuple[int, int, Groups]) -> None:
    """A range that came over the network is taken apart like one of a local file, damage
    included.
    """
    start, stop, found = layout
    crcs = np.array([crc32c.crc32c(item or b"") for item in plain(found, b"")], np.uint32)
    crcs[-1] ^= 1
    view = memoryview(DATA)[start:stop]
    expected = scatter.read(fd, start, stop, found, ending=b"!", crcs=crcs)
    assert scatter.read(view, start, stop, found, ending=b"!", crcs=crcs) == expected
    with pytest.raises(ValueError, match="a buffer that holds the range"):
        scatter.read(view, start, stop + 1, found)


@given(layout=layouts())
def test_without_a_compiler(fd: int, layout: tuple[int, int, Groups]) -> None:
    """Where the module could not be built, the same objects are made of slices."""
    start, stop, found = layout
    crcs = np.array([crc32c.crc32c(item or b"") for item in plain(found, b"")], np.uint32)
    crcs[0] ^= 1
    expected = scatter.read(fd, start, stop, found, ending=b"!", crcs=crcs)
    with mock.patch.object(scatter, "available", False):
        assert scatter.read(fd, start, stop, found, ending=b"!", crcs=crcs) == expected
        view = memoryview(DATA)[start:stop]
        assert scatter.read(view, start, stop, found, ending=b"!", crcs=crcs) == expected
        assert scatter.rows(("a", "b"), ([1, 2], (3, 4, 5)), 2) == [
            {"a": 1, "b": 3},
            {"a": 2, "b": 4},
        ]


@pytest.mark.parametrize("shift", [0, 1, 7])
def test_checksums_of_every_size(fd: int, shift: int) -> None:
    """With any instructions, each size up to some steps has the CRC-32C of the crc32c package."""
    sizes = list(range(1, 1200))
    found = groups([sizes], [shift])
    crcs = np.array([crc32c.crc32c(item or b"") for item in plain(found, b"")], np.uint32)
    assert None not in read(fd, shift, len(DATA), found, crcs=crcs)
    assert read(fd, shift, len(DATA), found, crcs=crcs ^ np.uint32(1)) == [None] * len(sizes)


def test_arrays_may_lie_anywhere(fd: int) -> None:
    """The arrays of an index begin at any byte of it."""
    numbers = groups([[600] * 3, [700] * 3], [5000, 0], 1, [4100, 4700, 5300])
    numbers.starts[1] = 6000

    def shift(array: np.ndarray) -> np.ndarray:
        return np.ndarray(array.shape, array.dtype, b"\0" + array.tobytes(), 1)

    crcs = np.array([crc32c.crc32c(item or b"") for item in plain(numbers, b"")], np.uint32)
    assert numbers.offsets is not None
    shifted = Groups(shift(numbers.sizes), shift(numbers.starts), 1, shift(numbers.offsets))
    assert not shifted.sizes.flags.aligned
    assert read(fd, 4000, 9000, shifted, crcs=shift(crcs)) == plain(numbers, b"")


def test_the_range_is_read_once(fd: int) -> None:
    """Storage sees each piece once, and nothing of what lies between groups."""
    if not os.path.exists("/proc/self/io"):
        pytest.skip("NO /proc/self/io HERE")

    def asked() -> int:
        with open("/proc/self/io", "rb", buffering=0) as file:
            text = file.read(4096)
        return int(text.split()[1]) + len(text)

    pieces = groups([[600] * 7] * 180, [5000 + 5300 * row for row in range(180)])
    before = asked()
    read(fd, 4000, 1_000_000, pieces)
    between = asked() - before
    before = asked()
    assert between - (asked() - before) == 600 * 7 * 180


@pytest.mark.parametrize(
    "pieces",
    [
        groups([[5], [5]], [10, 14]),
        groups([[5], [5]], [20, 10]),
        groups([[5]], [9]),
        groups([[5]], [96]),
        groups([[1]], [101]),
        groups([[2**32 - 1]], [10]),
        groups([[5]], [-1]),
        groups([[5]], [-(2**63)]),
        groups([[5]], [2**63 - 1]),
        groups([[50, 41]], [10]),
        groups([[5, 5]], [0], 1, [20, 10]),
        groups([[5, 5]], [0], 1, [20, 24]),
        groups([[5, 5]], [0], 1, [20, 2**64 - 1]),
        groups([[5, 5], [1, 1]], [0, 29], 1, [20, 25]),
    ],
)
def test_pieces_that_do_not_fit_are_refused(fd: int, pieces: Groups) -> None:
    """No byte goes to memory that is not its own."""
    with pytest.raises(ValueError, match="expected pieces in order"):
        read(fd, 10, 100, pieces)


ONE = groups([[5]], [10])
ONE_CRC = np.zeros(1, np.uint32)


@pytest.mark.parametrize(
    ("start", "stop", "pieces", "crcs"),
    [
        (-1, 99, ONE, None),
        (99, 98, ONE, None),
        (0, 99, ONE, np.zeros(2, np.uint32)),
        (0, 99, ONE, np.zeros(0, np.uint32)),
        (0, 99, ONE._replace(starts=np.zeros(2, np.int64)), None),
        (0, 99, ONE._replace(starts=np.zeros(0, np.int64)), None),
        (0, 99, ONE._replace(base=1), None),
        (0, 99, ONE._replace(base=-1), None),
        (0, 99, ONE._replace(base=2, offsets=np.zeros(1, np.uint64)), None),
        (0, 99, ONE._replace(base=1, offsets=np.zeros(2, np.uint64)), None),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    fd: int, start: int, stop: int, pieces: Groups, crcs: np.ndarray | None
) -> None:
    """A negative range, or too few of anything, is an error, not a read of foreign memory."""
    assert read(fd, 0, 99, ONE, crcs=ONE_CRC) == [None]
    with pytest.raises(ValueError, match="do not fit together"):
        read(fd, start, stop, pieces, crcs=crcs)


def test_a_file_that_ends_early_is_an_error(fd: int) -> None:
    """A shard that was cut while it was open gives an error that says where it ends."""
    end = len(DATA)
    with pytest.raises(EOFError, match=f"ends at {end}"):
        read(fd, 0, end + 1, groups([[11]], [end - 10]))


def test_the_systems_errors_are_raised(tmp_path: Path) -> None:
    """What the system refuses is an OSError with its own words."""
    with pytest.raises(OSError, match="Bad file descriptor"):
        read(-1, 0, 10, groups([[1]], [0]))
    folder = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(IsADirectoryError):
        read(folder, 0, 10, groups([[1]], [0]))
    os.close(folder)


def test_short_answers_are_continued() -> None:
    """Where a file system gives less than it was asked for, it is asked for the rest."""
    path = "/proc/kallsyms"  # gives a page or so at a time
    if not os.path.exists(path):
        pytest.skip("NO /proc/kallsyms HERE")
    handle = os.open(path, os.O_RDONLY)
    try:
        data = b""
        while len(data) < 100_000 and (part := os.pread(handle, 100_000 - len(data), len(data))):
            data += part
        if len(data) < 100_000 or len(os.pread(handle, 100_000, 0)) == 100_000:
            pytest.skip("THIS SYSTEM HAS NO FILE THAT GIVES LESS THAN IS ASKED")
        pieces = groups([[800] * 5] * 20, [4500 * row + row % 3 for row in range(20)])
        assert read(handle, 0, 100_000, pieces) == plain(pieces, b"", data)
    finally:
        os.close(handle)


def test_objects_that_were_not_finished_are_freed(fd: int) -> None:
    """An error in the middle of a read leaves nothing in memory, however often it happens."""
    pieces = groups([[9] * 1000, [9] * 1000], [0, len(DATA) - 8000])
    tracemalloc.start()
    for _ in range(20):
        with pytest.raises(EOFError):
            read(fd, 0, len(DATA) + 1000, pieces)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 500_000


def test_a_claim_that_memory_cannot_hold_is_refused(fd: int) -> None:
    """More objects than there is memory for is a MemoryError, and the process lives."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 34, hard))
    try:
        with pytest.raises(MemoryError):
            read(fd, 0, 1 << 62, groups([[(1 << 32) - 1] * 8], [0]))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_rows_are_dicts_of_columns() -> None:
    """A table given by columns, as lists or tuples, comes as one dict per row, names in order."""
    columns = (("a", "b"), [b"1", None], (None, b"2", b"more than asked for"))
    rows = scatter.rows(("__key__", "jpg", "cls"), columns, 2)
    assert rows == [
        {"__key__": "a", "jpg": b"1", "cls": None},
        {"__key__": "b", "jpg": None, "cls": b"2"},
    ]
    assert list(rows[0]) == ["__key__", "jpg", "cls"]
    assert scatter.rows((), (), 0) == []


@pytest.mark.parametrize(
    ("names", "columns", "count", "error"),
    [
        (("a",), (), 1, ValueError),
        (("a",), ([1],), -1, ValueError),
        (("a",), ([1],), 2, IndexError),
        (("a",), (None,), 1, TypeError),
        (([],), ([1],), 1, TypeError),
        (["a"], ([1],), 1, TypeError),
    ],
)
def test_rows_that_cannot_be_made(
    names: Any, columns: Any, count: int, error: type[Exception]
) -> None:
    """Columns that are too short, or no columns, are an error that leaves nothing in memory."""
    before = sys.getrefcount(columns)
    for _ in range(3):
        with pytest.raises(error):
            scatter.rows(names, columns, count)
    assert sys.getrefcount(columns) == before
