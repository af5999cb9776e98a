"""After a redirect, the new server receives nothing meant only for the first, such as keys."""

import http.server
import threading
import warnings
from contextlib import contextmanager

import aiohttp
import pytest

from pcrshard.errors import StorageError
from pcrshard.storage import read, read_bytes

SECRET = "pl4ntedSecret"
DATA = b"0123456789"


@contextmanager
def server(location=None):
    """A server that sends readers on, or that answers; yields its URL and the headers it saw."""
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(dict(self.headers))
            first = location is not None and not self.path.startswith("/next")
            self.send_response(302 if first else 206 if "Range" in self.headers else 200)
            if first:
                self.send_header("Location", location)
            start, stop = 0, len(DATA)
            if "Range" in self.headers and not first:
                start, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
                stop = last + 1
                self.send_header("Content-Range", f"bytes {start}-{last}/{len(DATA)}")
            body = b"" if first else DATA[start:stop]
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}", seen
        finally:
            listening.shutdown()


def basic_auth():
    """What users still have in their options, though aiohttp warns of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return aiohttp.BasicAuth("me", SECRET)


CREDENTIALS = [
    {"headers": {"X-Api-Key": SECRET, "Private-Token": SECRET}},
    {"client_kwargs": {"headers": {"X-Api-Key": SECRET, "Authorization": SECRET}}},
    {"client_kwargs": {"cookies": {"session": SECRET}}},
    {"client_kwargs": {"auth": basic_auth()}},
    {"headers": {"Cookie": f"a={SECRET}"}},
]


@pytest.mark.parametrize("options", CREDENTIALS, ids=str)
def test_another_server_is_told_nothing(options):
    """Keys, cookies and passwords reach the server that was named, and no other one; the range
    reaches both.
    """
    auth = basic_auth().encode()
    with server() as (other, far), server(f"{other}/next") as (url, near):
        assert read(f"{url}/a", 2, 5, options=options).tobytes() == DATA[2:5]
        assert read_bytes(f"{url}/b", options=options) == DATA
    assert all(SECRET in str(headers) or auth in str(headers) for headers in near)
    assert not any(SECRET in str(headers) or auth in str(headers) for headers in far)
    assert far[0]["Range"] == "bytes=2-4"
    assert len(near) == len(far) == 2


def test_the_same_server_is_told_again():
    """A redirect within one server keeps its headers and credentials."""
    options = {"headers": {"X-Api-Key": SECRET}}
    with server("/next") as (url, seen):
        assert read_bytes(f"{url}/a", options=options) == DATA
    assert [headers["X-Api-Key"] for headers in seen] == [SECRET, SECRET]


def test_a_location_that_is_no_url():
    """A redirect location that cannot be parsed counts as another server."""
    options = {"headers": {"X-Api-Key": SECRET}}
    with server("http://[") as (url, seen):
        with pytest.raises(StorageError):
            read_bytes(f"{url}/a", options=options)
    assert len(seen) >= 1
