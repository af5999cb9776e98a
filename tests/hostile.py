"""Crafted inputs below 1 MB, each of which claims far more; run as a program.

``python hostile.py CASE ...`` prints what each case took, as JSON: MB above what the process had
when its imports were done, seconds of CPU, and the error.
"""

import contextlib
import json
import os
import pathlib
import resource
import struct
import sys
import tarfile
import tempfile
import time
import zlib
from functools import partial

import servers
from numbered import numbered, write
from support import write_shard

from pcrshard import (
    DatasetIndex,
    EncodeOptions,
    PCRDataset,
    PCRLoader,
    ShardFormat,
    encode,
    open_dataset,
)
from pcrshard.encoding.encode_jpeg import EncodedImage, encode_jpeg
from pcrshard.encoding.shard_writer import EncodedSample
from pcrshard.errors import PCRError
from pcrshard.format.dataset_index import ShardEntry
from pcrshard.format.group_table import MAX_HEADER_BYTES
from pcrshard.format.schema import Schema
from pcrshard.format.shard_head import Head
from pcrshard.jpeg.image_decoder import ImageDecoder
from pcrshard.jpeg.other_formats import to_jpeg
from pcrshard.jpeg.pixels import decode_image, make_baseline
from pcrshard.reading.shard import Shard
from pcrshard.testing import make_jpeg

MAX_BYTES = 1_000_000
EOI = b"\xff\xd9"
HUFFMAN = 0xC2
ARITHMETIC = 0xC9
ARITHMETIC_PROGRESSIVE = 0xCA
CASES = {}


def case(function):
    """Register a case: called with a folder, it feeds one crafted input to the library."""
    CASES[function.__name__] = function
    return function


def segment(code, body):
    return bytes([0xFF, code]) + struct.pack(">H", len(body) + 2) + body


def frame(code, height, width, components=1):
    """SOI, a quantization table, and a frame header."""
    table = segment(0xDB, bytes([0]) + bytes([1]) * 64)
    parts = b"".join(bytes([number, 0x11, 0]) for number in range(1, components + 1))
    return (
        b"\xff\xd8"
        + table
        + segment(code, struct.pack(">BHHB", 8, height, width, components) + parts)
    )


def scan(ss, se, al=0, components=1, ah=0):
    parts = b"".join(bytes([number, 0]) for number in range(1, components + 1))
    return segment(0xDA, bytes([components]) + parts + bytes([ss, se, ah << 4 | al]))


def huffman(table, symbol):
    """A table whose only code is 0, for one symbol."""
    return segment(0xC4, bytes([table, 1, *bytes(15), symbol]))


def arithmetic(height, width):
    return frame(ARITHMETIC, height, width) + scan(0, 63) + bytes(16) + EOI


def arithmetic_scans(side, count):
    """A DC scan and many AC scans of nothing."""
    first = frame(ARITHMETIC_PROGRESSIVE, side, side) + scan(0, 0, 1) + bytes(8)
    return first + b"".join(scan(1 + i % 63, 1 + i % 63) + bytes(4) for i in range(count)) + EOI


