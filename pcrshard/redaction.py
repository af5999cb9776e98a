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
# What follows the scheme of a URL, up to the next URL or the end of the line.
_REST = re.compile("(?<=://).*?(?=://|$)", re.MULTILINE)
_LINK = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*(?:://|::))")
# A host with an optional port.
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


def split_url(url: str) -> UrlParts:
    """Parse a URL; before an ``@``, what is not a valid host and port belongs to the password."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return UrlParts("", "", "", url, "")
    user, rest = _split_user(rest)
    # Local files have no queries, and object keys may contain "#".
    marks = "[?#]" if scheme.endswith(("http", "https")) else "[?]"
    address = rest if scheme in ("file", "local") else re.split(marks, rest, maxsplit=1)[0]
    host, slash, path = address.partition("/")
    return UrlParts(scheme + mark, user, host, slash + path, rest[len(address) :])


def _split_user(rest: str) -> tuple[str, str]:
    """Return user and password of the text after ``://``, and what follows their ``@``."""
    if _HOST.fullmatch(re.split("[/?#]", rest, maxsplit=1)[0]):
        return "", rest
    # Without an "@" before the query mark, the mark is part of the password.
    before_query = re.split("[?#]", rest, maxsplit=1)[0]
    stop = (before_query if "@" in before_query else rest).rfind("@")
    return rest[: max(stop, 0)], rest[stop + 1 :]


def links_of(url: str) -> list[UrlParts]:
    """Return the parts of each URL in a chain joined by ``::``, as fsspec reads it."""
    return [split_url(link) for link in _LINK.split(url)]


def redact_url(url: str, query: str = "?...") -> str:
    """Return a URL, or a chain of URLs, without users and passwords, and ``query`` for queries.

    >>> redact_url("pipe:curl -u me:secret https://host/a-000001.tar")
    'pipe:... a-000001.tar'
    """
    if url.startswith(PIPE):
        # Any word of a command can be a secret.
        tars = [name for word in url.split() for name in _TAR.findall(split_url(word).path)]
        return " ".join([f"{PIPE}...", *tars[-1:]])
    links = links_of(url)
    return "::".join(
        each.scheme + each.host + each.path + query * bool(each.query) for each in links
    )


def redact(text: str, *urls: str) -> str:
    """Remove passwords and signatures from a text that may contain ``urls``.

    >>> redact("get https://me:secret@host/a.tar?X-Amz-Signature=abc failed")
    'get https://host/a.tar?... failed'
    """
    for url in sorted(urls, key=len, reverse=True):
        secrets = {url: redact_url(url)}
        for _, user, _, _, query in links_of(url):
            # A library may show only a part of a password that contains these characters.
            parts = [user.partition(":")[2], *re.split("[][:@/?#]", user)]
            secrets |= {part: "..." for part in parts if len(part) >= 4}
            secrets |= {part: "..." for part in re.split("[?&=#]", query) if len(part) >= 8}
        for secret, instead in secrets.items():
            for spelled in _spellings(secret) if secret != instead else ():
                text = text.replace(spelled, instead)
    return _REST.sub(lambda found: _QUERY.sub("?...", _split_user(found[0])[1]), text)


def _spellings(secret: str) -> list[str]:
    """Return the ways in which a library may write a secret, longest first."""
    plain = {secret, unquote(secret), unquote_plus(secret), quote_plus(secret)}
    plain |= {quote(secret, safe) for safe in _SAFE}
    inside = {shown[1:-1] for each in plain for shown in (repr(each), json.dumps(each))}
    return sorted(plain | inside, key=len, reverse=True)


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
