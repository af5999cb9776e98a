"""Whole files or none, and what is there."""

import os
import pathlib

import pytest

from pcrshard import storage
from pcrshard.errors import StorageError


def temporaries(folder):
    return [
        path.name
        for path in pathlib.Path(folder).rglob("*")
        if "tmp" in path.name or path.name.startswith(".")
    ]


@pytest.mark.parametrize("url", ["{}/new/folder/f", "memory:///{}/f"])
def test_atomic_write(tmp_path, url):
    """A written file is there whole, in a folder that is made for it, and nothing else is."""
    url = url.format(tmp_path)
    for content in (b"first", b"second"):
        with storage.atomic_write(url) as file:
            file.write(content)
        assert storage.read_bytes(url) == content
    assert temporaries(tmp_path) == []


def test_writes_that_are_abandoned(tmp_path):
    """A process that ends at once leaves no temporary file; another one's is not touched."""
    with pytest.raises(StorageError), storage.atomic_write(str(tmp_path / "f")):
        child = os.fork()
        if child == 0:
            storage.abandon_writes()
            os._exit(0)
        os.waitpid(child, 0)
        assert len(temporaries(tmp_path)) == 1
        storage.abandon_writes()
        assert temporaries(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_written_file_has_the_usual_mode(tmp_path):
    """Shards are readable by whom the user's umask says, not by the owner alone as temporary files
    are.
    """
    umask = os.umask(0o027)
    try:
        with storage.atomic_write(str(tmp_path / "f")) as file:
            file.write(b"x")
    finally:
        os.umask(umask)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o640


def test_failure_inside_the_block_leaves_the_old_file(tmp_path):
    """The caller's error comes through unchanged, the old file stays, no temporary is left."""
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(KeyError), storage.atomic_write(str(tmp_path / "f")) as file:
        file.write(b"new")
        raise KeyError("caller")
    assert (tmp_path / "f").read_bytes() == b"old"
    assert temporaries(tmp_path) == []


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch, function):
    """ENOSPC or EIO at any step of publishing is a StorageError, and the old file stays."""
    (tmp_path / "f").write_bytes(b"old")

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, function, fail)
    with (
        pytest.raises(StorageError, match=r"No space left.*f\)"),
        storage.atomic_write(str(tmp_path / "f")) as file,
    ):
        file.write(b"new")
    assert (tmp_path / "f").read_bytes() == b"old"
    assert temporaries(tmp_path) == []


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    """Writing below a file is a StorageError, also where all is read-only."""
    (tmp_path / "f").write_bytes(b"")

    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "unlink", refuse)
    with (
        pytest.raises(StorageError, match="write"),
        storage.atomic_write(str(tmp_path / "f" / "g")),
    ):
        pytest.fail("must not be reached")


def test_links_are_listed_as_what_they_lead_to(tmp_path):
    """A linked folder is there under both names, a loop ends, and a link to nothing does not stop
    the rest.
    """
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1").write_bytes(b"1")
    (tmp_path / "also").symlink_to(tmp_path / "cat")
    (tmp_path / "self").symlink_to(tmp_path)
    (tmp_path / "cat" / "up").symlink_to(tmp_path)
    (tmp_path / "nothing").symlink_to(tmp_path / "no such file")
    found = [(file.name, file.size) for file in storage.list_files(str(tmp_path))]
    assert found == [("also/1", 1), ("cat/1", 1), ("nothing", None)]


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    """A class is not left out because its folder may not be read."""
    (tmp_path / "cat").mkdir()
    list_names = os.listdir

    def refuse(path):
        if str(path).endswith("cat"):
            raise PermissionError(13, "Permission denied", path)
        return list_names(path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(StorageError, match=r"Permission denied.*cat"):
        storage.list_files(str(tmp_path))


def test_list_files_is_sorted_and_relative(tmp_path):
    """Listings are in a stable order, whatever order the disk gives, and relative to the folder."""
    for name in ("b/2", "a", "b/1", "ü x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    expected = [("a", 1), ("b/1", 3), ("b/2", 3), ("ü x", 4)]
    for folder in (str(tmp_path), f"{tmp_path}/"):
        assert [(file.name, file.size) for file in storage.list_files(folder)] == expected


def test_a_version_changes_with_the_file(tmp_path):
    """A file that was written again has another version, listed or looked up, though it is as long
    as before.
    """
    path = tmp_path / "a"
    path.write_bytes(b"1")
    before = storage.look_up(str(path)).version
    assert [file.version for file in storage.list_files(str(tmp_path))] == [before]
    path.write_bytes(b"2")
    os.utime(path, (1, 1))
    (matched,) = storage.list_matching(f"{tmp_path}/*")
    assert before != storage.look_up(str(path)).version == matched.version


def test_remove_and_exists(tmp_path):
    """A folder is removed with what is in it."""
    folder = str(tmp_path / "d")
    storage.make_folder(folder)
    with storage.atomic_write(storage.join(folder, "f")) as file:
        file.write(b"x")
    assert storage.exists(folder)
    storage.remove(folder)
    assert not storage.exists(folder)


def test_a_query_is_no_wildcard():
    """A signed URL is one file."""
    assert not storage.is_pattern("https://host/a.tar?X-Signature=b")
    assert storage.is_pattern("https://host/*.tar")
