"""HTTP sessions that keep the user's headers, cookies and passwords from other servers.

A store may redirect a reader to another host. aiohttp then drops ``Authorization`` and ``Cookie``
but keeps other headers, such as an API key, and the session's default credentials.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp

# Headers that another server may see; all others are only for the server the user named.
_PUBLIC = {
    "accept", "accept-encoding", "accept-language", "if-match", "if-modified-since",
    "if-none-match", "if-range", "if-unmodified-since", "range", "user-agent",
}  # fmt: skip


def with_redirect_guard(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return storage options of an HTTP file system whose sessions send headers to one server only.

    ``auth`` and ``cookies`` of ``client_kwargs`` become headers.
    """
    kwargs = dict(options.get("client_kwargs") or {})
    headers = dict(kwargs.get("headers") or {})
    if auth := kwargs.pop("auth", None):
        headers.setdefault("Authorization", auth.encode())
    if isinstance(cookies := kwargs.get("cookies"), dict):
        del kwargs["cookies"]
        headers.setdefault("Cookie", "; ".join(f"{name}={cookies[name]}" for name in cookies))
    kwargs["headers"] = headers
    kwargs["trace_configs"] = [*(kwargs.get("trace_configs") or []), _DROPPING]
    return {**options, "client_kwargs": kwargs}


async def _drop_headers(
    _session: aiohttp.ClientSession,
    _context: object,
    redirect: aiohttp.TraceRequestRedirectParams,
) -> None:
    """Drop headers that another server must not see from the next request."""
    target = redirect.response.headers.get("Location", "")
    if _same_origin(redirect.url, target):
        return
    for name in {name for name in redirect.headers if name.lower() not in _PUBLIC}:
        redirect.headers.popall(name)


def _same_origin(url: Any, target: str) -> bool:
    try:
        return bool(url.join(type(url)(target)).origin() == url.origin())
    except ValueError:
        return False


# One object for all sessions, because fsspec compares file systems by their arguments' repr.
_DROPPING = aiohttp.TraceConfig()
_DROPPING.on_request_redirect.append(_drop_headers)
