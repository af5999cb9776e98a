"""Whose a folder is: it is taken while it is empty, marked, and then entered by its kind only.

The mark is a file that is created at most once, by exactly one of several processes.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

from ..errors import StorageError
from .files import create, list_names, remove
from .ranges import read_bytes
from .stores import Access
from .urls import join

MARK = ".pcrshard"
_MAX_MARK_BYTES = 1 << 10


class Owner(NamedTuple):
    """What the mark of a folder says.

    Attributes:
        kind: What the folder is for, such as ``"cache"``.
        token: 32 hexadecimal digits that were drawn when the folder was taken.
    """

    kind: str
    token: str


def find_owner(folder: str, *, options: Access = None) -> Owner | None:
    """Return what the mark of a folder says, ``None`` without one; one request.

    Raises:
        StorageError: The mark cannot be read, or is not one of this version.
    """
    url = join(folder, MARK)
    try:
        text = read_bytes(url, options=options, max_bytes=_MAX_MARK_BYTES).decode(errors="replace")
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return None
        raise
    kind, _, token = text.strip().partition(" ")
    if not (kind and len(token) == 32):
        raise StorageError(
            "expected the mark of a folder, got something else; delete the folder if it is a cache",
            url=url,
        )
    return Owner(kind, token)


def take_folder(folder: str, kind: str, *, enter: bool = True, options: Access = None) -> Owner:
    """Take an empty or missing folder, or enter one that was taken for the same kind.

    Hidden files, such as those of a file manager, do not count.

    Args:
        folder: Local folder or any fsspec URL.
        kind: What for; one word.
        enter: Whether a folder that is taken already may be entered.
        options: fsspec storage options.

    Raises:
        StorageError: The folder holds something else, or cannot be read or written.
    """
    owner = find_owner(folder, options=options)
    if owner is None:
        held = [name for name in list_names(folder, options=options) if not name.startswith(".")]
        if held:
            raise StorageError(
                f"expected an empty folder for a {kind}, it holds {min(held)}: use another folder, "
                "or remove this one",
                url=folder,
            )
        mine = Owner(kind, secrets.token_hex(16))
        try:
            create(join(folder, MARK), " ".join(mine).encode(), options=options)
            return mine
        except FileExistsError:  # another process was faster
            owner = find_owner(folder, options=options)
    if owner is None or owner.kind != kind or not enter:
        wanted = "the folder of a" if enter else "a folder for a new"
        raise StorageError(
            f"expected {wanted} {kind}, got that of a {owner.kind if owner else 'stranger'}, which "
            "may be writing to it: use another folder, or remove this one",
            url=folder,
        )
    return owner


def give_up_folder(folder: str, *, options: Access = None) -> None:
    """Remove the mark of a folder that this process has taken.

    Raises:
        StorageError: The store refuses.
    """
    remove(join(folder, MARK), options=options)
