"""Real servers on loopback, as context managers: nginx, S3 (moto), a server that fails on purpose.

Each picks its own port, logs every request, and is gone when the ``with`` block ends, also when
that fails or the process is killed::

    with servers.nginx(folder) as server:
        fsspec.filesystem("http").cat_file(server.url("a.tar"), 0, 1000)
        assert server.requests() == [servers.Request("GET", "/a.tar", (0, 1000), 206, 1000, ...)]

``Unavailable`` is a skip under pytest and an ordinary error elsewhere.
"""

import abc
import concurrent.futures
import contextlib
import copy
import ctypes
import dataclasses
import email.message
import email.utils
import http.client
import http.server
import importlib.util
import json
import os
import pathlib
import re
import select
import shutil
import socket
import socketserver
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.parse
import uuid
from collections import Counter

SECONDS = 20.0  # until something that should happen at once is called a failure


class Unavailable(unittest.SkipTest):
    """A server cannot run on this machine; the message says what to install."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One request that has ended, as the server saw it.

    Attributes:
        method: ``GET``, ``HEAD``...
        path: The decoded path, without the query.
        range: What the client asked for, half-open: ``(0, 10)``, ``(10, None)`` to the end, ``(-10,
        None)`` the last ten; ``None`` without Range.
        status: The answer's status; 0 where the connection ended without one.
        body_bytes: Bytes of the body that the server handed to its socket (a client that leaves may
        have taken fewer).
        query: What followed ``?``.
    """

    method: str
    path: str
    range: tuple[int, int | None] | None
    status: int
    body_bytes: int
    query: str = ""


def parse_range(header):
    """A Range header as ``Request.range``; nonsense and several ranges are no range.

    >>> parse_range("bytes=2-3"), parse_range("bytes=2-"), parse_range("bytes=-2"),
    parse_range("lines=1-2")
    ((2, 4), (2, None), (-2, None), None)
    """
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if found is None or not any(found.groups()):
        return None
    first, last = found.groups()
    if not first:
        return (-int(last), None)
    return (int(first), int(last) + 1 if last else None)


def _poll(check, seconds, failure):
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            raise TimeoutError(failure())
        time.sleep(0.005)


class Server(abc.ABC):
    """What the servers have in common: URLs, and a log that is complete when it is read."""

    def __init__(self, host, port):
        self.host, self.port = host, port
        self._forgotten = 0

    def url(self, name=""):
        """The URL of a file, or of the folder."""
        return f"http://{self.host}:{self.port}/{urllib.parse.quote(name)}"

    def requests(self):
        """All requests since ``reset``, in the order in which they ended; waits until none is in
        progress.
        """
        self.settle()
        return self._ended()[self._forgotten :]

    def settle(self, seconds=SECONDS):
        """Wait until no request is in progress.

        Raises:
            TimeoutError: Some client is still being served.
        """
        _poll(
            lambda: self._in_progress() <= 0,
            seconds,
            lambda: f"{self._in_progress()} requests still in progress",
        )

    def reset(self):
        """Forget the requests so far."""
        self.settle()
        self._forgotten = len(self._ended())

    @abc.abstractmethod
    def _ended(self): ...

    @abc.abstractmethod
    def _in_progress(self): ...


