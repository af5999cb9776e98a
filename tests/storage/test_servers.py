"""The test servers do what they say, as seen by clients that are not the package's."""

import concurrent.futures
import contextlib
import functools
import http.client
import os
import pathlib
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

import fsspec
import pytest
import servers
from servers import AS_ASKED, Fault, Request

DATA = random.Random(0).randbytes(300_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp(
        "it's a $folder; really"
    )  # nginx and URLs must survive such names
    (folder / "a.tar").write_bytes(DATA)
    (folder / "sub dir").mkdir()
    (folder / "sub dir" / "b.txt").write_bytes(b"0123456789")
    return folder


@pytest.fixture(scope="module")
def bucket(folder):
    pytest.importorskip("s3fs", reason="S3FS IS NOT INSTALLED: pip install -c constraints.txt s3fs")
    with servers.s3(folder) as server:
        yield server


class Answer:
    """What came over the wire, however it ended."""

    def __init__(self, connection, method, url, headers):
        self.status, self.headers, self.error = 0, {}, None
        pieces = []
        try:
            connection.request(method, urllib.parse.urlsplit(url).path, headers=headers)
            answer = connection.getresponse()
            self.status, self.headers = answer.status, answer.headers
            while piece := answer.read1(65536):
                pieces.append(piece)
            if answer.length:
                self.error = http.client.IncompleteRead(b"", answer.length)
            answer.close()
        except (OSError, http.client.HTTPException) as error:
            self.error = error
        self.body = b"".join(pieces)


def ask(url, byte_range=None, method="GET", connection=None, timeout=10, **headers):
    headers |= {"Range": f"bytes={byte_range}"} if byte_range else {}
    own = connection or http.client.HTTPConnection(
        urllib.parse.urlsplit(url).netloc, timeout=timeout
    )
    try:
        return Answer(own, method, url, headers)
    finally:
        if connection is None:
            own.close()


@contextlib.contextmanager
def connected(server):
    with contextlib.closing(
        http.client.HTTPConnection(server.host, server.port, timeout=10)
    ) as connection:
        yield connection


def curl(*arguments):
    if shutil.which("curl") is None:
        pytest.skip("CURL IS NOT INSTALLED: apt-get install curl")
    result = subprocess.run(
        ["curl", "--silent", "--noproxy", "*", *arguments], capture_output=True, check=False
    )
    return result.returncode, result.stdout


def without_heads(requests):
    """Requests without the sizes of the answers' heads."""
    return [(r.method, r.path, r.range, r.status, r.body_bytes) for r in requests]


# nginx


def test_nginx_log_is_exact(folder):
    """nginx's log has every request with its range, its status and the bytes of its body, complete
    as soon as it is asked.
    """
    with servers.nginx(folder) as server:
        url = server.url("a.tar")
        assert ask(url, "100-299").body == DATA[100:300]
        assert ask(url).body == DATA
        assert ask(url, "299990-").body == ask(url, "-10").body == DATA[-10:]
        assert ask(url, method="HEAD").headers["Content-Length"] == "300000"
        assert ask(url, "300000-300009").status == 416
        assert ask(server.url("no")).status == 404
        assert ask(server.url("sub dir/b.txt")).body == b"0123456789"
        log = without_heads(server.requests())
        assert [log[5][4] > 0, log[6][4] > 0] == [True, True]  # nginx's pages for errors
        assert [(*line[:4], line[4] * (line[3] < 300)) for line in log] == [
            ("GET", "/a.tar", (100, 300), 206, 200),
            ("GET", "/a.tar", None, 200, 300_000),
            ("GET", "/a.tar", (299_990, None), 206, 10),
            ("GET", "/a.tar", (-10, None), 206, 10),
            ("HEAD", "/a.tar", None, 200, 0),
            ("GET", "/a.tar", (300_000, 300_010), 416, 0),
            ("GET", "/no", None, 404, 0),
            ("GET", "/sub dir/b.txt", None, 200, 10),
        ]
        server.reset()
        assert server.requests() == []


def test_nginx_counts_the_bytes_on_the_wire(folder):
    """``sent_bytes`` is the answer with its head, byte for byte as a socket receives it."""
    with (
        servers.nginx(folder) as server,
        socket.create_connection((server.host, server.port)) as client,
    ):
        client.sendall(
            b"GET /a.tar?x=1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\nRange: bytes=5-14\r\n\r\n"
        )
        received = b"".join(iter(functools.partial(client.recv, 65536), b""))
        assert received.endswith(b"\r\n\r\n" + DATA[5:15])
        assert server.requests() == [
            Request("GET", "/a.tar", (5, 15), 206, 10, len(received), "x=1")
        ]


def test_nginx_under_fsspec_and_curl(folder):
    """fsspec and curl get the same bytes, and the log tells who asked for what."""
    with servers.nginx(folder) as server:
        assert fsspec_http().cat_file(server.url("a.tar"), 7, 1007) == DATA[7:1007]
        assert curl("--range", "0-9", server.url("sub dir/b.txt")) == (0, b"0123456789")
        assert [(r.path, r.range) for r in server.requests()] == [
            ("/a.tar", (7, 1007)),
            ("/sub dir/b.txt", (0, 10)),
        ]


def fsspec_http():
    pytest.importorskip(
        "aiohttp", reason="AIOHTTP IS NOT INSTALLED: pip install -c constraints.txt aiohttp"
    )
    return fsspec.filesystem("http")


def test_nginx_can_ignore_range(folder):
    """``max_ranges=0`` answers a range with 200 and the whole file."""
    with servers.nginx(folder, max_ranges=0) as server:
        answer = ask(server.url("a.tar"), "0-9")
        assert (answer.status, len(answer.body)) == (200, 300_000)
        assert without_heads(server.requests()) == [("GET", "/a.tar", (0, 10), 200, 300_000)]


def test_nginx_limits_the_rate(folder):
    """``limit_rate`` slows each request, after ``limit_rate_after`` bytes and one second's worth at
    once.
    """
    with servers.nginx(folder, limit_rate=100_000, limit_rate_after=100_000) as server:
        began = time.monotonic()
        assert ask(server.url("a.tar"), "0-99999").body == DATA[:100_000]
        at_once = time.monotonic() - began
        began = time.monotonic()
        assert ask(server.url("a.tar")).body == DATA
        assert time.monotonic() - began > max(0.5, at_once)


def test_requests_wait_for_those_in_progress(folder):
    """A log is not read while a client is being served; a client that leaves is logged with less
    than the file.
    """
    with servers.nginx(folder, limit_rate=1000) as server:
        with connected(server) as client:
            client.request("GET", "/a.tar")
            answer = client.getresponse()
            assert answer.read(1000) == DATA[:1000]
            with pytest.raises(TimeoutError, match="1 requests"):
                server.settle(0.05)
            answer.close()
        (request,) = server.requests()
        assert 1000 <= request.body_bytes < 300_000


@pytest.mark.parametrize("start", [servers.nginx, servers.s3, servers.faulty])
def test_nothing_is_left_when_a_test_fails(folder, start, tmp_path, monkeypatch):
    """An error in the block passes, and port, folder, threads and process are gone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError), start(folder) as server:
        port = server.port
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() <= threads
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_a_server_dies_with_its_process(folder, tmp_path):
    """A killed test run leaves no server behind."""
    script = (
        f"import servers, sys, signal\nwith servers.nginx({str(folder)!r}) as s:\n"
        " print(s.port, flush=True)\n signal.pause()"
    )
    tests = pathlib.Path(servers.__file__).parent
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tests,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        port = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)

    def refused():
        with (
            contextlib.suppress(ConnectionResetError),
            contextlib.closing(socket.socket()) as client,
        ):
            return client.connect_ex(("127.0.0.1", port)) != 0

    servers._poll(refused, 10, lambda: "nginx is still there")


def test_many_servers_at_once(folder):
    """Servers started at the same time get ports, folders and logs of their own."""

    def use(number):
        with servers.nginx(folder) as web, servers.faulty(folder) as own:
            answers = [
                ask(server.url("a.tar"), f"0-{number}").body
                for server in (web, own)
                for _ in range(3)
            ]
            assert answers == [DATA[: number + 1]] * 6
            assert [r.range for r in web.requests() + own.requests()] == [(0, number + 1)] * 6
            return web.port, own.port

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        ports = [port for pair in pool.map(use, range(8)) for port in pair]
    assert len(ports) == 16


def test_missing_nginx_skips_loudly(folder, monkeypatch):
    """Where nginx is not installed, a test is skipped with the command that installs it."""
    monkeypatch.setattr(servers.shutil, "which", lambda *_, **__: None)
    with pytest.raises(servers.Unavailable, match="apt-get install nginx"), servers.nginx(folder):
        pass


# S3


def test_s3_serves_ranges_to_boto3(bucket):
    """boto3 lists, sizes and reads ranges of the uploaded files, and the log has the bytes of
    each.
    """
    boto3 = pytest.importorskip("boto3")
    options = bucket.storage_options
    client = boto3.client(
        "s3",
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
        **options["client_kwargs"],
    )
    bucket.reset()
    with contextlib.closing(client):
        names = [found["Key"] for found in client.list_objects_v2(Bucket=bucket.bucket)["Contents"]]
        assert names == ["data/a.tar", "data/sub dir/b.txt"]
        read = client.get_object(Bucket=bucket.bucket, Key="data/a.tar", Range="bytes=100-299")[
            "Body"
        ]
        assert read.read() == DATA[100:300]
        assert (
            client.head_object(Bucket=bucket.bucket, Key="data/a.tar")["ContentLength"] == 300_000
        )
    listing, ranged, head = bucket.requests()
    path = f"/{bucket.bucket}/data/a.tar"
    assert (listing.path.strip("/"), "list-type=2" in listing.query) == (bucket.bucket, True)
    assert without_heads([ranged, head]) == [
        ("GET", path, (100, 300), 206, 200),
        ("HEAD", path, None, 200, 0),
    ]
    assert ranged.sent_bytes > 200


def s3_files(bucket, **changes):
    """An s3fs file system that is not shared with other tests."""
    return fsspec.filesystem("s3", **bucket.storage_options, **changes, skip_instance_cache=True)


def test_s3_options_read_no_configuration(bucket, monkeypatch, tmp_path):
    """s3fs with ``storage_options`` works whatever the user's ``~/.aws`` and environment say."""
    (tmp_path / ".aws").mkdir()
    for name in ("config", "credentials"):
        (tmp_path / ".aws" / name).write_text("[default\nnonsense")
    nowhere = "http://127.0.0.1:9"
    for name, value in {
        "HOME": tmp_path,
        "AWS_PROFILE": "no",
        "http_proxy": nowhere,
        "AWS_ENDPOINT_URL": nowhere,
    }.items():
        monkeypatch.setenv(name, str(value))
    bucket.reset()
    files = s3_files(bucket)
    assert files.cat_file(bucket.url("a.tar"), start=5, end=1005) == DATA[5:1005]
    assert without_heads(bucket.requests()) == [
        ("GET", f"/{bucket.bucket}/data/a.tar", (5, 1005), 206, 1000)
    ]
    assert sorted(os.path.basename(name) for name in files.find(bucket.url())) == ["a.tar", "b.txt"]


def test_s3_takes_uploads(bucket):
    """What s3fs writes can be read back; nothing of it is left in a file."""
    files = s3_files(bucket)
    files.pipe_file(bucket.url("new/ü.bin"), DATA)
    assert files.cat_file(bucket.url("new/ü.bin"), start=-10) == DATA[-10:]


def test_s3_through_a_faulty_proxy(bucket):
    """s3fs meets a 500, a 503 and then the right bytes behind a proxy, and can write through it."""
    faults = [Fault(status=500), Fault(status=503, headers={"Retry-After": "0"}), None]
    with servers.faulty_proxy(bucket.endpoint, faults) as proxy:
        files = fsspec.filesystem(
            "s3", **bucket.storage_options_at(proxy.endpoint), skip_instance_cache=True
        )
        assert files.cat_file(bucket.url("a.tar"), start=0, end=1000) == DATA[:1000]
        assert [r.status for r in proxy.requests()] == [500, 503, 206]
        files.pipe_file(bucket.url("through"), b"x" * 1000)
        assert files.info(bucket.url("through"))["size"] == 1000


def test_proxy_cuts_and_flips(bucket):
    """A proxy's faults act on the upstream's bytes."""
    with servers.faulty_proxy(
        bucket.endpoint, [Fault(cut_after=7), Fault(flip=0), Fault(shift=5), None]
    ) as proxy:
        url = f"{proxy.endpoint}/{bucket.bucket}/data/a.tar"
        cut, flipped, shifted, right = [ask(url, "0-9") for _ in range(4)]
        assert (cut.body, cut.headers["Content-Length"]) == (DATA[:7], "10")
        assert flipped.body == bytes([DATA[0] ^ 255]) + DATA[1:10]
        assert (shifted.body, shifted.headers["Content-Range"]) == (DATA[5:15], "bytes 5-14/300000")
        assert right.body == DATA[:10]


# faults


@pytest.fixture
def faulted(folder):
    """Ask once for bytes 100 to 200 of a.tar with this fault: the answer and the one logged
    request.
    """

    def play(fault, byte_range="100-199", **options):
        with servers.faulty(folder, [fault]) as server:
            answer = ask(server.url("a.tar"), byte_range, **options)
            (request,) = server.requests()
            return answer, request

    return play


def test_a_fault_server_without_faults_is_correct(folder):
    """Ranges, HEAD, ETag, conditions and keep-alive work as in RFC 9110."""
    with servers.faulty(folder) as server, connected(server) as connection:
        get = functools.partial(ask, server.url("a.tar"), connection=connection)
        assert get("100-299").headers["Content-Range"] == "bytes 100-299/300000"
        assert get("299990-").body == get("-10").body == get("299990-999999").body == DATA[-10:]
        whole = get()
        assert (whole.status, whole.body) == (200, DATA)
        etag = whole.headers["ETag"]
        assert get("0-9", **{"If-Range": etag}).body == DATA[:10]
        assert get("0-9", **{"If-Range": '"old"'}).status == 200
        assert get("0-9", **{"If-Match": '"old"'}).status == 412
        assert get(**{"If-None-Match": etag}).status == 304
        assert get(method="HEAD").headers["Content-Length"] == "300000"
        assert get("300000-").headers["Content-Range"] == "bytes */300000"
        assert ask(server.url("no"), connection=connection).status == 404
        assert (
            ask(
                f"http://{server.host}:{server.port}/../../../../etc/passwd", connection=connection
            ).status
            == 404
        )
        assert ask(server.url("sub dir/b.txt"), connection=connection).body == b"0123456789"
        assert server.connections == 1
        assert len(server.requests()) == 14
        assert (
            sum(request.body_bytes for request in server.requests())
            == 200 + 40 + 300_000 * 2 + 10 + 10 - 10
        )


def test_cut(faulted):
    """The connection ends after n bytes of the body, under an honest Content-Length."""
    answer, request = faulted(Fault(cut_after=30))
    assert (answer.status, answer.body, answer.headers["Content-Length"]) == (
        206,
        DATA[100:130],
        "100",
    )
    assert isinstance(answer.error, http.client.IncompleteRead)
    assert (request.status, request.body_bytes) == (206, 30)


def test_cut_without_length(faulted):
    """Without Content-Length a cut looks like the end: only the range tells."""
    answer, _ = faulted(Fault(cut_after=30, headers={"Content-Length": None}))
    assert (answer.body, answer.error, answer.headers["Content-Length"]) == (
        DATA[100:130],
        None,
        None,
    )


def test_cut_by_reset(faulted):
    """A cut can be a RST, which comes after the bytes."""
    answer, request = faulted(Fault(cut_after=30, reset=True))
    assert answer.body == DATA[100:130]
    assert isinstance(answer.error, ConnectionResetError)
    assert request.body_bytes == 30


def test_drop(faulted):
    """A connection can end without an answer, by FIN or RST."""
    ended, request = faulted(Fault(drop=True))
    assert type(ended.error) is http.client.RemoteDisconnected
    assert (request.status, request.sent_bytes) == (0, 0)
    aborted, _ = faulted(Fault(drop=True, reset=True))
    assert type(aborted.error) is ConnectionResetError


def test_reset_at_accept(folder):
    """The first connections are reset before a request is read."""
    with servers.faulty(folder, reset_connections=2) as server:
        for _ in range(2):
            assert isinstance(ask(server.url("a.tar")).error, ConnectionResetError)
        assert ask(server.url("a.tar")).body == DATA
        assert (server.connections, len(server.requests())) == (3, 1)


@pytest.mark.parametrize("status", [403, 404, 429, 500, 503])
def test_status(faulted, status):
    """An answer can be any status, with headers such as Retry-After and a body."""
    answer, request = faulted(Fault(status=status, headers={"Retry-After": "7"}, body=b"why"))
    assert (answer.status, answer.headers["Retry-After"], answer.body) == (status, "7", b"why")
    assert (request.status, request.body_bytes) == (status, 3)


def test_redirect_to_itself(folder):
    """A bare 302 fault redirects to the same URL on every request."""
    with servers.faulty(folder, lambda ask: Fault(status=302)) as server:
        assert ask(server.url("sub dir/b.txt")).headers["Location"] == server.url("sub dir/b.txt")
        assert curl("--location", "--max-redirs", "5", server.url("a.tar")) == (47, b"")
        assert [r.status for r in server.requests()] == [302] * 7


@pytest.mark.parametrize(("after", "expected"), [(None, b""), (0, b""), (40, DATA[100:140])])
def test_stall(faulted, after, expected):
    """A stall stops the answer before its head or in its body; the client's time limit sees it, and
    the server lets go with the client.
    """
    began = time.monotonic()
    answer, request = faulted(Fault(stall=60, stall_after=after), timeout=0.2)
    assert isinstance(answer.error, TimeoutError)
    assert (answer.status, answer.body) == (0 if after is None else 206, expected)
    assert (request.status, request.body_bytes) == (answer.status, len(expected))
    assert time.monotonic() - began < 30  # of 60


def test_stall_ends(faulted):
    """After a stall the answer goes on."""
    began = time.monotonic()
    answer, _ = faulted(Fault(stall=0.2, stall_after=10))
    assert answer.body == DATA[100:200]
    assert time.monotonic() - began >= 0.2


def test_stall_ends_with_the_server(folder):
    """A server stops although a client waits in a stall."""
    began = time.monotonic()
    with servers.faulty(folder, [Fault(stall=60)]) as server, connected(server) as connection:
        connection.request("GET", "/a.tar")
    with servers.faulty(folder, [Fault(stall=60)]) as server:
        client = socket.create_connection((server.host, server.port))
        client.sendall(b"GET /a.tar HTTP/1.1\r\n\r\n")
        servers._poll(server._in_progress, 5, lambda: "the request did not come")
    with client:
        assert client.recv(1) == b""
    assert time.monotonic() - began < 30  # of 60


def test_length_too_long(faulted):
    """Content-Length promises more than comes."""
    answer, request = faulted(Fault(length_error=5))
    assert (answer.headers["Content-Length"], answer.body) == ("105", DATA[100:200])
    assert isinstance(answer.error, http.client.IncompleteRead)
    assert request.body_bytes == 100


def test_length_too_short(folder):
    """Content-Length promises less than comes: the rest spoils the next answer on the
    connection.
    """
    with (
        servers.faulty(folder, [Fault(length_error=-5)]) as server,
        connected(server) as connection,
    ):
        assert ask(server.url("a.tar"), "100-199", connection=connection).body == DATA[100:195]
        assert server.requests()[0].body_bytes == 100
    with (
        servers.faulty(folder, [Fault(length_error=-5)]) as server,
        socket.create_connection((server.host, server.port)) as client,
    ):
        client.sendall(
            b"GET /a.tar HTTP/1.1\r\nRange: bytes=100-199\r\n\r\n"
            b"GET /a.tar HTTP/1.0\r\nRange: bytes=0-9\r\n\r\n"
        )
        received = b"".join(iter(functools.partial(client.recv, 65536), b""))
        assert DATA[100:200] + b"HTTP/1.1 206" in received


@pytest.mark.parametrize(
    "claim", ["bytes 0-99/300000", "bytes {start}-{last}/999", "bytes {start}-{last}/*", "nonsense"]
)
def test_content_range_lies(faulted, claim):
    """Right bytes come under a wrong Content-Range."""
    answer, _ = faulted(Fault(headers={"Content-Range": claim}))
    assert answer.headers["Content-Range"] == claim.format(start=100, last=199)
    assert (answer.status, answer.body) == (206, DATA[100:200])


def test_ignored_range_counts_what_was_taken(folder, tmp_path):
    """A server that ignores Range counts about what a client took before it left, not what the
    server had ready.
    """
    size = 64 << 20
    with (tmp_path / "big").open("wb") as file:
        file.truncate(size)
    with servers.faulty(tmp_path, [Fault(ignore_range=True)] * 2) as server:
        answer = ask(server.url("big"), "100-199")
        assert (answer.status, len(answer.body), answer.headers["Content-Range"]) == (
            200,
            size,
            None,
        )
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            client.connect((server.host, server.port))
            client.sendall(b"GET /big HTTP/1.1\r\nRange: bytes=0-9\r\n\r\n")
            assert client.recv(1000, socket.MSG_WAITALL)[:15] == b"HTTP/1.1 200 OK"
        whole, left = server.requests()
        assert (whole.body_bytes, whole.range) == (size, (100, 200))
        assert 500 < left.body_bytes < 300_000


@pytest.mark.parametrize(
    ("fault", "start", "stop"),
    [(Fault(more=20), 100, 220), (Fault(more=-20), 100, 180), (Fault(shift=7), 107, 207)],
)
def test_other_bytes_than_asked(faulted, fault, start, stop):
    """More, fewer or other bytes come with 206, honestly or under a Content-Range that says what
    was asked.
    """
    answer, request = faulted(fault)
    assert (answer.status, answer.body, answer.error) == (206, DATA[start:stop], None)
    assert answer.headers["Content-Range"] == f"bytes {start}-{stop - 1}/300000"
    lie, _ = faulted(servers.dataclasses.replace(fault, headers=AS_ASKED))
    assert (lie.body, lie.headers["Content-Range"]) == (DATA[start:stop], "bytes 100-199/300000")
    assert request.body_bytes == stop - start


def test_more_than_the_file_has(faulted):
    """What is sent beyond the end of the file is zeros."""
    answer, _ = faulted(Fault(more=5, headers=AS_ASKED), "299990-299999")
    assert answer.body == DATA[-10:] + bytes(5)


@pytest.mark.parametrize("place", [0, 50, -1])
def test_flip(faulted, place):
    """One byte of the body is inverted, and nothing tells."""
    answer, _ = faulted(Fault(flip=place))
    expected = bytearray(DATA[100:200])
    expected[place] ^= 0xFF
    assert (answer.status, answer.body, answer.error) == (206, bytes(expected), None)


def test_file_replaced_between_requests(tmp_path):
    """A policy may replace the file: ETag changes, If-Match refuses; or only claim another ETag."""
    (tmp_path / "f").write_bytes(b"old")

    def policy(ask):
        if ask.number == 1:
            (tmp_path / "new").write_bytes(b"new")
            (tmp_path / "new").replace(tmp_path / "f")
        return Fault(headers={"ETag": '"other"'}) if ask.number == 3 else None

    with servers.faulty(tmp_path, policy) as server:
        first, second = ask(server.url("f")), ask(server.url("f"))
        assert (first.body, second.body) == (b"old", b"new")
        assert first.headers["ETag"] != second.headers["ETag"]
        assert ask(server.url("f"), **{"If-Match": first.headers["ETag"]}).status == 412
        claimed = ask(server.url("f"))
        assert (claimed.headers.get_all("ETag"), claimed.body) == (['"other"'], b"new")


def test_lists_are_for_gets_and_policies_for_all(folder):
    """A list is used up by GETs; a function sees method, path, range, number and attempt of every
    request.
    """
    with servers.faulty(folder, [Fault(status=500)]) as server:
        assert [ask(server.url("a.tar"), method=m).status for m in ("HEAD", "GET", "GET")] == [
            200,
            500,
            200,
        ]
    seen = []
    with servers.faulty(folder, seen.append) as server:
        for byte_range in ("0-9", "0-9", "5-9"):
            ask(server.url("sub dir/b.txt"), byte_range)
    assert seen == [
        servers.Ask(number, attempt, "GET", "/sub dir/b.txt", "", asked)
        for number, attempt, asked in [(0, 0, (0, 10)), (1, 1, (0, 10)), (2, 0, (5, 10))]
    ]


def test_seeded_faults_do_not_depend_on_order(folder):
    """A seeded policy fails the same requests in whatever order and threads they come."""
    ranges = [f"{start}-{start + 9}" for start in range(0, 400, 10)]

    def failed(ranges, seed, threads):
        with servers.faulty(
            folder, servers.seeded(seed, [Fault(status=500), Fault(status=503)])
        ) as server:
            with concurrent.futures.ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda byte_range: ask(server.url("a.tar"), byte_range), ranges))
            return {(r.range, r.status) for r in server.requests() if r.status != 206}

    first = failed(ranges, 1, 1)
    assert 3 < len(first) < 25
    assert failed(ranges[::-1], 1, 4) == first
    assert failed(ranges, 2, 1) != first


