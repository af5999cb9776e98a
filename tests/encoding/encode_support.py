"""What several tests of encoding need."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import tarfile

import numpy as np
from PIL import Image
from support import saved

from pcrshard import EncodeOptions, encode
from pcrshard.encoding.samples import read_samples

CLI = [
    sys.executable,
    "-c",
    "import sys; from pcrshard_command import main; sys.exit(main())",
]


def read_fields(sample):
    """The fields of a listed sample, read from where they are."""
    ((_, fields),) = read_samples([sample], None)
    return fields


def image_bytes(kind, mode="RGB"):
    """A middle gray picture of 30x20 (white in mode 1) in Pillow's format of this name."""
    if mode == "I;16":
        image = Image.fromarray(np.full((20, 30), 128 * 257, np.uint16))
    else:
        image = Image.new("RGB", (30, 20), (255,) * 3 if mode == "1" else (128,) * 3).convert(
            mode, palette=Image.Palette.ADAPTIVE
        )
    return saved(image, kind)


def make_tar(path, members, **options):
    """Write a tar of (name, bytes) pairs, in folders that need not exist; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


@contextlib.contextmanager
def start_encode(src, dst, *options):
    """An encode of twelve shards as a group of processes, which is killed in the end."""
    command = [*CLI, "encode", str(src), str(dst), "--num-shards", "12", *options]
    silent = subprocess.DEVNULL
    process = subprocess.Popen(command, start_new_session=True, stdout=silent, stderr=silent)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def encode_parts(src, dst, count, order, **how):
    options = EncodeOptions(num_shards=4)
    return [encode(src, dst, options, part=(i, count), workers=1, **how) for i in order]
