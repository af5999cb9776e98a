"""Properties of a URL that need no request: local or remote, file name, folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import braceexpand

from ..errors import StorageError
from ..redaction import PIPE, redact_url

Urls = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_FILE = ("file://", "local://")
_HTTP = ("http://", "https://")
# Not within an IPv6 address.
_SEPARATOR = re.compile(r"::(?![\da-fA-F:.]*\])")
# In a chain such as ``simplecache::s3://``, the first link with a path.
_PROTOCOL = re.compile(r"(?:[\w+.-]+::)*[\w+.-]+://")


def is_local(url: str) -> bool:
    """Return whether the URL is local: ``/a.tar``, ``a.tar`` or ``file:///a.tar``."""
    return url.startswith(_FILE) or not ("://" in url or url.startswith(PIPE))


def plain_path(url: str) -> str:
    """Return the path of a local URL, with ``~`` expanded; return other URLs unchanged."""
    if not is_local(url):
        return url
    return os.path.expanduser(url.partition("://")[2] if url.startswith(_FILE) else url)


def expand(urls: Urls) -> list[str]:
    """Expand brace patterns in one URL or several, except in names of existing local files.

    ``::`` separates URLs in one string, as in WebDataset.

    Raises:
        StorageError: The braces are unbalanced.

    >>> expand("a-{000..002}.tar::b.tar")
    ['a-000.tar', 'a-001.tar', 'a-002.tar', 'b.tar']
    """
    named = [urls] if isinstance(urls, os.PathLike) else urls
    patterns = _SEPARATOR.split(named) if isinstance(named, str) else [os.fspath(p) for p in named]
    try:
        return [
            url
            for each in patterns
            for url in ([each] if is_there(each) else braceexpand.braceexpand(each))
        ]
    except ValueError:
        raise StorageError(f"not a brace pattern: {redact_url('::'.join(patterns))}") from None


def is_there(url: str) -> bool:
    """Return whether a URL is an existing local file or folder."""
    return is_local(url) and os.path.exists(plain_path(url))


def split(url: str) -> tuple[str, str, str]:
    """Split a URL before and after its path; a local URL is a path.

    The path ends at the query of an HTTP URL, which may hold the signature of a folder, or at the
    rest of a chain. In other URLs, ``?`` may be part of a name.

    >>> split("https://host/a?key=1"), split("zip://a::s3://bucket/b.zip")
    (('https://', 'host/a', '?key=1'), ('zip://', 'a', '::s3://bucket/b.zip'))
    """
    protocol = None if is_local(url) else _PROTOCOL.match(url)
    if protocol is None:
        return "", url, ""
    end = "?" if protocol[0].endswith(_HTTP) else "::"
    path, found, rest = url[protocol.end() :].partition(end)
    return protocol[0], path, found + rest


def file_name(url: str) -> str:
    """Return the last part of a URL's path."""
    return split(url)[1].rpartition("/")[2]


def parent(url: str) -> str:
    """Return the URL of the folder that a file is in, keeping what follows the path.

    >>> parent("https://host/a/b.tar?key=1"), parent("b.tar"), parent("/b.tar")
    ('https://host/a?key=1', '.', '/')
    """
    protocol, path, rest = split(url)
    folder, separator, _ = path.rpartition("/")
    return protocol + (folder or separator or "." * (not protocol)) + rest


def join(folder: str, name: str) -> str:
    """Return the URL of a file in a folder, keeping what follows the folder's path."""
    protocol, path, rest = split(folder)
    return f"{protocol}{path.rstrip('/')}/{name}{rest}"


def within(folder: str, place: str) -> str:
    """Return the folder that a URL, or a path relative to another folder, names.

    >>> within("s3://bucket/index", "../raw"), within("index", "/raw"), within("a/b", "")
    ('s3://bucket/raw', '/raw', 'a/b')
    """
    if not is_local(place) or os.path.isabs(plain_path(place)):
        return place
    for part in place.split("/"):
        if part == ".." and not is_local(folder):
            folder = parent(folder)
        elif part not in ("", "."):
            folder = join(folder, part)
    return folder
