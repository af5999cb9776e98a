"""Whose a cache is: what another user could have written is neither believed nor removed."""

import hashlib
import json
import math
import os
import pathlib
import shutil

import pytest

from pcrshard.cli.main import main
from pcrshard.errors import StorageError
from pcrshard.reading.prefix_cache import PrefixCache

GOOD = b"good" * 250
EVIL = b"evil" * 250


def read(folder):
    """The bytes of a shard through a cache, and how many were fetched."""
    cache = PrefixCache(str(folder))

    def fetch(start, view):
        view[:] = GOOD[start : start + len(view)]

    view = bytearray(1000)
    cache.read("http://h/a.tar", "1", memoryview(view), fetch)
    return view, cache.stats.fetched_bytes


def plant(folder):
    """Replace what a cache holds by other bytes."""
    (path,) = pathlib.Path(folder).rglob("*.tar")
    path.write_bytes(EVIL)


@pytest.fixture
def planted(tmp_path):
    """A cache with bytes that were never fetched."""
    folder = tmp_path / "cache"
    assert read(folder) == (GOOD, 1000)
    plant(folder)
    assert read(folder) == (EVIL, 0)
    return folder


def give_away(path):
    if os.geteuid():
        pytest.skip("NOT ROOT: only root gives files to another user")
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize("mode", [None, 0o660, 0o606])
def test_a_file_that_others_could_have_written_is_not_believed(planted, caplog, mode):
    """Whoever may write to a cache's folder, only files that the user alone can write are read and
    extended; one warning names the folder.
    """
    (path,) = planted.rglob("*.tar")
    if mode is None:
        give_away(path)
    else:
        path.chmod(mode)
    assert read(planted) == (GOOD, 1000)
    assert read(planted) == (GOOD, 1000)
    assert path.read_bytes() == EVIL
    assert [str(planted) in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("folder", [f"cache/pcrshard-cache-{os.geteuid()}", "cache", ""])
@pytest.mark.parametrize(("mode", "is_used"), [(0o777, False), (0o1777, True), (0o770, True)])
def test_a_cache_that_anybody_can_replace_is_not_believed(planted, caplog, folder, mode, is_used):
    """Strangers may not exchange files of the cache or the folder itself; where it is sticky, like
    /tmp, they cannot.
    """
    path = planted.parent / folder
    path.chmod(mode)
    assert read(planted) == ((EVIL, 0) if is_used else (GOOD, 1000))
    assert is_used or f"anybody can write to {path}" in caplog.text


def test_users_may_share_a_folder(tmp_path):
    """A folder that another user made holds one's own files, too."""
    folder = tmp_path / "cache"
    folder.mkdir()
    give_away(folder)
    folder.chmod(0o1777)
    assert read(folder) == (GOOD, 1000)
    assert read(folder) == (GOOD, 0)


def test_links_are_not_followed(planted, tmp_path):
    """A link in place of a cached file leads nowhere, and is not written through."""
    (path,) = planted.rglob("*.tar")
    shutil.move(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert read(planted) == (GOOD, 1000)
    assert (tmp_path / "elsewhere").read_bytes() == EVIL


@pytest.mark.parametrize("name", ["room", "{}"])
def test_a_link_makes_no_file(tmp_path, name):
    """Whoever may make links cannot have files made elsewhere in the user's name."""
    folder = tmp_path / "cache"
    read(folder)
    (path,) = folder.rglob("*.tar")
    path.unlink()
    (path.parent / "room").unlink()
    (path.parent / name.format(path.name)).symlink_to(tmp_path / "made")
    assert read(folder)[0] == GOOD
    assert not (tmp_path / "made").exists()


def test_what_is_made_is_the_owners_alone(tmp_path):
    """No other user can write to a cache, whatever the umask; backups skip it."""
    folder = tmp_path / "cache"
    old = os.umask(0)
    try:
        read(folder)
    finally:
        os.umask(old)
    assert folder.stat().st_mode & 0o077 == 0
    assert next(folder.rglob("*.tar")).stat().st_mode & 0o077 == 0
    tag = next(folder.rglob("CACHEDIR.TAG")).read_bytes()
    assert tag.startswith(b"Signature: 8a477f597d28d172789f06886806bc55\n")


def test_only_a_cache_is_cleared(tmp_path, capsys):
    """A folder of the user's that looks like one is not emptied by a slip of the hand."""
    name = "00000000000000-00000000000004-00000000"
    mine = tmp_path / "mine" / "entries" / "a" / "b" / name
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    with pytest.raises(StorageError, match="used as cache_dir"):
        PrefixCache(str(tmp_path / "mine")).clear()
    assert main(["cache", "clear", str(tmp_path / "mine")]) == 1
    assert "used as cache_dir" in capsys.readouterr().err
    assert mine.read_bytes() == b"mine"

    read(tmp_path / "cache")
    assert main(["cache", "clear", str(tmp_path / "cache"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"freed_bytes": 1000}


def md5_name(number, suffix=""):
    """What a photograph that is named by its MD5 is called."""
    return f"{hashlib.md5(b'%d' % number).hexdigest()}{suffix}"


# Files that users have in folders that they give as cache_dir.
FOLDERS = {
    "photographs named by MD5": [md5_name(n, f"-{n}.jpg") for n in range(5)],
    "shards named by MD5": [md5_name(n, f"-data-{n:06d}.tar") for n in range(5)],
    "folders of an older cache": ["entries/a/b/0-4-0", "locks/a", "room", "CACHEDIR.TAG"],
    "a dataset": ["pcr.json", "data-000000.tar", "skipped.jsonl"],
    "a store": ["manifest-00000001.json", "00000001.pcr", "LOCK"],
    "a home": [".bashrc", "notes.txt", ".ssh/id", "entries/mine", "locks/mine"],
    "signed names": [f"{'0' * 16}-{md5_name(n)}-a.tar" for n in range(5)],
    "temporary files": [".pcrshard-0000.tmp", "x.tmp", "room"],
}


@pytest.mark.parametrize("where", ["", "inside"])
@pytest.mark.parametrize("kind", FOLDERS)
def test_files_of_the_user_stay(tmp_path, kind, where):
    """Whatever a folder holds, a cache in it that is at its limit, and cleared, removes nothing
    that it has not written.
    """
    folder = tmp_path / "mine"
    inside = pathlib.Path(PrefixCache(str(folder)).folder)
    if where:
        read(folder)
    files = {inside / n if where else folder / n: n.encode() for n in FOLDERS[kind]}
    files = {path: text for path, text in files.items() if not path.exists()}
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
        os.utime(path, (1, 1))
    cache = PrefixCache(str(folder), 2500, math.inf)
    for number in range(8):
        cache.read(f"http://h/{number}.tar", "1", memoryview(bytearray(1000)), lambda *_: None)
    assert cache.stats.fetched_bytes == 8000
    assert sum(path.name.endswith("h.tar") for path in inside.iterdir()) == 0
    assert 0 < len(cache.entries()) <= 2
    cache.clear()
    assert {path: path.read_bytes() for path in files} == files
    assert cache.entries() == []


def test_a_folder_that_others_own_is_no_cache(tmp_path, caplog):
    """What lies where the cache would be is left alone, and jobs read without a cache."""
    inside = pathlib.Path(PrefixCache(str(tmp_path)).folder)
    inside.mkdir()
    (inside / "mine").write_bytes(b"mine")
    for _ in range(2):
        assert read(tmp_path) == (GOOD, 1000)
    assert [path.name for path in inside.iterdir()] == ["mine"]
    assert ["it holds mine" in record.getMessage() for record in caplog.records] == [True]