@dataclasses.dataclass(frozen=True)
class Link:
    """A network namespace: pass it to a server as ``link=`` to have it listen there."""

    host: str
    namespace: str

    def command(self, *command):
        """A command that runs at the far end."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def listen(self):
        """A listening socket at the far end; a namespace belongs to a thread, so a short one makes
        it.
        """

        def enter_and_listen():
            with open(f"/run/netns/{self.namespace}") as namespace:
                if libc.setns(namespace.fileno(), 0x40000000):  # CLONE_NEWNET
                    raise OSError(
                        ctypes.get_errno(), f"cannot enter network namespace {self.namespace}"
                    )
            return socket.create_server((self.host, 0), backlog=511)

        libc = ctypes.CDLL(None, use_errno=True)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            return thread.submit(enter_and_listen).result()


def _listen(link=None):
    """A socket that already listens and is handed to the server: no other process can take the port
    in between.
    """
    return link.listen() if link else socket.create_server(("127.0.0.1", 0), backlog=511)


def _answers(host, port):
    with contextlib.suppress(OSError, http.client.HTTPException):
        return bool(_ask(host, port, "GET", "/.status")[0])
    return False


def _ask(host, port, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection(host, port, timeout=SECONDS)
    with contextlib.closing(connection):
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read()


# ---------------------------------------------------------------- nginx

# Paths are relative to the prefix folder, which has everything that nginx touches; the served
# folder is a link there.
_NGINX = """
daemon off; worker_processes 1; {user} pid pid; error_log error.log warn;
events {{ worker_connections 1024; }}
http {{
  client_body_temp_path temp; proxy_temp_path temp; fastcgi_temp_path temp;
  uwsgi_temp_path temp; scgi_temp_path temp;
  log_format exact escape=json
    '{{"method":"$request_method","path":"$uri","query":"$args","range":"$http_range",'
    '"status":$status,"body_bytes":$body_bytes_sent}}';
  access_log access.log exact;
  default_type application/octet-stream; sendfile on; {options}
  server {{
    listen {host}:{port}; root served; autoindex on;
    location = /.status {{ stub_status; access_log off; }}
  }}
}}
"""


class Nginx(Server):
    """A running nginx."""

    def __init__(self, host, port, log):
        super().__init__(host, port)
        self._log, self._lock, self._own_requests = log, threading.Lock(), 0

    def _ended(self):
        whole_lines, _, _ = self._log.read_bytes().rpartition(b"\n")
        found = []
        for line in map(json.loads, whole_lines.splitlines()):
            line["range"] = parse_range(line["range"])
            found.append(Request(**line))
        return found

    def _in_progress(self):
        """nginx counts a request when it begins and logs it when it ends."""
        with self._lock:
            _, status = _ask(self.host, self.port, "GET", "/.status")
            self._own_requests += 1
            found = re.search(rb"requests\s+\d+ \d+ (\d+)", status)
            assert found, status
            return int(found[1]) - self._own_requests - len(self._ended())


@contextlib.contextmanager
def nginx(folder, *, limit_rate=None, link=None):
    """Serve a folder by nginx.

    Args:
        folder: What to serve.
        limit_rate: Bytes per second and request. nginx counts whole seconds: the first
        ``limit_rate`` bytes of each request come at once.
        link: Listen at the far end of this link.
    """
    program = shutil.which(
        "nginx", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"
    )
    if program is None:
        raise Unavailable("NGINX IS NOT INSTALLED: apt-get install nginx-light")
    user = (
        "" if os.geteuid() else "user root root;"
    )  # or its worker could not enter a private folder
    options = f"limit_rate {limit_rate};" if limit_rate else ""
    with (
        tempfile.TemporaryDirectory(prefix="pcrshard-nginx-") as prefix,
        _listen(link) as listening,
    ):
        own, (host, port) = pathlib.Path(prefix), listening.getsockname()
        (own / "served").symlink_to(pathlib.Path(folder).resolve(strict=True))
        (own / "nginx.conf").write_text(
            _NGINX.format(user=user, options=options, host=host, port=port)
        )
        command = [program, "-p", f"{prefix}/", "-c", f"{prefix}/nginx.conf"]
        if setpriv := shutil.which("setpriv"):  # it dies with this process
            command = [setpriv, "--pdeathsig", "TERM", "--", *command]
        # nginx takes the descriptors of listening sockets from this variable (its way to upgrade
        # itself).
        environment = {"NGINX": f"{listening.fileno()};"}
        with subprocess.Popen(
            command, pass_fds=[listening.fileno()], env=environment, stderr=subprocess.DEVNULL
        ) as process:
            try:
                server = Nginx(host, port, own / "access.log")
                _poll(
                    lambda: _answers(host, port),
                    SECONDS,
                    lambda: f"nginx does not answer: {(own / 'error.log').read_text()}",
                )
                listening.close()
                waited_for_it = server._in_progress()
                server._own_requests += waited_for_it
                yield server
            finally:
                process.terminate()


# ---------------------------------------------------------------- faults


@dataclasses.dataclass(frozen=True)
class Fault:
    """How one answer differs from a correct one; the parts can be combined, and ``Fault()`` is
    correct.

    Attributes:
        drop: End the connection without an answer.
        reset: Where the connection ends (``drop``, ``cut_after``), end it by RST instead of FIN.
        stall: Wait this number of seconds, or until the client disconnects...
        stall_after: ...after this number of body bytes; ``None``: before the status line.
        cut_after: End the connection after this number of body bytes.
        status: From 300 on, the whole answer, with ``body``; below, another status for the file.
        body: The body of that answer.
        headers: Headers to set, or with ``None`` to leave out.
        length_error: Number of bytes by which Content-Length exceeds the body (negative: fewer).
        ignore_range: 200 and the whole file.
        shift: Send bytes from this much later in the file, with a Content-Range that says so...
        as_asked: ...or with one that lies.
        more: Number of bytes to send beyond the request (negative: fewer), zeros past the end of
        the file; Content-Range as for ``shift``.
        flip: Invert the body's byte at this place (-1: the last).
    """

    drop: bool = False
    reset: bool = False
    stall: float = 0.0
    stall_after: int | None = None
    cut_after: int | None = None
    status: int | None = None
    body: bytes = b""
    headers: dict[str, str | None] = dataclasses.field(default_factory=dict)
    length_error: int = 0
    ignore_range: bool = False
    shift: int = 0
    as_asked: bool = False
    more: int = 0
    flip: int | None = None


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request as a fault policy sees it: ``number`` counts all from 0, ``attempt`` earlier ones
    for the same bytes.
    """

    number: int
    attempt: int
    method: str
    path: str
    query: str
    range: tuple[int, int | None] | None


