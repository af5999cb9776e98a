"""Redaction of passwords, tokens and signatures in URLs.

Errors, loggers, the command line, and files that name a source redact their text. A known URL is
parsed; in any other text, everything that may be a password or a query is removed.
"""

from __future__ import annotations

import json
import logging
import re
from typing import NamedTuple
from urllib.parse import quote, quote_plus, unquote, unquote_plus

PIPE = "pipe:"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)")
_LINK = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*(?:://|::))")
# A host with an optional port, which can follow "://" without being a user.
_HOST = re.compile(r"(?:\[[^\]@]*\]|[^:@]*)(?::\d*)?")
# A query ends at whitespace, or at punctuation followed by whitespace.
_QUERY = re.compile(r"\?(?:[^\s'\"),:;]|['\"),:;](?!['\"),:;\]}]*(?:\s|$)))+")
_TAR = re.compile(r"[\w.-]+\.tar\b")
_SAFE = ("", "/:@?&=", "/:@?&='()!*,;~+$#%")


class UrlParts(NamedTuple):
    """The parts of a URL as written: scheme with ``://``, user and password, host, path, query."""

    scheme: str
    user: str
    host: str
    path: str
    query: str

    @property
    def bare(self) -> str:
        """URL without user, password and query."""
        return f"{self.scheme}{self.host}{self.path}"


def split_url(url: str) -> UrlParts:
    """Parse a URL; ambiguous text counts as part of the password.

    >>> split_url("http://me:pass/word@host/a.jpg?sig=x")
    UrlParts(scheme='http://', user='me:pass/word', host='host', path='/a.jpg', query='?sig=x')
    """
    scheme, mark, rest = url.partition("://")
    if not mark:
        return UrlParts("", "", "", url, "")
    user = _user_of(rest)
    rest = rest[len(user) + bool(user) :]
    # Local files have no queries, and object keys may contain "#".
    marks = "[?#]" if scheme.endswith(("http", "https")) else "[?]"
    found = None if scheme in ("file", "local") else re.search(marks, rest)
    address = rest[: found.start()] if found else rest
    host, slash, path = address.partition("/")
    return UrlParts(scheme + mark, user, host, slash + path, rest[len(address) :])


def _user_of(rest: str) -> str:
    """Return user and password at the start of the text after ``://``."""
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    if not re.search("[:@]", authority) or re.fullmatch(r"\[[^\]]*\](:\d*)?", authority):
        return ""
    user = re.split("[?#]", rest, maxsplit=1)[0].rpartition("@")[0]
    # If this is not a valid host and port, the query mark is part of the password.
    return user if user or _HOST.fullmatch(authority) else rest.rpartition("@")[0]


def links_of(url: str) -> list[UrlParts]:
    """Return the parts of each URL in a chain joined by ``::``, as fsspec reads it."""
    return [split_url(link) for link in _LINK.split(url)]


def bare_url(url: str) -> str:
    """Return a URL without user, password and query, to derive names from."""
    return redact_url(url) if url[:5] == PIPE else "::".join(link.bare for link in links_of(url))


def redact_url(url: str) -> str:
    """Return a URL, or a chain of URLs joined by ``::``, with secrets removed.

    >>> redact_url("https://me:se/cr'et@host/a.tar?X-Amz-Signature=abc")
    'https://host/a.tar?...'
    >>> redact_url("pipe:curl -u me:secret https://host/a-000001.tar")
    'pipe:... a-000001.tar'
    """
    if url.startswith(PIPE):
        # Any word of a command can be a secret.
        tars = [name for word in url.split() for name in _TAR.findall(split_url(word).path)]
        return " ".join([f"{PIPE}...", *tars[-1:]])
    return "::".join(f"{link.bare}{link.query and f'{link.query[0]}...'}" for link in links_of(url))


def redact(text: str, *urls: str) -> str:
    """Remove passwords and signatures from a text that may contain ``urls``.

    >>> redact("get https://me:secret@host/a.tar?X-Amz-Signature=abc failed")
    'get https://host/a.tar?... failed'
    """
    for url in sorted(urls, key=len, reverse=True):
        secrets = {url: redact_url(url)}
        for link in links_of(url):
            # A library may show only a part of a password that contains these characters.
            parts = [link.user.partition(":")[2], *re.split("[][:@/?#]", link.user)]
            values = re.split("[?&=#]", link.query)
            secrets |= {f"{link.user}@": ""} if link.user else {}
            secrets |= {link.query: f"{link.query[0]}..."} if len(link.query) > 1 else {}
            secrets |= {part: "..." for part in parts if len(part) >= 4}
            secrets |= {value: "..." for value in values if len(value) >= 8}
        for secret, instead in secrets.items():
            for spelled in _spellings(secret) if secret != instead else ():
                text = text.replace(spelled, instead)
    return "\n".join(map(_redact_line, text.split("\n"))) if "://" in text else text


def redact_any(text: str) -> str:
    """Return a text with secrets removed; the whole text may be a URL."""
    return redact(redact_url(text) if text.startswith(PIPE) or _SCHEME.match(text) else text)


def _spellings(secret: str) -> list[str]:
    """Return the ways in which a library may write a secret, longest first."""
    plain = {secret, unquote(secret), unquote_plus(secret), quote_plus(secret)}
    plain |= {quote_plus(secret, "/:@?&='(),"), *(quote(secret, safe) for safe in _SAFE)}
    inside = {shown[1:-1] for each in plain for shown in (repr(each), json.dumps(each))}
    return sorted(plain | inside, key=len, reverse=True)


def _redact_line(line: str) -> str:
    """Return a line without possible secrets after each ``://``."""
    shown, *parts = _SCHEME.split(line)
    for scheme, rest in zip(parts[::2], parts[1::2], strict=True):
        authority = re.split(r"[/?#'\")\s]", rest, maxsplit=1)[0]
        user = rest.rpartition("@")[0]
        if "@" not in authority and _HOST.fullmatch(authority.rstrip(":,;")):
            user = _user_of(re.split(r"\s", rest, maxsplit=1)[0])
        shown += scheme + _QUERY.sub("?...", rest[len(user) + bool(user) :])
    return shown


def _redact_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = redact(record.getMessage()), ()
    if record.exc_info:
        record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        record.exc_info = None
    return True


def get_logger(name: str) -> logging.Logger:
    """Return a module's logger that redacts its records; use this instead of ``logging``."""
    log = logging.getLogger(name)
    log.addFilter(_redact_record)
    return log
