"""Files by HTTP over a slow link: one token bucket for all connections, and a count of bytes.

It also answers as S3 does to a reader: paths are BUCKET/KEY, with ETag, HEAD and ranges.
"""

import http.server
import os
import re
import socketserver
import threading
import time
import urllib.parse
from email.utils import formatdate
from xml.sax.saxutils import escape

CHUNK = 1 << 16


class Link:
    """What passes: ``rate`` bytes a second in all, at most a tenth of a second at once."""

    def __init__(self, rate):
        self.rate = rate
        self.bytes = 0
        self.free_at = time.monotonic()
        self.lock = threading.Lock()

    def take(self, count):
        with self.lock:
            self.bytes += count
            now = time.monotonic()
            self.free_at = max(self.free_at, now - 0.1) + count / self.rate
            pause = self.free_at - now
        if pause > 0:
            time.sleep(pause)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body):
        url = urllib.parse.urlsplit(self.path)
        name = urllib.parse.unquote(url.path).lstrip("/").removeprefix("bucket/")
        path = os.path.join(self.server.folder, name)
        if "list-type" in url.query:
            self.list(urllib.parse.parse_qs(url.query))
            return
        if not os.path.isfile(path):
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        size = os.path.getsize(path)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        stop = min(int(asked[2] or size - 1) + 1, size) if asked else size
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{size:x}"')
        self.send_header("Last-Modified", formatdate(os.path.getmtime(path), usegmt=True))
        self.end_headers()
        if with_body:
            with open(path, "rb") as file:
                self.send(file, start, stop)

    def list(self, query):
        """What S3 says of the keys that begin with a prefix."""
        prefix = query.get("prefix", [""])[0]
        folder = os.path.join(self.server.folder, prefix)
        found = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        keys = "".join(
            f"<Contents><Key>{escape(os.path.join(prefix, name))}</Key>"
            f"<Size>{os.path.getsize(os.path.join(folder, name))}</Size></Contents>"
            for name in found
        )
        body = (
            f"<ListBucketResult><Name>bucket</Name><KeyCount>{len(found)}</KeyCount>"
            f"<IsTruncated>false</IsTruncated>{keys}</ListBucketResult>"
        ).encode()
        self.tell(body, "application/xml")

    def tell(self, body, kind="text/plain"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send(self, file, start, stop):
        file.seek(start)
        while start < stop:
            part = file.read(min(CHUNK, stop - start))
            self.server.link.take(len(part))
            try:
                self.wfile.write(part)
            except OSError:
                self.close_connection = True
                return
            start += len(part)

    def log_message(self, *_):
        pass


class SlowServer(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True

    def __init__(self, folder, rate):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.link = Link(rate)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"
