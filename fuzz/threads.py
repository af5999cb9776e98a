"""Four threads that call the native code at once on the same inputs; see threads.sh.

``python threads.py [--race] FILE...``: decodes the JPEGs as batches, by both backends and by pools
of threads, of which one is shared, transcodes them, finds, compares and joins them in one buffer,
and quantizes; every thread must get the same. With ``--race`` all decode into the same memory,
which a sanitizer must find.
"""

import concurrent.futures
import hashlib
import pathlib
import sys
import threading
import time

import numpy as np

from pcrshard import native
from pcrshard.checksum import crc32c
from pcrshard.errors import PCRError
from pcrshard.format.scan_script import STANDARD, scans_for
from pcrshard.jpeg.markers import map_jpeg
from pcrshard.native import fused_quantizer
from pcrshard.native.pieces import find_damaged, join, piece_table, place_pieces
from pcrshard.native.pool import Pool

THREADS = 4
SIDE = 64
_start = threading.Barrier(THREADS)


def race(table, out):
    """Decode into the same memory as other threads, which a sanitizer must find."""
    with Pool(0) as pool:
        pool.decode(table, [out]).wait()


def decode(table, shared):
    """Pixels of all images, several times, by a pool of this thread's, by one of all, and by the
    plain C code; one pool is closed while it decodes.
    """
    outs = np.zeros((6, len(table), SIDE, SIDE, 3), np.uint8)
    with Pool(2) as own, Pool(0, "portable") as plain:
        batches = [
            pool.decode(table, [out])
            for pool, out in zip((own, shared, plain) * 2, outs, strict=True)
        ]
        decoded = [batch.wait() for batch in reversed(batches)]
    left = Pool(2)
    left.decode(table, [np.zeros(outs[0].shape, np.uint8)])
    left.close()
    assert all(np.array_equal(decoded[0], each) for each in decoded)
    assert all(np.array_equal(outs[0][decoded[0]], out[decoded[0]]) for out in outs)
    return hashlib.sha256(outs[0][decoded[0]].tobytes()).hexdigest()


def rescan(images):
    """The progressive files of all images, or why there is none."""
    digest = hashlib.sha256()
    for image in images:
        try:
            source = map_jpeg(image)
            scans = scans_for(STANDARD, source.color, len(source.frame.components))
            digest.update(native.rescan(image, scans).jpeg)
        except (PCRError, ValueError) as error:
            digest.update(str(error).encode())
    return digest.hexdigest()


def take_apart(images):
    """All images found in one buffer, compared with their checksums, and joined."""
    sizes = np.array([[len(image) for image in images]], np.uint32)
    crcs = np.array([crc32c(image) for image in images], np.uint32)
    data = np.frombuffer(b"".join(images), np.uint8)
    nothing = np.zeros(0, np.uint64)
    table = place_pieces(sizes, np.zeros(sizes.shape, np.uint16), [0], 0, nothing, b"", data)
    assert find_damaged(table, crcs) == []
    return hashlib.sha256(join(table)).hexdigest()


def quantize(_):
    values = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    codes = np.empty(values.shape, np.int8)
    fused_quantizer.quantize(values.ctypes.data, values.size, "float32", 0.01, codes.ctypes.data)
    return hashlib.sha256(codes.tobytes()).hexdigest()


def together(function, *arguments):
    """The result of a function that four threads call at the same time."""

    def call():
        _start.wait()
        return function(*arguments)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        results = [future.result() for future in [pool.submit(call) for _ in range(THREADS)]]
    assert len(set(results)) == 1, f"{function.__name__}: threads got different results"


def main(arguments):
    names = [name for name in arguments if name != "--race"]
    images = [pathlib.Path(name).read_bytes() for name in names]
    begin = time.monotonic()
    table = piece_table([[image] for image in images])
    if "--race" in arguments:
        together(race, table, np.zeros((len(images), SIDE, SIDE, 3), np.uint8))
        return 0
    for function in (rescan, quantize, take_apart):
        together(function, images)
    with Pool(3) as shared:
        together(decode, table, shared)
    seconds = time.monotonic() - begin
    print(f"{len(images)} files by {THREADS} threads: no race in {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
