"""Scattered reads: every piece in its object, the file asked once, and nothing read that was not asked for."""

from __future__ import annotations

import os
import resource
import tracemalloc
from pathlib import Path

import crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcrshard.native import scatter

pytestmark = pytest.mark.skipif(not scatter.available, reason="NO SCATTERED READS HERE")
DATA = np.random.default_rng(0).bytes(1 << 20)


@pytest.fixture(scope="module")
def fd(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("scatter") / "data"
    path.write_bytes(DATA)
    handle = os.open(path, os.O_RDONLY)
    yield handle
    os.close(handle)


def table(*rows: tuple[int, int, int]) -> np.ndarray:
    return np.array(list(rows), scatter.PIECE)


def plain(start: int, stop: int, pieces: np.ndarray, num_items: int, ending: bytes) -> list[bytes | None]:
    """The same by slices."""
    parts: list[list[bytes]] = [[] for _ in range(num_items)]
    for offset, size, item in pieces.tolist():
        assert start <= offset <= offset + size <= stop
        parts[item].append(DATA[offset : offset + size])
    return [b"".join(part) + ending if part else None for part in parts]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, np.ndarray, int]:
    """A range, and pieces of one byte to beyond a batch in it, with and without gaps, given to few or many items."""
    start = at = draw(st.integers(0, 5000))
    num_items, rows = draw(st.integers(1, 40)), []
    sizes = st.one_of(st.integers(1, 50), st.integers(1, 9000), st.integers(200_000, 300_000))
    for gap, size in draw(st.lists(st.tuples(st.sampled_from([0, 0, 0, 1, 512, 4096, 10_000]), sizes), max_size=700)):
        if at + gap + size > len(DATA):
            break
        rows.append((at + gap, size, draw(st.integers(0, num_items - 1))))
        at += gap + size
    return start, draw(st.integers(at, min(at + 9000, len(DATA)))), table(*rows), num_items


@given(layout=layouts(), ending=st.sampled_from([b"", b"\xff\xd9"]))
def test_every_piece_is_in_its_object(fd: int, layout: tuple[int, int, np.ndarray, int], ending: bytes) -> None:
    """Whatever the sizes and gaps: objects are what slices of the file would have given."""
    start, stop, pieces, num_items = layout
    expected = plain(start, stop, pieces, num_items, ending)
    assert scatter.read(fd, start, stop, pieces, num_items, ending=ending) == expected
    bare = plain(start, stop, pieces, num_items, b"")
    crcs = np.array([crc32c.crc32c(item or b"") for item in bare], np.uint32)
    assert scatter.read(fd, start, stop, pieces, num_items, ending=ending, crcs=crcs) == expected
    crcs[0] ^= 1 << 31
    assert scatter.read(fd, start, stop, pieces, num_items, ending=ending, crcs=crcs) == [None, *expected[1:]]


def test_the_range_is_read_once(fd: int) -> None:
    """The system is asked for every byte of the range, gaps too, and for none twice: storage sees one read from front to end."""
    if not os.path.exists("/proc/self/io"):
        pytest.skip("NO /proc/self/io HERE")

    def asked() -> int:
        with open("/proc/self/io", "rb", buffering=0) as file:
            text = file.read(4096)
        return int(text.split()[1]) + len(text)

    pieces = table(*((5000 + 700 * i, 600, i % 7) for i in range(1300)))
    before = asked()
    scatter.read(fd, 4000, 1_000_000, pieces, 7)
    between = asked() - before
    before = asked()
    assert between - (asked() - before) == 996_000


@pytest.mark.parametrize(
    "pieces",
    [
        table((10, 5, 0), (14, 5, 0)),
        table((20, 5, 0), (10, 5, 0)),
        table((9, 5, 0)),
        table((96, 5, 0)),
        table((101, 1, 0)),
        table((10, 0, 0)),
        table((10, -1, 0)),
        table((10, 2**63 - 1, 0)),
        table((-1, 5, 0)),
        table((10, 5, 1)),
        table((10, 5, -1)),
    ],
)
def test_pieces_that_do_not_fit_are_refused(fd: int, pieces: np.ndarray) -> None:
    """No byte goes to memory that is not its own."""
    with pytest.raises(ValueError, match="expected pieces in order"):
        scatter.read(fd, 10, 100, pieces, 1)


@pytest.mark.parametrize(
    ("start", "stop", "num_items", "crcs"), [(-1, 9, 1, None), (9, 8, 1, None), (0, 9, -1, None), (0, 9, 2, [1])]
)
def test_arguments_that_do_not_fit_are_refused(fd: int, start: int, stop: int, num_items: int, crcs: list[int] | None) -> None:
    """A negative range or too few checksums is an error, not a read of foreign memory."""
    with pytest.raises(ValueError, match="do not fit together"):
        scatter.read(fd, start, stop, table(), num_items, crcs=None if crcs is None else np.array(crcs, np.uint32))


def test_a_file_that_ends_early_is_an_error(fd: int) -> None:
    """A shard that was cut while it was open gives an error that says where it ends."""
    end = len(DATA)
    with pytest.raises(EOFError, match=f"ends at {end}"):
        scatter.read(fd, 0, end + 1, table((end - 10, 11, 0)), 1)


def test_the_systems_errors_are_raised(tmp_path: Path) -> None:
    """What the system refuses is an OSError with its own words."""
    with pytest.raises(OSError, match="Bad file descriptor"):
        scatter.read(-1, 0, 10, table(), 0)
    folder = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(IsADirectoryError):
        scatter.read(folder, 0, 10, table(), 0)
    os.close(folder)


def test_short_answers_are_continued() -> None:
    """A file system may give less than it was asked for: the rest is asked for again, from where it ended."""
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
        pieces = table(*((900 * i + i % 3, 800, i % 5) for i in range(100)))
        expected = [b"".join(data[o : o + n] for o, n, item in pieces.tolist() if item == i) for i in range(5)]
        assert scatter.read(handle, 0, 100_000, pieces, 5) == expected
    finally:
        os.close(handle)


def test_objects_that_were_not_finished_are_freed(fd: int) -> None:
    """An error in the middle of a read leaves nothing behind, however often it happens."""
    pieces = table(*((1000 * i, 900, i) for i in range(1000)))
    tracemalloc.start()
    for _ in range(20):
        with pytest.raises(EOFError):
            scatter.read(fd, 0, len(DATA) + 1, pieces, 1000)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 500_000


def test_a_claim_that_memory_cannot_hold_is_refused(fd: int) -> None:
    """More objects than there is memory for is a MemoryError, and the process lives."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 34, hard))
    try:
        with pytest.raises(MemoryError):
            scatter.read(fd, 0, 1 << 62, table((0, 1 << 61, 0)), 1)
        with pytest.raises(MemoryError):
            scatter.read(fd, 0, 10, table(), 1 << 40)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
