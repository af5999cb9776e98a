"""The files of a cache: what they say of themselves is not believed, but checked."""

import os

import pytest

from pcrshard.checksum import crc32c
from pcrshard.reading.cache_extents import held_bytes, list_extents, read_extent

DATA = bytes(range(200))


@pytest.fixture
def folder(tmp_path):
    for start, stop in ((0, 50), (50, 80), (120, 200)):
        part = DATA[start:stop]
        (tmp_path / f"{start:014d}-{stop:014d}-{crc32c(part):08x}").write_bytes(part)
    return tmp_path


def test_other_files_are_not_taken_for_extents(folder):
    """Unfinished files, links, and names that make no sense are passed over."""
    (folder / "00000000000000-00000000000050-1a2b3c4d.0123.tmp").touch()
    (folder / "00000000000080-00000000000050-1a2b3c4d").touch()
    os.symlink("/etc/passwd", folder / "00000000000080-00000000000090-1a2b3c4d")
    extents = list_extents(str(folder))
    assert [(extent.start, extent.stop) for extent in extents] == [(0, 50), (50, 80), (120, 200)]
    assert held_bytes(extents) == 80


@pytest.mark.parametrize("change", [b"", DATA[:49], DATA[:51], DATA[1:51]])
def test_a_file_that_lies_is_not_read(folder, change):
    """A file that is shorter, longer or other than its name says gives no bytes."""
    extent = list_extents(str(folder))[0]
    assert read_extent(extent, memoryview(bytearray(50)))
    with open(extent.path, "wb") as file:
        file.write(change)
    assert not read_extent(extent, memoryview(bytearray(50)))
    os.unlink(extent.path)
    assert not read_extent(extent, memoryview(bytearray(50)))
