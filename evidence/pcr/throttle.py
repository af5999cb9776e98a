"""Local files at a bandwidth that all processes share, as in section 6.6 of the VLDB paper."""

import fcntl
import os
import struct
import time

from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from pcrshard import storage

_LEVEL = struct.Struct("<dd")


def set_rate(state, rate):
    """Let the readers of a token bucket have this many bytes per second from now on."""
    with storage.atomic_write(state + ".rate", durable=False) as file:
        file.write(str(rate).encode())


def take(state, count, burst):
    """Take a token for each byte from a bucket, and sleep until they are there.

    ``state`` is the bucket's file, which all processes share; ``burst`` bytes pass at once after a
    pause.
    """
    with open(state + ".rate") as file:
        rate = float(file.read())
    handle = os.open(state, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        now = time.monotonic()
        raw = os.pread(handle, _LEVEL.size, 0)
        level, then = _LEVEL.unpack(raw) if raw else (burst, now)
        # The level may fall below zero: a reader that takes more than there is waits, and so does
        # the next one.
        level = min(burst, level + (now - then) * rate) - count
        os.pwrite(handle, _LEVEL.pack(level, now), 0)
    finally:
        os.close(handle)
    time.sleep(max(0.0, -level / rate))


class ThrottledFS(LocalFileSystem):
    """Local files under ``throttled://``, read as fast as a bucket allows, chunk by chunk."""

    protocol = "throttled"
    _open = AbstractFileSystem._open  # which reads with cat_file

    def __init__(self, state, burst, chunk_bytes=1 << 18, **kwargs):
        super().__init__(**kwargs)
        self.state, self.burst, self.chunk_bytes = state, burst, chunk_bytes

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("throttled://"))

    def cat_file(self, path, start=None, end=None, **kwargs):
        begin, stop = start or 0, self.size(path) if end is None else end
        parts = []
        with open(self._strip_protocol(path), "rb") as file:
            file.seek(begin)
            for first in range(begin, stop, self.chunk_bytes):
                parts.append(file.read(min(self.chunk_bytes, stop - first)))
                take(self.state, len(parts[-1]), self.burst)
        return b"".join(parts)
