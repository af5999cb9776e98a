"""The index of releases: the cheapest way to a version, and refusal of what breaks a rule."""

import copy
import doctest
import json

import pytest

from pcrshard.errors import CorruptCheckpoint, StorageError, UnsupportedVersion, VersionUnavailable
from pcrshard.release import release_index
from pcrshard.release.release_index import (
    MAX_INDEX_BYTES,
    Release,
    ReleaseFile,
    ReleaseIndex,
    pack_index,
    parse_index,
    read_index,
    release_file_name,
)

RELEASES = tuple(Release(number, f"{number:064x}", 1000) for number in (1, 2, 5))


def offered(
    new: Release,
    old: Release | None,
    num_bytes: int,
) -> ReleaseFile:
    old_id = None if old is None else old.id
    return ReleaseFile(release_file_name(new, old_id), num_bytes, "ab" * 32, old_id, new.id)


FILES = (
    offered(RELEASES[0], None, 500),
    offered(RELEASES[1], RELEASES[0], 40),
    offered(RELEASES[2], None, 520),
    offered(RELEASES[2], RELEASES[1], 50),
)
INDEX = ReleaseIndex(RELEASES, FILES, 3)


def test_examples():
    """Those of the documentation."""
    assert doctest.testmod(release_index).failed == 0
    assert doctest.testmod(release_index).attempted >= 5


def test_an_index_is_read_as_it_was_written():
    """Nothing is lost."""
    assert parse_index(pack_index(INDEX)) == INDEX


@pytest.mark.parametrize(
    ("held", "number", "names"),
    [
        ([], 5, [FILES[2].name]),
        ([], 2, [FILES[0].name, FILES[1].name]),
        ([RELEASES[0]], 5, [FILES[1].name, FILES[3].name]),
        ([RELEASES[1]], None, [FILES[3].name]),
        ([RELEASES[2]], None, []),
        ([RELEASES[2]], 1, [FILES[0].name]),
    ],
)
def test_a_reader_takes_the_way_of_fewest_bytes(held, number, names):
    """Deltas if it holds a release, the newest keyframe if it holds none, nothing if it has it."""
    path = INDEX.path_to(INDEX.find(number), [release.id for release in held])
    assert [file.name for file in path] == names


def test_a_release_that_is_not_there_is_named():
    """With those that are."""
    with pytest.raises(VersionUnavailable, match="one of the releases 1, 2, 5, got 3"):
        INDEX.find(3)
    with pytest.raises(VersionUnavailable, match=r"\(none\), got the newest"):
        ReleaseIndex().find(None)
    with pytest.raises(VersionUnavailable, match="no file leads to release 5"):
        ReleaseIndex(RELEASES, FILES[:1]).path_to(RELEASES[2], [])


def change(path, value):
    """A change of one value of the JSON, by its place."""

    def work(raw):
        at = raw
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return work


HOSTILE = {
    "another format": change(["format"], "x"),
    "a missing key": lambda raw: raw.pop("files"),
    "an unknown key": change(["extra"], 1),
    "no list": change(["files"], {}),
    "a name that is a path": change(["files", 0, "name"], "../000001-0123456789abcdef-delta.pcp"),
    "an absolute name": change(["files", 0, "name"], "/etc/passwd"),
    "a name that is a URL": change(["files", 0, "name"], "http://elsewhere/x-delta.pcp"),
    "a name with a line end": change(["files", 0, "name"], FILES[0].name + "\n"),
    "the same name twice": change(["files", 0, "name"], FILES[1].name),
    "a negative size": change(["files", 0, "num_bytes"], -1),
    "a size that is true": change(["files", 0, "num_bytes"], True),
    "an absurd size": change(["files", 0, "num_bytes"], 1 << 60),
    "a size that is a float": change(["releases", 0, "raw_bytes"], 1e3),
    "no digest": change(["files", 0, "sha256"], "zz"),
    "no id": change(["releases", 0, "id"], "A" * 64),
    "a release twice": lambda raw: raw["releases"].append(raw["releases"][0]),
    "a number twice": change(["releases", 0, "number"], 2),
    "number 0": change(["releases", 0, "number"], 0),
    "a file to nowhere": change(["files", 0, "new"], "cd" * 32),
    "a file from nowhere": change(["files", 1, "old"], "cd" * 32),
    "a file from itself": change(["files", 1, "old"], RELEASES[1].id),
    "a circle": change(["files", 1, "old"], RELEASES[2].id),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_index_that_breaks_a_rule_is_refused(name):
    """Each rule of section 5 of the format, broken alone."""
    raw = copy.deepcopy(json.loads(pack_index(INDEX)))
    HOSTILE[name](raw)
    with pytest.raises(CorruptCheckpoint):
        parse_index(json.dumps(raw).encode())


def test_what_is_no_index_is_refused():
    """Text, a list, brackets without end, a later version."""
    for data in (b"", b"<html>", b"[]", b"[" * 100_000, b'{"format": "pcrshard releases"', b"\xff"):
        with pytest.raises(CorruptCheckpoint):
            parse_index(data)
    raw = json.loads(pack_index(INDEX)) | {"version": 2}
    with pytest.raises(UnsupportedVersion, match="expected version 1 of the index, got 2"):
        parse_index(json.dumps(raw).encode())


def test_an_index_of_any_size_takes_little_memory(tmp_path):
    """It is refused by its size before it is read; none at all is no error."""
    assert read_index(str(tmp_path)) is None
    with (tmp_path / "releases.json").open("wb") as file:
        file.truncate(MAX_INDEX_BYTES + 1)
    with pytest.raises(StorageError, match=f"at most {MAX_INDEX_BYTES} bytes"):
        read_index(str(tmp_path))
