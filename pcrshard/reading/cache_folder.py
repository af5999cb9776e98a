"""The folder of a prefix cache: whose it is, and whether its content may be believed.

Whoever can write to a cache decides what a training job reads: checksums are no signatures.
"""

from __future__ import annotations

import grp
import logging
import os
import pwd
import stat
from contextlib import suppress

from .. import storage
from ..errors import StorageError
from ..redaction import get_logger

log = get_logger(__name__)
# The convention of https://bford.info/cachedir/, by which backups leave caches out.
MARKER = "CACHEDIR.TAG"
_SIGNATURE = b"Signature: 8a477f597d28d172789f06886806bc55"
_TEXT = b"\n# A cache of pcrshard: `pcrshard cache clear` empties it.\n"
_PRIVATE = 0o700
_NO_LINK = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_warned: set[tuple[str, str]] = set()


def prepare(folder: str) -> bool:
    """Make a cache's folder where it is not there, for its owner alone.

    Args:
        folder: Absolute path.

    Returns:
        Whether what it holds may be believed; if not, one is warned once.
    """
    problem = _problem(folder)
    if problem:
        warn_once(folder, f"{problem}; reading without the cache {folder}")
        return False
    # A disk that is full or read-only may still have what is asked for.
    with suppress(OSError, StorageError):
        os.makedirs(folder, mode=_PRIVATE, exist_ok=True)
        for name in ("entries", "locks"):
            _make_private(os.path.join(folder, name))
        if not os.path.lexists(os.path.join(folder, MARKER)):
            with storage.atomic_write(os.path.join(folder, MARKER), durable=False) as file:
                file.write(_SIGNATURE + _TEXT)
    return _problem(folder) is None


def check_marked(folder: str) -> None:
    """Refuse a folder that is no cache of this user's, before files in it are removed.

    Raises:
        StorageError: It has no ``CACHEDIR.TAG``, or others can write to it.
    """
    problem = _problem(folder)
    if problem:
        raise StorageError(problem, url=folder)
    if not _is_marked(folder):
        raise StorageError(
            f"expected the folder of a cache, which has a {MARKER}; this one has none", url=folder
        )


def _is_marked(folder: str) -> bool:
    try:
        with open(os.path.join(folder, MARKER), "rb") as file:
            return file.read(len(_SIGNATURE)) == _SIGNATURE
    except OSError:
        return False


def warn_once(folder: str, message: str) -> None:
    """Say what is wrong with a folder when it is first met, not at every shard."""
    level = logging.DEBUG if (folder, message) in _warned else logging.WARNING
    _warned.add((folder, message))
    log.log(level, "%s", message)


def warn_going_on(folder: str, doing: str, error: OSError) -> None:
    """Say once what cannot be done in a cache's folder; the read goes on without it."""
    # Not the path, which is another one for each shard.
    why = error.strerror or str(error)
    warn_once(folder, f"cannot {doing} the cache {folder}, going on without: {why}")


def _make_private(path: str) -> None:
    with suppress(FileExistsError):
        os.mkdir(path, _PRIVATE)
    # Versions before this one made it as the umask said.
    handle = os.open(path, _NO_LINK)
    try:
        _shut_out_others(handle)
    finally:
        os.close(handle)


def _shut_out_others(handle: int) -> None:
    status = os.fstat(handle)
    if status.st_uid == os.geteuid() and status.st_mode & _WRITABLE_BY_OTHERS:
        os.fchmod(handle, _PRIVATE)


def _problem(folder: str) -> str | None:
    """Why the content of a cache's folder may be another user's, ``None`` if it cannot be."""
    try:
        status = os.stat(folder)
    except OSError:
        return None  # there is nothing to believe
    if status.st_uid not in (os.geteuid(), 0):
        return f"expected a cache folder of your own, {folder} belongs to user {status.st_uid}"
    if who := _writers(status):
        return f"expected a cache folder of your own, {who} can write to {folder}: chmod go-w it"
    return _problem_above(folder) or _problem_inside(folder)


def _problem_above(folder: str) -> str | None:
    """Whether anybody can put another folder in this one's place.

    A group that may do so, as in the folder of a project, is one that the user has chosen to trust:
    it could replace datasets and programs there, too.
    """
    above = os.path.dirname(os.path.realpath(folder))
    while True:
        status = os.stat(above)
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            return f"expected a cache folder that nobody can replace, anybody can write to {above}"
        if above == os.path.dirname(above):
            return None
        above = os.path.dirname(above)


def _problem_inside(folder: str) -> str | None:
    for path in (os.path.join(folder, name) for name in ("entries", "locks")):
        try:
            status = os.lstat(path)
        except OSError:
            continue
        if not stat.S_ISDIR(status.st_mode):
            return f"expected a folder of the cache, {path} is a link or a file"
        if status.st_uid not in (os.geteuid(), 0):
            return f"expected a cache of your own, {path} belongs to user {status.st_uid}"
        if who := _writers(status):
            return f"expected a cache of your own, {who} could write to {path}: remove it"
    return None


def _writers(status: os.stat_result) -> str:
    """Who else can replace what is in a folder: nobody where it is sticky, as /tmp is."""
    if status.st_mode & stat.S_ISVTX:
        return ""
    if status.st_mode & stat.S_IWOTH:
        return "anybody"
    is_open = status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid)
    return f"group {status.st_gid}" if is_open else ""


def _is_private_group(number: int) -> bool:
    """Whether a group is the user's alone, which many systems give to every user.

    Their umask then lets the group write. This is the test of pam_umask's ``usergroups``, and that
    nobody else was added.
    """
    try:
        group = grp.getgrgid(number)
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}
