"""Read and write a store's files independently, following docs/checkpoints-format.md."""

import hashlib
import pathlib
import struct

import msgpack

from pcrshard.checksum import crc32c

VERSION = b"\x89PCD\r\n\x1a\n"
MANIFEST = b"\x89PCM\r\n\x1a\n"


def frame(magic, header):
    """Return a frame with a valid checksum; the header may be raw bytes."""
    body = header if isinstance(header, bytes) else msgpack.packb(header)
    rest = struct.pack("<IQ", 2, len(body)) + body
    return magic + struct.pack("<I", crc32c(rest)) + rest


def unframe(data):
    """Return the header of a frame and the bytes after it."""
    stop = 24 + struct.unpack_from("<Q", data, 16)[0]
    return msgpack.unpackb(data[24:stop].lstrip(b"\0"), strict_map_key=False), data[stop:]


def manifest_path(folder):
    return max(pathlib.Path(folder).glob("manifest-*.pcm"))


def rewrite_manifest(folder, change):
    """Change the newest manifest by a function of its map."""
    path = manifest_path(folder)
    header, _ = unframe(path.read_bytes())
    change(header)
    path.write_bytes(frame(MANIFEST, header))


def rewrite_version(folder, change, *, keep_id=False):
    """Change the header of the newest version, and update its id and its record to match."""
    manifest, _ = unframe(manifest_path(folder).read_bytes())
    path = pathlib.Path(folder) / manifest["versions"][-1]["file"]
    header, payload = unframe(path.read_bytes())
    header = change(header) or header
    if isinstance(header, dict) and not keep_id:
        try:
            rows = [[entry[0], entry[6]] for entry in header["tensors"]]
            content = msgpack.packb([header["tree"], rows])
            header["id"] = hashlib.sha256(content).digest()
        except (KeyError, TypeError, IndexError):
            pass  # what is broken has no id
    data = frame(VERSION, header)
    path.write_bytes(data + payload)

    def refer(raw):
        raw["versions"][-1] |= {"header_bytes": len(data) - 24, "file_bytes": len(data + payload)}
        if isinstance(header, dict) and type(header.get("id")) is bytes:
            raw["versions"][-1]["id"] = header["id"]

    rewrite_manifest(folder, refer)