def _listed(faults):
    left = iter(faults)
    return lambda ask: next(left, None) if ask.method == "GET" else None


@dataclasses.dataclass
class Answer:
    status: int
    headers: dict[str, str | None]
    body: bytes = b""


def folder_origin(folder):
    """An origin, which gives a correct answer to (method, target as sent, headers, body): here the
    files of a folder.
    """
    root = pathlib.Path(folder).resolve(strict=True)

    def answer(method, target, headers, _):
        if method not in {"GET", "HEAD"}:
            return Answer(405, {"Allow": "GET, HEAD"})
        path = (root / urllib.parse.unquote(target.partition("?")[0]).lstrip("/")).resolve()
        if not path.is_relative_to(root) or not path.is_file():
            return Answer(404, {})
        with path.open("rb") as file:
            return _answer_file(file, method, headers)

    return answer


def _answer_file(file, method, headers):
    stat = os.fstat(file.fileno())
    common = {
        "ETag": f'"{stat.st_ino:x}-{stat.st_mtime_ns:x}-{stat.st_size:x}"',
        "Last-Modified": email.utils.formatdate(stat.st_mtime, usegmt=True),
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
    }
    asked = parse_range(headers.get("Range")) if method == "GET" else None
    if asked is None:
        return Answer(
            200,
            {**common, "Content-Length": str(stat.st_size)},
            b"" if method == "HEAD" else file.read(),
        )
    start, stop, size = (
        max(asked[0] + stat.st_size, 0) if asked[0] < 0 else asked[0],
        asked[1],
        stat.st_size,
    )
    stop = size if stop is None else min(stop, size)
    if start >= stop:
        return Answer(416, {**common, "Content-Range": f"bytes */{size}"})
    file.seek(start)
    return Answer(
        206,
        {**common, "Content-Range": f"bytes {start}-{stop - 1}/{size}"},
        file.read(stop - start),
    )


def _titled(headers):
    """With names of one spelling, so that each is there once."""
    return {name.title(): value for name, value in headers.items()}


def _with_range(headers, byte_range):
    changed = copy.copy(headers)
    del changed["Range"]
    if byte_range is not None:
        changed["Range"] = byte_range
    return changed


_OF_THE_CONNECTION = {"connection", "transfer-encoding", "keep-alive", "date", "server"}


def _proxy_origin(upstream):
    host = urllib.parse.urlsplit(upstream).netloc

    def answer(method, target, headers, body):
        connection = http.client.HTTPConnection(host, timeout=SECONDS)
        with contextlib.closing(connection):
            connection.request(
                method,
                target,
                body or None,
                {k: v for k, v in headers.items() if k.lower() not in {"connection", "expect"}},
            )
            reply = connection.getresponse()
            kept = {
                name: value
                for name, value in reply.getheaders()
                if name.lower() not in _OF_THE_CONNECTION
            }
            return Answer(reply.status, _titled(kept), reply.read())

    return answer


