"""Whole files of unknown size: read to their end, resumed after a cut, refused when too large."""

import contextlib
import gzip
import http.server
import os
import threading
import time

import fsspec
import pytest
import servers
from servers import Fault

import pcrshard
from pcrshard import storage
from pcrshard.errors import StorageError
from pcrshard.storage.retry import Retry

HASTY = Retry(attempts=3, first_delay=0.01, timeout=0.4, deadline=5)
DATA = bytes(range(256)) * 800


@contextlib.contextmanager
def serving(send):
    """A server that answers GET by ``send(handler)``."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            with contextlib.suppress(ConnectionError):
                send(self)

        def log_message(self, *_):
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/pcr.json"
        finally:
            server.shutdown()


def endless(handler):
    """Chunks without an end."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    while True:
        handler.wfile.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")


def compressed(data):
    """An answer that is compressed, whatever was asked for."""

    def send(handler):
        body = gzip.compress(data)
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return send


def silent(handler):
    """A head, and then nothing."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.connection.settimeout(20)
    handler.rfile.read(1)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.bin").write_bytes(DATA)
    return tmp_path


def test_a_body_without_end_is_refused():
    """No more than the bound comes into memory, and nothing is tried again."""
    with serving(endless) as url, pytest.raises(StorageError, match="at most 1000000 bytes"):
        storage.read_bytes(url, max_bytes=1_000_000)


def test_a_compressed_file_may_grow_only_so_much():
    """A compressed index is read; a bomb of 100 kB is refused after 16 MiB."""
    with serving(compressed(DATA)) as url:
        assert storage.read_bytes(url, max_bytes=1 << 28) == DATA
    with (
        serving(compressed(bytes(1 << 26))) as url,
        pytest.raises(StorageError, match="at most 16777216 bytes"),
    ):
        storage.read_bytes(url, max_bytes=1 << 28)


def test_a_silent_server_is_left_as_soon_as_asked():
    """The dataset index obeys the user's Retry, as shards do."""
    with serving(silent) as url:
        begun = time.monotonic()
        with pytest.raises(StorageError, match="3 requests"):
            pcrshard.open_dataset(url, retry=HASTY)
        assert time.monotonic() - begun < 5


def test_a_cut_file_is_resumed(folder):
    """What came before a cut is not asked for again."""
    faults = [Fault(cut_after=100_000), Fault(cut_after=70_000)]
    with servers.faulty(folder, faults) as server:
        assert storage.read_bytes(server.url("a.bin"), max_bytes=1 << 20, retry=HASTY) == DATA
        asked = [request.range for request in server.requests()]
    assert asked == [None, (100_000, None), (170_000, None)]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(ignore_range=True),
        Fault(headers={"Content-Range": "bytes 100001-204799/204800"}),
        Fault(headers={"Content-Range": "nonsense"}),
        Fault(headers={"ETag": '"another"'}),
        Fault(status=503),
        Fault(drop=True),
    ],
    ids=str,
)
def test_an_answer_to_the_rest_that_is_wrong_is_not_used(folder, fault):
    """Whatever a server gives for the rest of a file, the bytes are the file's."""
    with servers.faulty(folder, [Fault(cut_after=100_000), fault]) as server:
        assert storage.read_bytes(server.url("a.bin"), max_bytes=1 << 20, retry=HASTY) == DATA


def test_a_larger_file_is_refused_at_once(folder):
    """By its length over HTTP, by its status on disk, by one byte more elsewhere."""
    fsspec.filesystem("memory").pipe_file("/limits/a.bin", DATA)
    with servers.faulty(folder, []) as server:
        for url in (server.url("a.bin"), str(folder / "a.bin"), "memory://limits/a.bin"):
            assert storage.read_bytes(url, max_bytes=len(DATA)) == DATA
            with pytest.raises(StorageError, match=f"at most {len(DATA) - 1} bytes|ignores ranges"):
                storage.read_bytes(url, max_bytes=len(DATA) - 1)


def test_an_empty_file_is_a_file(tmp_path):
    """Nothing is what an empty file holds, wherever it is."""
    (tmp_path / "a.bin").write_bytes(b"")
    with servers.faulty(tmp_path, []) as server:
        for url in (server.url("a.bin"), str(tmp_path / "a.bin")):
            assert storage.read_bytes(url, max_bytes=10) == b""


def test_what_is_no_file_is_not_waited_for(tmp_path):
    """A FIFO in place of the index is an error, not a wait without end."""
    os.mkfifo(tmp_path / "pcr.json")
    with pytest.raises(StorageError, match="regular file"):
        pcrshard.open_dataset(str(tmp_path))
