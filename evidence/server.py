"""Files by HTTP over a slow link, as in section 6.6 of the VLDB paper: one token bucket for all
connections, and a count of bytes.

It also answers as S3 does to a reader: paths are BUCKET/KEY, with ETag, HEAD and ranges.
"""

import contextlib
import http.server
import os
import threading
import time
import urllib.parse
from xml.sax.saxutils import escape

from servers import Answer, folder_origin

CHUNK = 1 << 16


class Link:
    """What passes: ``rate`` bytes a second in all, at most a tenth of a second at once.

    The rate may change at any time.
    """

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
        time.sleep(max(pause, 0))


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        path, _, query = self.path.partition("?")
        if "list-type" in query:
            prefix = dict(urllib.parse.parse_qsl(query)).get("prefix", "")
            answer = Answer(200, {}, listing(self.server.folder, prefix))
        else:
            origin = folder_origin(self.server.folder)
            answer = origin(self.command, path.removeprefix("/bucket"), self.headers, b"")
        self.send_response(answer.status)
        length = {"Content-Length": str(len(answer.body))}
        for name, value in (length | answer.headers).items():
            self.send_header(name, value)
        self.end_headers()
        for at in range(0, len(answer.body), CHUNK):
            part = answer.body[at : at + CHUNK]
            self.server.link.take(len(part))
            try:
                self.wfile.write(part)
            except OSError:
                self.close_connection = True
                return

    def do_HEAD(self):
        self.do_GET()

    def log_message(self, *_):
        pass


def listing(top, prefix):
    """What S3 says of the keys that begin with a prefix."""
    folder = os.path.join(top, prefix)
    found = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    keys = "".join(
        f"<Contents><Key>{escape(os.path.join(prefix, name))}</Key>"
        f"<Size>{os.path.getsize(os.path.join(folder, name))}</Size></Contents>"
        for name in found
    )
    return (
        f"<ListBucketResult><Name>bucket</Name><KeyCount>{len(found)}</KeyCount>"
        f"<IsTruncated>false</IsTruncated>{keys}</ListBucketResult>"
    ).encode()


@contextlib.contextmanager
def serve(folder, rate):
    """(URL, link) of a server of a folder."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.folder, server.link = folder, Link(rate)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", server.link
        server.shutdown()