def _faulty_answer(origin, fault, ask, target, headers, body):
    """The answer with all that a fault changes in its content."""
    if fault.status is not None and fault.status >= 300:
        answer = Answer(fault.status, {}, fault.body)
    elif fault.ignore_range:
        answer = origin(ask.method, target, _with_range(headers, None), body)
    elif fault.shift or fault.more:
        answer = _moved(origin, fault, ask, target, headers)
    else:
        answer = origin(ask.method, target, headers, body)
    answer.status = fault.status or answer.status
    if fault.flip is not None:
        changed = bytearray(answer.body)
        changed[fault.flip] ^= 0xFF
        answer.body = bytes(changed)
    return answer


def _moved(origin, fault, ask, target, headers):
    assert ask.range
    start, stop = ask.range
    assert stop
    first, end = start + fault.shift, stop + fault.shift + fault.more
    answer = origin(ask.method, target, _with_range(headers, f"bytes={first}-{end - 1}"), b"")
    answer.body = answer.body.ljust(end - first, b"\0")
    if not fault.as_asked:
        start, stop = first, end
    total = str(answer.headers["Content-Range"]).rpartition("/")[2]
    answer.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{total}"
    return answer


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection of a fault server."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Quiet."""

    def _respond(self):
        owner = self.server.owner
        self.status = self.body_bytes = 0
        ask = owner._begin(self.command, self.path, self.headers.get("Range"))
        try:
            if "Transfer-Encoding" in self.headers:
                raise ValueError("the fault server takes no chunked uploads")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._play(owner.policy(ask) or Fault(), ask, body)
        finally:
            owner._end(
                Request(ask.method, ask.path, ask.range, self.status, self.body_bytes, ask.query)
            )

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_OPTIONS = _respond

    def _play(self, fault, ask, body):
        if fault.stall and fault.stall_after is None:
            self._stall(fault.stall)
        if not fault.drop:
            origin = self.server.owner._origin
            answer = _faulty_answer(origin, fault, ask, self.path, self.headers, body)
            self._send_head(answer, fault, ask.method)
            if ask.method != "HEAD":
                self._send_body(answer.body, fault)
        if fault.drop or fault.cut_after is not None:
            self.close_connection = True
            if fault.reset:
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.connection.close()  # before the server would send FIN

    def _send_head(self, answer, fault, method):
        if method != "HEAD" and answer.status not in {204, 304}:
            answer.headers["Content-Length"] = str(len(answer.body) + fault.length_error)
        headers = {**_titled(answer.headers), **_titled(fault.headers)}
        # A client that waits for more than there is must see the end; one that was promised less
        # finds the rest in its next answer.
        if fault.length_error > 0 or (
            "Content-Length" in headers and headers["Content-Length"] is None
        ):
            headers["Connection"] = "close"
        self.status = answer.status
        self.send_response(answer.status)
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()

    def _send_body(self, body, fault):
        body = body[: fault.cut_after]
        if fault.stall and fault.stall_after is not None and fault.stall_after <= len(body):
            self._write(body[: fault.stall_after])
            self._stall(fault.stall)
            body = body[fault.stall_after :]
        self._write(body)

    def _write(self, data):
        for start in range(0, len(data), 1 << 16):
            self.body_bytes += self.wfile.write(data[start : start + (1 << 16)])

    def _stall(self, seconds):
        """Wait so long for the other side to close."""
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        if poll.poll(seconds * 1000):
            raise ConnectionAbortedError("the client left")


class FaultServer(Server):
    """A running server with faults."""

    class _Sockets(socketserver.ThreadingTCPServer):
        daemon_threads = False  # so that server_close() waits for all of them

        def __init__(self, listening, owner):
            super().__init__(listening.getsockname(), _Handler, bind_and_activate=False)
            self.socket.close()
            self.socket, self.owner = listening, owner
            self._open = set()

        def get_request(self):
            connection, address = self.socket.accept()
            self._open.add(connection)
            return connection, address

        def shutdown_request(self, request):
            self._open.discard(request)
            super().shutdown_request(request)

        def handle_error(self, request, client_address):
            """Clients may leave as they like; any other error is the test's."""
            error = sys.exception()
            if isinstance(error, Exception) and not isinstance(error, ConnectionError):
                self.owner.errors.append(error)

        def close_all(self):
            self.shutdown()
            for connection in list(self._open):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self.server_close()

    def __init__(self, origin, faults):
        listening = _listen()
        super().__init__(*listening.getsockname())
        self.errors = []
        self._origin = origin
        self.policy = faults if callable(faults) else _listed(faults)
        self._lock = threading.Lock()
        self._log = []
        self._number = self._busy = 0
        self._attempts = Counter()
        self._sockets = self._Sockets(listening, self)
        self._thread = threading.Thread(target=self._sockets.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self):
        """End every connection and thread.

        Raises:
            RuntimeError: The fault policy or the server had an error of its own.
        """
        self._sockets.close_all()
        self._thread.join()
        if self.errors:
            raise RuntimeError(f"the fault server failed: {self.errors[0]!r}") from self.errors[0]

    def _begin(self, method, target, byte_range):
        path, _, query = target.partition("?")
        asked = parse_range(byte_range)
        with self._lock:
            number, attempt = self._number, self._attempts[method, target, byte_range or ""]
            self._number += 1
            self._busy += 1
            self._attempts[method, target, byte_range or ""] += 1
        return Ask(number, attempt, method, urllib.parse.unquote(path), query, asked)

    def _end(self, request):
        with self._lock:
            self._log.append(request)
            self._busy -= 1

    def _ended(self):
        with self._lock:
            return list(self._log)

    def _in_progress(self):
        with self._lock:
            return self._busy


