"""Thousands of damaged inputs, fed to all that reads them; run as a program.

``python hostile_campaign.py KIND=COUNT ...`` prints for each kind as JSON how many were refused and
accepted, what the worst took, and the findings: errors that are none of the library's.
"""

import copy
import io
import json
import pathlib
import random
import sys
import tarfile
import tempfile
import time

import mutants
from hostile import peak_kilobytes, print_each
from numbered import numbered, write

from pcrshard import (
    EncodeOptions,
    PCRDataset,
    PCRLoader,
    encode,
    open_dataset,
)
from pcrshard.checksum import crc32c
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.encoding.sources import list_source
from pcrshard.errors import PCRError
from pcrshard.jpeg.image_decoder import ImageDecoder
from pcrshard.jpeg.pixels import decode_image
from pcrshard.reading.shard import Shard
from pcrshard.testing import make_jpeg

_NUMBERS = (-1, 0, 1, 255, 1 << 16, 1 << 31, 1 << 40, 1 << 63, 10**30, 0.5, None, "x", [], {}, True)
_SIDE = 512


def write_shards(folder):
    """A dataset of two small shards."""
    return pathlib.Path(write(folder, [sample | {"json": {}} for sample in numbered(8)], 4))


def damaged(rng, data, first=0):
    """Some bytes of a file changed, from the first on that may be."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(first, len(changed))
        size = rng.choice((1, 1, 2, 4, 8))
        value = rng.choice((rng.randbytes(size), bytes(size), b"\xff" * size))
        changed[at : at + size] = value[: len(changed) - at]
    return changed


def jpegs(count, seed, folder):
    """Damaged JPEGs: decoded whole, cropped, by both decoders, and encoded."""
    uses = (
        decode_image,
        lambda jpeg: decode_image(jpeg, smoothing=True),
        lambda jpeg: ImageDecoder(32, "center")(jpeg, None),
        encode_jpeg,
    )
    for jpeg in mutants.mutants(count, seed):
        yield lambda jpeg=jpeg: use_all(uses, jpeg)


def use_all(uses, data):
    """All uses of a damaged input, also after one has refused it."""
    refused = None
    for use in uses:
        try:
            use(data)
        except PCRError as error:
            refused = error
    if refused:
        raise refused


def shards(count, seed, folder):
    """Shards whose index is damaged, with right checksums: every scan is read and decoded."""
    whole = min(write_shards(folder / "pcr").glob("*.tar")).read_bytes()
    body_bytes = int.from_bytes(whole[_SIDE + 32 : _SIDE + 40], "little")
    stop = 2 * _SIDE + body_bytes
    rng = random.Random(seed)
    path = folder / "a.tar"

    def read(data):
        path.write_bytes(data)
        shard = Shard(str(path))
        for scan in (1, 5, "full"):
            for sample in shard.samples(scan):
                if "jpg" not in sample:
                    raise PCRError("the field has another name now")
                decode_image(sample["jpg"])

    for _ in range(count):
        data = damaged(rng, whole[:stop], _SIDE + rng.choice((12, 512))) + whole[stop:]
        data[_SIDE + 28 : _SIDE + 32] = crc32c(data[2 * _SIDE : stop]).to_bytes(4, "little")
        data[_SIDE + 8 : _SIDE + 12] = bytes(4)
        head = crc32c(bytes(data[_SIDE : 2 * _SIDE]))
        data[_SIDE + 8 : _SIDE + 12] = head.to_bytes(4, "little")
        yield lambda data=data: read(data)


def change(rng, value):
    """One value somewhere in nested lists and dicts becomes another one."""
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        place = rng.choice(places)
        if isinstance(value, dict) and rng.random() < 0.1:
            del value[place]
        else:
            value[place] = change(rng, value[place])
        return value
    return rng.choice(_NUMBERS)


def indexes(count, seed, folder):
    """Dataset indexes that hold other values, and those whose bytes are damaged."""
    path = write_shards(folder / "pcr") / "pcr.json"
    whole = path.read_bytes()
    rng = random.Random(seed)

    def read(data):
        path.write_bytes(data)
        index, urls = open_dataset(str(path.parent))
        list(Shard(urls[0], entry=index.shards[0]).samples(2))

    for number in range(count):
        changed = change(rng, json.loads(whole))
        data = damaged(rng, whole) if number % 2 else json.dumps(changed).encode()
        yield lambda data=data: read(data)


def states(count, seed, folder):
    """States that hold other values: refused, without a change, or an epoch that ends."""
    write_shards(folder / "pcr")
    loaded = PCRLoader(PCRDataset(str(folder / "pcr")), 2, drop_last="pad")
    whole = loaded.state_dict()
    rng = random.Random(seed)

    def load(state):
        before = loaded.state_dict()
        try:
            loaded.load_state_dict(state)
        except ValueError as error:
            assert loaded.state_dict() == before, "a refused state has changed something"
            raise PCRError(str(error)) from error

    for _ in range(count):
        state = change(rng, copy.deepcopy(whole))
        yield lambda state=state: load(state)


def tars(count, seed, folder):
    """Damaged tars of images: listed, and encoded where they can be."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for i in range(4):
            for name, data in ((f"{i}.jpg", make_jpeg(i, 16, 16)), (f"{i}.cls", b"1")):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    rng = random.Random(seed)
    path = folder / "a.tar"
    options = EncodeOptions(num_shards=1, on_error="skip")

    def read(data, number):
        path.write_bytes(data)
        list_source(str(path))
        encode(str(path), str(folder / f"out{number}"), options, workers=1)

    for number in range(count):
        data = damaged(rng, buffer.getvalue())
        # The first header's checksum is right, whatever it says.
        data[148:156] = b" " * 8
        data[148:156] = b"%06o\0 " % sum(data[:512])
        yield lambda data=data, number=number: read(data, number)


KINDS = {function.__name__: function for function in (jpegs, shards, indexes, states, tars)}


def run(how):
    """Feed the inputs and return their outcomes."""
    kind, _, count = how.partition("=")
    refused = 0
    accepted = 0
    slowest = 0.0
    findings = []
    with tempfile.TemporaryDirectory() as folder:
        before = None
        for number, feed in enumerate(KINDS[kind](int(count), int(count), pathlib.Path(folder))):
            before = before or peak_kilobytes()
            begin = time.process_time()
            try:
                feed()
                accepted += 1
            except PCRError:
                refused += 1
            except Exception as error:
                findings.append(f"{kind} {number}: {type(error).__name__}: {error}")
            slowest = max(slowest, time.process_time() - begin)
    return {
        "kind": kind,
        "refused": refused,
        "accepted": accepted,
        "megabytes": round((peak_kilobytes() - before) / 1000),
        "seconds": round(slowest, 2),
        "findings": findings,
    }


if __name__ == "__main__":
    print_each(run, sys.argv[1:])
