"""What several tests of encoding need."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import time

import numpy as np

from pcrshard import EncodeOptions, Shard, encode, open_dataset, storage

CLI = [
    sys.executable,
    "-c",
    "import sys; from pcrshard_command import main; sys.exit(main())",
]


def read_samples(folder, scan="full"):
    index, urls = open_dataset(str(folder))
    shards = (Shard(url, entry=entry) for url, entry in zip(urls, index.shards, strict=True))
    return {sample["__key__"]: sample for shard in shards for sample in shard.samples(scan)}


def read_fields(sample):
    """The fields of a listed sample, read from where they are."""
    values = storage.read_ranges([(ref.url, ref.start, ref.stop) for ref in sample.refs])
    stored = {ref.name: value for ref, value in zip(sample.refs, values, strict=True)}
    return stored | dict(sample.known)


def save_image(path, mode="RGB"):
    """A middle gray picture of 30x20 (white in mode 1) in the format of the name."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    if mode == "I;16":
        image = Image.fromarray(np.full((20, 30), 128 * 257, np.uint16))
    else:
        image = Image.new("RGB", (30, 20), (255,) * 3 if mode == "1" else (128,) * 3).convert(
            mode, palette=Image.Palette.ADAPTIVE
        )
    image.save(path)
    return path


def make_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def start_encode(src, dst, *options):
    code = "import sys; from pcrshard_command import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "encode", str(src), str(dst), *options]
    return subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def die_once(flag, value, how="kill"):
    """Kill this process, or hang, the first time."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    return value


def encode_parts(src, dst, count, order, **how):
    options = EncodeOptions(num_shards=4)
    return [encode(str(src), str(dst), options, part=(i, count), workers=1, **how) for i in order]
