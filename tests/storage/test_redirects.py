"""After a redirect, the new server receives nothing meant only for the first, such as keys."""

import contextlib
import warnings

import pytest
import servers
from imported_later import Later

from pcrshard.errors import StorageError
from pcrshard.storage import read, read_bytes

aiohttp = Later("aiohttp")
SECRET = "pl4ntedSecret"
DATA = b"0123456789"


@pytest.fixture
def server(tmp_path):
    """Serve DATA, or send readers on; yields the server's URL and the headers that it saw."""
    (tmp_path / "data").write_bytes(DATA)
    files = servers.folder_origin(tmp_path)

    @contextlib.contextmanager
    def serve(location=None):
        seen = []

        def answer(method, target, headers, body):
            seen.append(dict(headers))
            if location is None or target.startswith("/next"):
                return files(method, "/data", headers, body)
            return servers.Answer(302, {"Location": location})

        with contextlib.closing(servers.FaultServer(answer, ())) as listening:
            yield listening.url()[:-1], seen

    return serve


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
def test_another_server_is_told_nothing(server, options):
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


def test_the_same_server_is_told_again(server):
    """A redirect within one server keeps its headers and credentials."""
    options = {"headers": {"X-Api-Key": SECRET}}
    with server("/next") as (url, seen):
        assert read_bytes(f"{url}/a", options=options) == DATA
    assert [headers["X-Api-Key"] for headers in seen] == [SECRET, SECRET]


def test_a_location_that_is_no_url(server):
    """A redirect location that cannot be parsed counts as another server."""
    options = {"headers": {"X-Api-Key": SECRET}}
    with server("http://[") as (url, seen):
        with pytest.raises(StorageError):
            read_bytes(f"{url}/a", options=options)
    assert len(seen) >= 1