@contextlib.contextmanager
def faulty(folder, faults=()):
    """Serve a folder correctly (HTTP/1.1, Range, ETag), except for these faults.

    Args:
        folder: What to serve.
        faults: A list, one for each GET in the order of arrival, correct afterwards; or a function
            that is asked at every request.
    """
    with contextlib.closing(FaultServer(folder_origin(folder), faults)) as server:
        yield server


@contextlib.contextmanager
def proxy(upstream, faults=()):
    """Pass on requests to another server, with these faults in its answers."""
    with contextlib.closing(FaultServer(_proxy_origin(upstream), faults)) as server:
        yield server


# ---------------------------------------------------------------- S3


class S3(FaultServer):
    """A running S3 server with one bucket."""

    def __init__(self, upstream):
        super().__init__(_proxy_origin(upstream), ())
        # fsspec keeps file systems and listings for the life of the process, and a port may come
        # back.
        self.bucket = f"bucket-{uuid.uuid4().hex[:12]}"
        self.prefix = "data"

    def url(self, name=""):
        """``s3://bucket/prefix/name``."""
        return f"s3://{self.bucket}/{self.prefix}/{name}"

    @property
    def storage_options(self):
        """What fsspec and s3fs need; nothing is read from ``~/.aws``, from AWS_* or from
        http_proxy.
        """
        nowhere = (None, None, os.devnull, None)
        return {
            "key": "test",
            "secret": "test",
            "client_kwargs": {"endpoint_url": super().url(), "region_name": "us-east-1"},
            "config_kwargs": {"proxies": {}},
            "session_vars": {
                "config_file": nowhere,
                "credentials_file": nowhere,
                "profile": (None, None, None, None),
            },
        }

    def put(self, name, data):
        """Upload an object, or with an empty name make the bucket."""
        public = {"x-amz-acl": "public-read"}  # so that clients which sign nothing can read
        path = urllib.parse.quote(f"/{self.bucket}{name}")
        status, text = _ask(self.host, self.port, "PUT", path, data, public)
        if status != 200:
            raise RuntimeError(f"cannot upload {name}: {status} {text!r}")


@contextlib.contextmanager
def s3(folder=None):
    """Run moto's S3 server, with the files of a folder in a bucket, behind a fault server.

    Args:
        folder: All files under it become ``url("their/path")``.
    """
    if not all(importlib.util.find_spec(name) for name in ("moto", "flask", "flask_cors")):
        raise Unavailable(
            "MOTO'S SERVER IS NOT INSTALLED: pip install -c constraints.txt 'moto[server]' s3fs"
        )
    # In its own process, because moto changes botocore where it is imported.
    command = [sys.executable, "-P", "-c", _MOTO]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            upstream = process.stdout.readline().decode().strip()
            with contextlib.closing(S3(upstream)) as server:
                server.put("", b"")
                for path in sorted(pathlib.Path(folder).rglob("*")) if folder else []:
                    if path.is_file():
                        name = path.relative_to(pathlib.Path(folder or "")).as_posix()
                        server.put(f"/{server.prefix}/{name}", path.read_bytes())
                server.reset()
                yield server
        finally:
            process.kill()


# It ends when its standard input does, also if this process is killed.
_MOTO = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("http://%s:%d" % server.get_host_and_port(), flush=True)
sys.stdin.read()
"""
