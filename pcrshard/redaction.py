"""What may be shown of a URL: never a password, a token or a signature.

Text leaves the package by four doors, and each redacts what passes: the constructor and ``args`` of
:class:`.errors.PCRError`, the loggers of :func:`get_logger`, the streams of the command line, and
the files that say where something came from. Where a URL is known it is taken apart, whatever its
password holds; in any other text everything that may belong to a password or a query goes.
"""

from __future__ import annotations

import json
import logging
import re
import urllib.parse
from collections.abc import Iterator
from typing import Any, NamedTuple, TextIO

PIPE = "pipe:"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_LINK = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*(?:://|::))")
# What can follow "://" and be no user: a host, or a host with a port.
_HOST = re.compile(r"(?:\[[^\]@]*\]|[^:@]*)(?::\d*)?")
# A mark, and what is told from the text around it by a blank, or by a mark and a blank.
_QUERY = re.compile(r"\?(?:[^\s'\"),:;]|['\"),:;](?!['\"),:;\]}]*(?:\s|$)))+")
_FORMATTER = logging.Formatter()
_TAR = re.compile(r"[\w.-]+\.tar\b")
_MIN_PASSWORD = 4
_MIN_VALUE = 8


class UrlParts(NamedTuple):
    """A URL as it was written: scheme with ``://``, user and password, host, path, query."""

    scheme: str
    user: str
    host: str
    path: str
    query: str

    @property
    def shown(self) -> str:
        """What may be shown."""
        return f"{self.scheme}{self.host}{self.path}{self.query and f'{self.query[0]}...'}"


def split_url(url: str) -> UrlParts:
    """Take a URL apart, if need be wrongly: what may belong to a password counts as one.

    >>> split_url("http://me:pass/word@host/a.jpg?sig=x")
    UrlParts(scheme='http://', user='me:pass/word', host='host', path='/a.jpg', query='?sig=x')
    """
    scheme, mark, rest = url.partition("://")
    if not mark:
        return UrlParts("", "", "", url, "")
    user = _user_of(rest)
    rest = rest[len(user) + 1 :] if user else rest
    found = re.search(_query_mark(scheme), rest)
    query = rest[found.start() :] if found else ""
    address = rest.removesuffix(query)
    host, slash, path = address.partition("/")
    return UrlParts(scheme + mark, user, host, slash + path, query)


def _query_mark(scheme: str) -> str:
    """What begins a query: nothing in a local file's name, and ``#`` may be in an object's."""
    if scheme in ("file", "local"):
        return r"(?!)"
    return "[?#]" if scheme.endswith(("http", "https")) else "[?]"


def _user_of(rest: str) -> str:
    """User and password at the start of what follows ``://``; empty if there are none."""
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    if not re.search("[:@]", authority) or re.fullmatch(r"\[[^\]]*\](:\d*)?", authority):
        return ""
    user = re.split("[?#]", rest, maxsplit=1)[0].rpartition("@")[0]
    if not user and not _HOST.fullmatch(authority):
        # No host has such a port: the mark of a query is part of the password.
        user = rest.rpartition("@")[0]
    return user


def redact_url(url: str) -> str:
    """What may be shown of a URL, or of several that are chained by ``::``.

    >>> redact_url("https://me:se/cr'et@host/a.tar?X-Amz-Signature=abc")
    'https://host/a.tar?...'
    >>> redact_url("pipe:curl -u me:secret https://host/a-000001.tar")
    'pipe:curl ... a-000001.tar'
    """
    if url.startswith(PIPE):
        return _redact_command(url.removeprefix(PIPE))
    return "::".join(link.shown for link in links_of(url))


def links_of(url: str) -> list[UrlParts]:
    """The URLs that are chained by ``::`` in one, as fsspec reads them."""
    return [split_url(link) for link in _LINK.split(url)]


def bare_url(url: str) -> str:
    """A URL without user, password and query, for names that are made of it.

    >>> bare_url("https://me:secret@host/a.tar?X-Amz-Signature=abc")
    'https://host/a.tar'
    """
    if url.startswith(PIPE):
        return redact_url(url)
    return "::".join(f"{link.scheme}{link.host}{link.path}" for link in links_of(url))


def _redact_command(command: str) -> str:
    """A program and the tar that it reads; any other word may be a secret."""
    words = command.split()
    if len(words) < 2 or _SCHEME.search(words[0]) or "=" in words[0]:
        words = ["", *words]
    tars = [name for word in words[1:] for name in _TAR.findall(_path_of(word))]
    shown = [words[0], "..." if words[1:] else "", *tars[-1:]]
    return PIPE + " ".join(filter(None, shown))


def _path_of(word: str) -> str:
    return split_url(word).path


def redact(text: str, *urls: str) -> str:
    """Leave passwords and signatures out of a text.

    Args:
        text: Anything.
        urls: URLs that may be in it.

    >>> redact("get https://me:secret@host/a.tar?X-Amz-Signature=abc failed")
    'get https://host/a.tar?... failed'
    """
    for url in sorted(urls, key=len, reverse=True):
        text = _redact_known(text, url)
    if "://" not in text:
        return text
    return "\n".join(map(_redact_line, text.split("\n")))


def redact_any(text: str) -> str:
    """What may be shown of a text that may be a URL as a whole."""
    is_url = text.startswith(PIPE) or _SCHEME.match(text)
    return redact(redact_url(text) if is_url else text)


def _redact_known(text: str, url: str) -> str:
    shown = redact_url(url)
    if shown == url:
        return text
    for spelled in _spellings(url):
        text = text.replace(spelled, shown)
    for parts in links_of(url):
        for secret, instead in _secrets_of(parts):
            for spelled in _spellings(secret):
                text = text.replace(spelled, instead)
    return text


def _secrets_of(parts: UrlParts) -> Iterator[tuple[str, str]]:
    """What must not be shown of a URL wherever it stands, and what to show instead."""
    if parts.user:
        yield f"{parts.user}@", ""
        # Of a password with such marks a library may take only a part for one.
        for piece in (parts.user.partition(":")[2], *re.split("[][:@/?#]", parts.user)):
            if len(piece) >= _MIN_PASSWORD:
                yield piece, "..."
    if len(parts.query) > 1:
        yield parts.query, f"{parts.query[0]}..."
        for value in re.split("[?&=#]", parts.query):
            if len(value) >= _MIN_VALUE:
                yield value, "..."


def _spellings(secret: str) -> list[str]:
    """The ways in which a library may write it, the longest first."""
    quoted = {urllib.parse.quote_plus(secret), urllib.parse.quote_plus(secret, "/:@?&='(),")}
    quoted |= {urllib.parse.quote(secret, safe) for safe in ("", "/:@?&=", "/:@?&='()!*,;~+$#%")}
    plain = {secret, urllib.parse.unquote(secret), urllib.parse.unquote_plus(secret)} | quoted
    inside = {repr(each)[1:-1] for each in plain} | {json.dumps(each)[1:-1] for each in plain}
    return sorted(plain | inside, key=len, reverse=True)


def _redact_line(line: str) -> str:
    """A line without what may be secret behind each ``://``."""
    parts = _SCHEME.split(line)
    schemes = _SCHEME.findall(line)
    shown = [parts[0]]
    for scheme, rest in zip(schemes, parts[1:], strict=True):
        shown.append(scheme + _QUERY.sub("?...", _without_user(rest)))
    return "".join(shown)


def _without_user(rest: str) -> str:
    word = re.split(r"\s", rest, maxsplit=1)[0]
    authority = re.split(r"[/?#'\")\s]", rest, maxsplit=1)[0]
    if "@" in authority or not _HOST.fullmatch(authority.rstrip(":,;")):
        return rest.rpartition("@")[2]
    user = _user_of(word)
    return rest[len(user) + 1 :] if user else rest


class _RedactingFilter(logging.Filter):
    """Redacts what a logger passes on."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = redact(record.getMessage())
        record.args = ()
        if record.exc_info:
            record.exc_text = redact(_FORMATTER.formatException(record.exc_info))
            record.exc_info = None
        return True


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; the only way to one, so that no record has a secret."""
    log = logging.getLogger(name)
    if not any(isinstance(known, _RedactingFilter) for known in log.filters):
        log.addFilter(_RedactingFilter())
    return log


class RedactingStream:
    """A text stream that redacts what is written to it.

    Args:
        stream: Where the text goes.
        urls: URLs that may be in the text.
    """

    def __init__(self, stream: TextIO, urls: tuple[str, ...] = ()) -> None:
        self._stream = stream
        self._urls = urls

    def write(self, text: str) -> int:
        """Write what may be shown of a text."""
        self._stream.write(redact(text, *self._urls))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
