"""What a URL says without a request: whether it is local, its file's name, its folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import braceexpand

from ..errors import StorageError, harmless
from ..redaction import PIPE, redact_url

Urls = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_FILE = ("file://", "local://")
_HTTP = ("http://", "https://")
# A user, and the beginning of a password, which is no port.
_OPEN_USER = re.compile(r"\w[\w+.-]*://[^/@]*:[^/@]*[^/@\d:][^/@]*")


def is_local(url: str) -> bool:
    """Whether the URL is a path of this machine: ``/a.tar``, ``a.tar`` or ``file:///a.tar``."""
    return url.startswith(_FILE) or not ("://" in url or url.startswith(PIPE))


def plain_path(url: str) -> str:
    """The path of a local URL, with ``~`` for the user's home; any other URL as it is."""
    if not is_local(url):
        return url
    return os.path.expanduser(url.partition("://")[2] if url.startswith(_FILE) else url)


def expand(urls: Urls) -> list[str]:
    """Expand brace patterns in one URL or several.

    ``::`` separates URLs in one string, as in WebDataset.

    >>> expand("a-{000..002}.tar::b.tar")
    ['a-000.tar', 'a-001.tar', 'a-002.tar', 'b.tar']
    """
    each = [urls] if isinstance(urls, os.PathLike) else urls
    patterns = _split(each) if isinstance(each, str) else [os.fspath(url) for url in each]
    try:
        return [url for pattern in patterns for url in braceexpand.braceexpand(pattern)]
    except ValueError as error:
        shown = [redact_url(pattern) for pattern in patterns]
        raise StorageError(f"not a brace pattern: {'::'.join(shown)}") from harmless(
            error, *patterns
        )


def _split(urls: str) -> list[str]:
    """The URLs between ``::``, which may also be in a password."""
    found: list[str] = []
    for part in urls.split("::"):
        if found and _OPEN_USER.fullmatch(found[-1]):
            found[-1] += f"::{part}"
        else:
            found.append(part)
    return found


def split_query(url: str) -> tuple[str, str]:
    """An HTTP URL up to its query, and the query, which may be a signature for a whole folder.

    Elsewhere ``?`` may be in a name.
    """
    if not url.startswith(_HTTP):
        return url, ""
    path, mark, query = url.partition("?")
    return path, mark + query


def file_name(url: str) -> str:
    """The last part of a URL's path."""
    return split_query(url)[0].rpartition("/")[2]


def join(folder: str, name: str) -> str:
    """The URL of a file in a folder, with the folder's query."""
    path, query = split_query(folder)
    return f"{path.rstrip('/')}/{name}{query}"