def test_errors_of_a_policy_are_not_hidden(folder):
    """A policy that fails makes the block fail, with its error."""
    with (
        pytest.raises(RuntimeError, match="ZeroDivisionError"),
        servers.faulty(folder, lambda _: 1 / 0) as server,
    ):
        assert isinstance(ask(server.url("a.tar")).error, http.client.RemoteDisconnected)
        assert [r.status for r in server.requests()] == [0]
    with (
        pytest.raises(RuntimeError, match="stay in the file"),
        servers.faulty(folder, [Fault(shift=1 << 20)]) as server,
    ):
        ask(server.url("a.tar"), "0-9")


def test_several_ranges_are_refused():
    """No request is logged as what it was not."""
    with pytest.raises(ValueError, match="expected one range"):
        servers.parse_range("bytes=0-1,5-6")


# a slow link


@pytest.mark.parametrize("start", [servers.nginx, servers.faulty])
def test_link_limits_the_rate(folder, tmp_path, start):
    """A server behind a link sends at the link's rate, less what headers cost, to all clients
    together.
    """
    (tmp_path / "f").write_bytes(DATA * 7)
    with servers.limited_link(5_000_000) as link, start(tmp_path, link=link) as server:
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            bodies = list(
                pool.map(
                    lambda byte_range: ask(server.url("f"), byte_range).body,
                    ["0-999999", "1000000-"],
                )
            )
        seconds = time.monotonic() - began
        assert b"".join(bodies) == DATA * 7
        assert 0.3 * 5e6 < len(DATA) * 7 / seconds < 1.1 * 5e6
        assert sum(r.body_bytes for r in server.requests()) == len(DATA) * 7


def test_link_runs_commands():
    """A command can run at the far end of a link, and listen there."""
    with servers.limited_link(1_000_000) as link:
        addresses = subprocess.run(
            link.command("ip", "-4", "addr"), capture_output=True, text=True, check=True
        ).stdout
        assert f"inet {link.host}/30" in addresses
        with link.listen() as far:
            with socket.create_connection(far.getsockname()):
                assert select.select([far], [], [], 5)[0]
    assert not os.path.exists(f"/run/netns/{link.namespace}")


def test_links_side_by_side():
    """Links made at the same time do not share names or addresses."""

    def use(_):
        with (
            servers.limited_link(1_000_000) as link,
            link.listen() as far,
            socket.create_connection(far.getsockname()),
        ):
            return True

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert all(pool.map(use, range(3)))
