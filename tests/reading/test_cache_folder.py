"""Whose a cache is: what another user could have written is neither believed nor removed."""

import grp
import json
import logging
import os
import pathlib
import pwd
import shutil

import pytest

from pcrshard.cli.main import main
from pcrshard.errors import StorageError
from pcrshard.reading.cache_folder import MARKER, check_marked
from pcrshard.reading.prefix_cache import PrefixCache

GOOD = b"good" * 250
EVIL = b"evil" * 250


def read(folder):
    """The bytes of a shard through a cache, and how many were fetched."""
    cache = PrefixCache(str(folder))

    def fetch(start, view):
        view[:] = GOOD[start : start + len(view)]

    view = cache.read("http://h/a.tar", "1", 1000, fetch)
    return bytes(view), cache.stats.fetched_bytes


def plant(folder):
    """Replace what a cache holds by other bytes."""
    (path,) = pathlib.Path(folder).glob("*.tar")
    path.write_bytes(EVIL)


@pytest.fixture
def planted(tmp_path):
    """A cache with bytes that were never fetched."""
    folder = tmp_path / "cache"
    assert read(folder) == (GOOD, 1000)
    plant(folder)
    assert read(folder) == (EVIL, 0)
    return folder


def give_away(*paths):
    if os.geteuid():
        pytest.skip("NOT ROOT: only root gives files to another user")
    for path in paths:
        os.chown(path, 65534, 65534, follow_symlinks=False)


def test_a_cache_of_another_user_is_not_believed(planted, caplog):
    """What another user put there is not read; one warning names the folder."""
    give_away(planted)
    assert read(planted) == (GOOD, 1000)
    assert read(planted) == (GOOD, 1000)
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == 1
    assert str(planted) in caplog.text


@pytest.mark.parametrize(
    ("folder", "mode", "group", "why"),
    [
        ("cache", 0o777, None, "chmod go-w"),
        ("cache", 0o1777, None, None),  # as /tmp is: what is in it cannot be replaced
        ("cache", 0o775, 65534, "group 65534 can write to {}"),
        ("cache", 0o1775, 65534, None),
        ("", 0o777, None, "anybody can write to {}"),
        ("", 0o1777, None, None),
        ("", 0o2770, 65534, None),
    ],
)
def test_a_cache_that_others_can_replace_is_not_believed(planted, caplog, folder, mode, group, why):
    """Nobody else may write to the cache or put another folder in its place, except where the
    folder is sticky; a group may be let into the parent folder.
    """
    path = planted.parent / folder
    if group is not None:
        if os.geteuid():
            pytest.skip("NOT ROOT: only root gives files to any group")
        os.chown(path, -1, group)
    path.chmod(mode)
    assert read(planted) == ((GOOD, 1000) if why else (EVIL, 0))
    assert why is None or why.format(path) in caplog.text


def test_a_cache_of_the_private_group_is_used(planted):
    """Where every user has a group and the umask is 002, a folder that one made is one's own."""
    planted.chmod(0o775)
    os.chown(planted, -1, os.getegid())
    name = pwd.getpwuid(os.geteuid()).pw_name
    if grp.getgrgid(os.getegid()).gr_name != name:
        pytest.skip("NO PRIVATE GROUP: this user's group has another name")
    assert read(planted) == (EVIL, 0)


def test_links_are_not_followed(planted, tmp_path):
    """A link in place of a cached file leads nowhere, and is not written through."""
    (path,) = planted.glob("*.tar")
    shutil.move(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert read(planted) == (GOOD, 1000)
    assert (tmp_path / "elsewhere").read_bytes() == EVIL


@pytest.mark.parametrize("name", ["room", "{}"])
def test_a_link_makes_no_file(tmp_path, name):
    """Whoever may make links cannot have files made elsewhere in the user's name."""
    folder = tmp_path / "cache"
    read(folder)
    (path,) = folder.glob("*.tar")
    path.unlink()
    (folder / "room").unlink()
    (folder / name.format(path.name)).symlink_to(tmp_path / "made")
    assert read(folder)[0] == GOOD
    assert not (tmp_path / "made").exists()


def test_what_is_made_is_the_owners_alone(tmp_path):
    """Nobody else can write to what a cache is made of, whatever the umask."""
    old = os.umask(0)
    try:
        read(tmp_path / "cache")
    finally:
        os.umask(old)
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
    tag = (tmp_path / "cache" / MARKER).read_bytes()
    assert tag.startswith(b"Signature: 8a477f597d28d172789f06886806bc55\n")


def test_only_a_cache_is_cleared(tmp_path, capsys):
    """A folder of the user's that looks like one is not emptied by a slip of the hand."""
    name = "00000000000000-00000000000004-00000000"
    mine = tmp_path / "mine" / "entries" / "a" / "b" / name
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    with pytest.raises(StorageError, match=MARKER):
        PrefixCache(str(tmp_path / "mine")).clear()
    assert main(["cache", "clear", str(tmp_path / "mine")]) == 1
    assert MARKER in capsys.readouterr().err
    assert mine.read_bytes() == b"mine"

    read(tmp_path / "cache")
    assert main(["cache", "clear", str(tmp_path / "cache"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"freed_bytes": 1000}
    give_away(tmp_path / "cache")
    with pytest.raises(StorageError, match="your own"):
        check_marked(str(tmp_path / "cache"))
