"""The folder of a prefix cache: who owns it, and whether its content can be trusted.

Anyone who can write to a cache decides what a training job reads: checksums are not signatures.
"""

from __future__ import annotations

import grp
import logging
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

from ..errors import StorageError
from ..redaction import get_logger

log = get_logger(__name__)
# The convention of https://bford.info/cachedir/, by which backup tools skip caches.
MARKER = "CACHEDIR.TAG"
_SIGNATURE = b"Signature: 8a477f597d28d172789f06886806bc55"
_TEXT = b"\n# A cache of pcrshard: `pcrshard cache clear` empties it.\n"
_warned: set[tuple[str, str]] = set()


def prepare(folder: str) -> bool:
    """Create a cache's folder if missing, accessible to its owner only.

    Args:
        folder: Absolute path.

    Returns:
        Whether its content can be trusted; if not, a warning is logged once.
    """
    # A full or read-only disk may still hold cached prefixes.
    with suppress(OSError):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    if problem := _problem(folder):
        warn_once(folder, f"{problem}; reading without the cache {folder}")
        return False
    with suppress(OSError), open(os.path.join(folder, MARKER), "xb") as file:
        file.write(_SIGNATURE + _TEXT)
    return True


def check_marked(folder: str) -> None:
    """Refuse a folder that is not this user's cache, before listing or removing files in it.

    Raises:
        StorageError: The folder has no ``CACHEDIR.TAG``, or others can write to it.
    """
    if problem := _problem(folder):
        raise StorageError(problem, url=folder)
    with suppress(OSError), open(os.path.join(folder, MARKER), "rb") as file:
        if file.read(len(_SIGNATURE)) == _SIGNATURE:
            return
    raise StorageError(
        f"expected a folder that a job has used as cache_dir, with a {MARKER}", url=folder
    )


def warn_once(folder: str, message: str) -> None:
    """Log what is wrong with a folder once, not at every shard."""
    level = logging.DEBUG if (folder, message) in _warned else logging.WARNING
    _warned.add((folder, message))
    log.log(level, "%s", message)


def _problem(folder: str) -> str | None:
    """Return why the content of a cache may be another user's, ``None`` if it is not."""
    try:
        status = os.stat(folder)
    except OSError:
        return None  # nothing to trust
    if status.st_uid not in (os.geteuid(), 0):
        return f"expected a cache folder of your own, {folder} belongs to user {status.st_uid}"
    if writer := _writer(status):
        return f"expected a cache folder of your own, {writer} can write to {folder}: chmod go-w it"
    # The user chose to trust a group that can replace the folder, as in a project folder: it could
    # replace datasets and programs there, too.
    for above in Path(folder).resolve().parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"expected a cache folder that cannot be replaced, anybody can write to {above}"
    return None


def _writer(status: os.stat_result) -> str:
    """Return who else can replace files in a folder; no one if it is sticky, like /tmp."""
    if status.st_mode & stat.S_ISVTX:
        return ""
    if status.st_mode & stat.S_IWOTH:
        return "anybody"
    is_open = status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid)
    return f"group {status.st_gid}" if is_open else ""


def _is_private_group(number: int) -> bool:
    """Return whether this is the user's private group, as many systems create for every user.

    The umask then lets the group write. The test is that of pam_umask's ``usergroups``, plus that
    the group has no other member.
    """
    try:
        group = grp.getgrgid(number)
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}