def flat(height, width, code=HUFFMAN, components=1):
    """Every block by the fewest bits."""
    blocks = -(-height // 8) * -(-width // 8) * components
    ends = 0 if code == HUFFMAN else 63
    bits = blocks if code == HUFFMAN else 2 * blocks
    tables = huffman(0, 0) + huffman(0x10, 0)
    data = bytes(bits // 8 + 1)
    return (
        frame(code, height, width, components) + tables + scan(0, ends, 0, components) + data + EOI
    )


def dense(side):
    """Every block has a coefficient besides DC, by two bits more."""
    blocks = (side // 8) ** 2
    first = flat(side, side)[: -len(EOI)]
    return first + huffman(0x10, 0x01) + scan(1, 1) + bytes(2 * blocks // 8 + 1) + EOI


def dense_baseline(side):
    """A sequential image of which every block has a coefficient besides DC, in five bits."""
    blocks = (side // 8) ** 2
    # DC 0 is "0", a coefficient of one bit is "0" and its sign, "10" ends the block.
    tables = huffman(0, 0) + segment(0xC4, bytes([0x10, 1, 1, *bytes(14), 0x01, 0x00]))
    data = int("00110" * 8, 2).to_bytes(5, "big") * (blocks // 8)
    return frame(0xC0, side, side) + tables + scan(0, 63) + data + EOI


def png(width, height):
    def chunk(name, body):
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    packer = zlib.compressobj(9)
    row = bytes(1 + width * 4)
    data = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def check_bytes(data):
    assert len(data) <= MAX_BYTES, len(data)


def _decode(jpeg):
    for cropped in (None, "random"):
        ImageDecoder(32, cropped)(jpeg, 0)
    decode_image(jpeg)


def _layered(picture):
    to_jpeg(picture, 90, None)


# How an image is used, how it is made, and its sides.
IMAGES = {
    "arithmetic_gigapixel": (_decode, arithmetic, 40_000, 40_000),
    "arithmetic_few_bytes": (_decode, arithmetic, 6000, 6000),
    "arithmetic_allowed": (_decode, arithmetic, 340, 340),
    "arithmetic_scans": (_decode, arithmetic_scans, 8000, 60_000),
    "arithmetic_few_scans": (_decode, arithmetic_scans, 6000, 110),
    "arithmetic_allowed_scans": (_decode, arithmetic_scans, 408, 7),
    "height_0": (_decode, arithmetic, 0, 100),
    "huffman_height_0": (_decode, flat, 0, 100),
    "flat_huge": (_decode, flat, 16_384, 16_384),
    "flat_allowed": (_decode, flat, 11_000, 11_000),
    "flat_color": (_decode, flat, 9000, 9000, HUFFMAN, 3),
    "flat_baseline": (_decode, flat, 13_000, 13_000, 0xC0),
    "dense": (_decode, dense, 12_800),
    "baseline_of_arithmetic": (make_baseline, arithmetic_scans, 16_000, 100),
    "encode_arithmetic": (encode_jpeg, arithmetic, 16_000, 16_000),
    "encode_flat": (encode_jpeg, flat, 15_600, 15_600, 0xC0),
    "encode_dense": (encode_jpeg, dense_baseline, 9984),
    "decode_dense": (_decode, dense_baseline, 9984),
    "png_huge": (_layered, png, 13_000, 13_000),
    "png_allowed": (_layered, png, 5700, 5700),
}


def use_image(name):
    use, make, *sides = IMAGES[name]
    image = make(*sides)
    check_bytes(image)
    use(image)


CASES |= {name: lambda _, name=name: use_image(name) for name in IMAGES}


def entries(count, samples):
    """Return a dataset index of ``count`` shards that each claim this number of samples."""
    shards = [ShardEntry(f"{i}.tar", samples, 7, (1 << 40,) * 3) for i in range(count)]
    return DatasetIndex(Schema("x", ("1",)), tuple(shards)).encode()


def write_index(folder, data):
    check_bytes(data)
    (folder / "pcr.json").write_bytes(data)
    return str(folder)


def with_unknown(value):
    """A sound index with a value of an unknown name."""
    return b'{"x": ' + value + b"," + entries(1, 100)[1:]


@case
def index_of_many_samples(folder):
    PCRDataset(write_index(folder, entries(4700, 1 << 24)))


@case
def index_of_allowed_samples(folder):
    loaded = PCRLoader(PCRDataset(write_index(folder, entries(4000, (1 << 21) // 4000))), 100)
    next(iter(loaded))


@case
def index_of_unknown_lists(folder):
    for value in (b"[" + b"[]," * 300_000 + b"1]", b"[" * 400_000 + b"]" * 400_000):
        open_dataset(write_index(folder, with_unknown(value)))


@case
def index_of_known_lists(folder):
    long = b'"classes": [' + b"[]," * 300_000 + b"1]"
    open_dataset(write_index(folder, b"{" + long + b"," + entries(1, 100)[1:]))


@case
def index_compressed(folder):
    packer = zlib.compressobj(9, wbits=31)
    start, stop = with_unknown(b"[]").split(b"[]", 1)
    parts = [start + b"[", *[b"[]," * (1 << 18)] * 300, b"1]" + stop]
    body = b"".join(map(packer.compress, parts)) + packer.flush()
    write_index(folder, body)
    encoding = servers.Fault(headers={"Content-Encoding": "gzip"})
    with servers.faulty(folder, lambda _: encoding) as server:
        open_dataset(server.url())


@case
def shard_of_many_samples(folder):
    head = Head(1 << 24, 1 << 16, 1 << 39, 0, 1 << 40, (1 << 40, 1 << 40), (8, 8), (1, 1))
    (folder / "a.tar").write_bytes(bytes(257) + b"ustar" + bytes(250) + head.encode() + bytes(4096))
    list(Shard(str(folder / "a.tar")).samples())


def chroma_only(side):
    """A large luma of which nothing is sent, and a small chroma by the fewest bits."""
    components = bytes([1, 0x44, 0, 2, 0x11, 0, 3, 0x11, 0])
    head = struct.pack(">BHHB", 8, side, side, 3) + components
    data = bytes((side // 32 + 1) ** 2 // 8 + 1)
    return (
        frame(HUFFMAN, 8, 8)[: 2 + 69]
        + segment(HUFFMAN, head)
        + huffman(0, 0)
        + segment(0xDA, bytes([1, 2, 0, 0, 0, 0]))
        + data
        + EOI
    )


def _shard_case(name, make, use):
    """A shard of as many copies of a JPEG as there is room for, all of which are decoded."""

    def decode_all(folder):
        piece = make().removesuffix(EOI)
        # As much as may be shared is, so that the shard has room for many.
        shared = min(len(piece) - 1, MAX_HEADER_BYTES)
        image = EncodedImage((piece, *[b""] * 10), (shared, *[0] * 10), 8, 8, 0)
        samples = [EncodedSample(f"{i:04}", {"jpg": image}, {}) for i in range(1 << 16)]
        count = len(samples)
        url = folder / "a.tar"
        while not url.exists() or url.stat().st_size > MAX_BYTES:
            write_shard(str(url), samples[:count], ShardFormat("standard"))
            count = count * MAX_BYTES // max(url.stat().st_size + 20_000, MAX_BYTES)
        decoded = 0
        for sample in Shard(str(url)).samples("full"):
            with contextlib.suppress(PCRError):
                use(sample["jpg"])
                decoded += 1
        if not decoded:
            raise PCRError(f"none of {count} images")

    CASES[name] = decode_all


def _crop(jpeg, decoder=ImageDecoder(224, "random")):
    decoder(jpeg, 0)


USES = {"whole": decode_image, "smooth": partial(decode_image, smoothing=True), "crop": _crop}
for _name, _use in USES.items():
    _shard_case(f"shard_of_arithmetic_{_name}", partial(arithmetic, 340, 340), _use)
    _shard_case(f"shard_of_scans_{_name}", partial(arithmetic_scans, 408, 7), _use)
    _shard_case(f"shard_of_flat_{_name}", partial(flat, 900, 900), _use)
    _shard_case(f"shard_of_chroma_{_name}", partial(chroma_only, 1000), _use)


@case
def state_of_large_steps(folder):
    loaded = PCRLoader(PCRDataset(write(folder, numbered(8), 8)), 2, drop_last="pad")
    state = loaded.state_dict()
    for segment in ([10**8] * 3 + [0], [1 << 20, 1 << 20, (1 << 31) - 1, 0]):
        try:
            loaded.load_state_dict(state | {"segments": [segment] * 30})
        except ValueError:
            continue
    raise PCRError("both were refused, or harmless")


@case
def tar_of_large_members(folder):
    info = tarfile.TarInfo("a.jpg")
    info.size = 1 << 36
    (folder / "src.tar").write_bytes(info.tobuf(tarfile.PAX_FORMAT) + bytes(100_000))
    encode(str(folder / "src.tar"), str(folder / "out"), EncodeOptions(num_shards=1), workers=1)


def run(name):
    """Do one case; return what it took."""
    decode_image(make_jpeg(1))
    with tempfile.TemporaryDirectory() as folder:
        before = peak_kilobytes()
        start = time.process_time()
        error = None
        try:
            CASES[name](pathlib.Path(folder))
        except Exception as found:
            error = found
        seconds = time.process_time() - start
    return {
        "name": name,
        "refused": isinstance(error, PCRError),
        "megabytes": (peak_kilobytes() - before) / 1000,
        "seconds": seconds,
        "error": error and f"{type(error).__name__}: {error}",
    }


def peak_kilobytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def print_each(run, items):
    """Print what each took as JSON; each runs in a child, so that peaks of memory are its own."""
    for each in items:
        if not (child := os.fork()):
            print(json.dumps(run(each)), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{each}: the process died")


if __name__ == "__main__":
    print_each(run, sys.argv[1:])
