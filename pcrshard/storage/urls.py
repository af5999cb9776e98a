"""Properties of a URL that need no request: local or remote, file name, folder."""

from __future__ import annotations

import os
from collections.abc import Sequence

import braceexpand

from ..errors import StorageError
from ..redaction import PIPE, redact_url

Urls = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_FILE = ("file://", "local://")
_HTTP = ("http://", "https://")


def is_local(url: str) -> bool:
    """Return whether the URL is local: ``/a.tar``, ``a.tar`` or ``file:///a.tar``."""
    return url.startswith(_FILE) or not ("://" in url or url.startswith(PIPE))


def plain_path(url: str) -> str:
    """Return the path of a local URL, with ``~`` expanded; return other URLs unchanged."""
    if not is_local(url):
        return url
    return os.path.expanduser(url.partition("://")[2] if url.startswith(_FILE) else url)


def expand(urls: Urls) -> list[str]:
    """Expand brace patterns in one URL or several.

    ``::`` separates URLs in one string, as in WebDataset.

    Raises:
        StorageError: The braces are unbalanced.

    >>> expand("a-{000..002}.tar::b.tar")
    ['a-000.tar', 'a-001.tar', 'a-002.tar', 'b.tar']
    """
    each = [urls] if isinstance(urls, os.PathLike) else urls
    patterns = each.split("::") if isinstance(each, str) else [os.fspath(url) for url in each]
    try:
        return [url for pattern in patterns for url in braceexpand.braceexpand(pattern)]
    except ValueError:
        raise StorageError(f"not a brace pattern: {redact_url('::'.join(patterns))}") from None


def split_query(url: str) -> tuple[str, str]:
    """Split an HTTP URL before its query, which may hold the signature of a folder.

    In other URLs, ``?`` may be part of a name.
    """
    if not url.startswith(_HTTP):
        return url, ""
    path, mark, query = url.partition("?")
    return path, mark + query


def file_name(url: str) -> str:
    """Return the last part of a URL's path."""
    return split_query(url)[0].rpartition("/")[2]


def parent(url: str) -> str:
    """Return the URL of the folder that a file is in, keeping the file's query.

    >>> parent("https://host/a/b.tar?key=1"), parent("b.tar"), parent("/b.tar")
    ('https://host/a?key=1', '.', '/')
    """
    path, query = split_query(url)
    folder, separator, _ = path.rpartition("/")
    return (folder or separator or ".") + query


def join(folder: str, name: str) -> str:
    """Return the URL of a file in a folder, keeping the folder's query."""
    path, query = split_query(folder)
    return f"{path.rstrip('/')}/{name}{query}"
