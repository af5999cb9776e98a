"""The manifest names versions and their files, and nothing outside of the store's folder."""

import dataclasses

import pytest

from pcrshard.checkpoint import manifest as manifests
from pcrshard.checkpoint.file_frame import MANIFEST, pack_frame
from pcrshard.checkpoint.manifest import Manifest, VersionRecord
from pcrshard.errors import CorruptCheckpoint, VersionUnavailable

RECORD = VersionRecord(3, bytes(32), "000003-0123abcd.pcd", 100, 50, None, 400, {"a": 1}, 1.5)
WHOLE = Manifest("forward", 10, {"weights": None}, 7, 4, (RECORD,))


def packed(**changes) -> bytes:
    return pack_frame(MANIFEST, dataclasses.asdict(WHOLE) | changes)


def with_record(**changes) -> bytes:
    return packed(versions=[dataclasses.asdict(RECORD) | changes])


def test_a_manifest_comes_back():
    """All its fields."""
    assert manifests.parse_manifest(manifests.pack_manifest(WHOLE)) == WHOLE


def test_names_of_files_are_never_used_twice():
    """A replaced version gets a file of its own, so that readers keep the old one."""
    names = {manifests.file_name(7) for _ in range(50)}
    assert len(names) == 50
    assert all(manifests.is_version_file(name) for name in names)


@pytest.mark.parametrize(
    "data",
    [
        packed(order="sideways"),
        packed(order=None),
        packed(keyframe_every=-1),
        packed(generation=1.0),
        packed(next_number=3),
        packed(bounds=[]),
        packed(versions={}),
        packed(versions=[3]),
        packed(versions=[dataclasses.asdict(RECORD)] * 2),
        packed(more=1),
        with_record(file="../../etc/passwd"),
        with_record(file="/000003-0123abcd.pcd"),
        with_record(file="000003-0123abcd.pcd\n"),
        with_record(file=b"000003-0123abcd.pcd"),
        with_record(id=bytes(31)),
        with_record(number=0),
        with_record(number=True),
        with_record(file_bytes=-1),
        with_record(parent="1"),
        with_record(metrics=None),
        with_record(saved=1),
        with_record(extra=1),
        b"",
    ],
)
def test_hostile_manifests_are_refused(data):
    """Paths that leave the folder, wrong types, numbers that repeat."""
    with pytest.raises(CorruptCheckpoint):
        manifests.parse_manifest(data)


def test_a_missing_version_is_named_with_those_that_are_there():
    """The message helps to find the right number."""
    assert WHOLE.record(3) is RECORD
    with pytest.raises(VersionUnavailable, match="one of the versions 3, got 5"):
        WHOLE.record(5)


def test_no_manifest_is_no_store(tmp_path):
    """Reading an empty folder says so."""
    assert manifests.read_manifest(str(tmp_path)) is None
    with pytest.raises(VersionUnavailable, match="there is none"):
        manifests.require_manifest(str(tmp_path))
    manifests.write_manifest(str(tmp_path), WHOLE)
    assert manifests.require_manifest(str(tmp_path)) == WHOLE


def test_a_file_of_another_version_is_refused():
    """Both are named."""
    manifests.check_pinned(RECORD, 3, bytes(32))
    with pytest.raises(CorruptCheckpoint, match=r"expected version 3 0000.*, got 3 0101"):
        manifests.check_pinned(RECORD, 3, b"\x01" * 32)
