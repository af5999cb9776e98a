"""The test servers do what they say, as seen by clients that are not the package's."""

import contextlib
import http.client
import pathlib
import random
import time
import urllib.parse

import pytest
import servers
from servers import AS_ASKED, Fault

DATA = random.Random(0).randbytes(300_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    # nginx and URLs must survive such names.
    folder = tmp_path_factory.mktemp("it's a $folder; really")
    (folder / "a.tar").write_bytes(DATA)
    (folder / "sub dir").mkdir()
    (folder / "sub dir" / "b.txt").write_bytes(b"0123456789")
    return folder


def ask(url, byte_range=None, method="GET", timeout=10):
    """The status, headers and body of an answer, and the error that ended it."""
    parts = urllib.parse.urlsplit(url)
    status, headers, pieces, error = 0, {}, [], None
    with contextlib.closing(http.client.HTTPConnection(parts.netloc, timeout=timeout)) as client:
        try:
            fields = {"Range": f"bytes={byte_range}"} if byte_range else {}
            client.request(method, parts.path, headers=fields)
            answer = client.getresponse()
            status, headers = answer.status, answer.headers
            while piece := answer.read1(65536):
                pieces.append(piece)
            if answer.length:
                raise http.client.IncompleteRead(b"", answer.length)
        except (OSError, http.client.HTTPException) as caught:
            error = caught
    return status, headers, b"".join(pieces), error


def without_heads(requests):
    """Requests without the sizes of the answers' heads."""
    return [(r.method, r.path, r.range, r.status, r.body_bytes) for r in requests]


@pytest.mark.parametrize("start", [servers.nginx, servers.faulty])
def test_a_log_is_exact(folder, start):
    """A log has every request with its range, its status and the bytes of its body, complete as
    soon as it is read.
    """
    with start(folder) as server:
        url = server.url("a.tar")
        assert ask(url, "100-299")[2] == DATA[100:300]
        assert ask(url)[2] == DATA
        assert ask(url, "299990-")[2] == ask(url, "-10")[2] == DATA[-10:]
        assert ask(url, method="HEAD")[1]["Content-Length"] == "300000"
        assert ask(url, "300000-300009")[0] == 416
        assert ask(server.url("no"))[0] == 404
        assert ask(server.url("sub dir/b.txt"))[2] == b"0123456789"
        log = without_heads(server.requests())
        # A request is logged after its answer has been sent, perhaps after the next one began.
        found = [(*line[:4], line[4] * (line[3] < 300)) for line in log]
        expected = [
            ("GET", "/a.tar", (100, 300), 206, 200),
            ("GET", "/a.tar", None, 200, 300_000),
            ("GET", "/a.tar", (299_990, None), 206, 10),
            ("GET", "/a.tar", (-10, None), 206, 10),
            ("HEAD", "/a.tar", None, 200, 0),
            ("GET", "/a.tar", (300_000, 300_010), 416, 0),
            ("GET", "/no", None, 404, 0),
            ("GET", "/sub dir/b.txt", None, 200, 10),
        ]
        assert sorted(found, key=str) == sorted(expected, key=str)
        server.reset()
        assert server.requests() == []


RANGE = DATA[100:200]
FLIPPED = bytes([RANGE[0] ^ 0xFF]) + RANGE[1:]
INCOMPLETE = http.client.IncompleteRead


@pytest.mark.parametrize(
    ("fault", "status", "body", "error"),
    [
        (Fault(cut_after=30), 206, RANGE[:30], INCOMPLETE),
        (Fault(cut_after=30, reset=True), 206, RANGE[:30], ConnectionResetError),
        (Fault(drop=True), 0, b"", http.client.RemoteDisconnected),
        (Fault(status=503, body=b"why"), 503, b"why", None),
        (Fault(stall=60), 0, b"", TimeoutError),
        (Fault(stall=60, stall_after=40), 206, RANGE[:40], TimeoutError),
        (Fault(length_error=5), 206, RANGE, INCOMPLETE),
        (Fault(headers={"Content-Range": "nonsense"}), 206, RANGE, None),
        (Fault(ignore_range=True), 200, DATA, None),
        (Fault(more=-20, headers=AS_ASKED), 206, DATA[100:180], None),
        (Fault(shift=7), 206, DATA[107:207], None),
        (Fault(flip=0), 206, FLIPPED, None),
    ],
)
def test_a_fault_is_what_a_client_meets(folder, fault, status, body, error):
    """Each fault changes one answer as it says, and the log has what was sent."""
    began = time.monotonic()
    with servers.faulty(folder, [fault]) as server:
        got = ask(server.url("a.tar"), "100-199", timeout=1 if fault.stall > 1 else 20)
        assert (got[0], got[2]) == (status, body)
        assert type(got[3]) is (error or type(None))
        for name, claim in fault.headers.items():
            assert got[1][name] == (claim and claim.format(start=100, last=199, total=300_000))
        (request,) = server.requests()
        assert (request.status, request.range) == (status, (100, 200))
        assert request.body_bytes == len(body)
        assert ask(server.url("a.tar"), "100-199")[2] == RANGE
    assert time.monotonic() - began < 30  # of 60
