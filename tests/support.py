"""What tests of several rooms need."""

import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import pathlib
import runpy
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from typing import NamedTuple

import fsspec
import numpy as np
import pytest
import webdataset as wds
from fsspec.implementations.local import LocalFileSystem

from pcrshard import EncodeOptions, Shard, encode, open_dataset
from pcrshard.encoding import shard_writer
from pcrshard.encoding.resume_journal import JOURNAL
from pcrshard.format.dataset_index import ShardEntry
from pcrshard.format.group_table import decode_tables, group_starts

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Every page of the documentation.
MARKDOWN = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "evidence").rglob("README.md")),
]


def write_shard(url, samples, fmt, *given):
    """Write a shard of encoded samples, whose schema they decide; return its entry."""
    schema = shard_writer.decide_schema(samples, fmt, *given)
    return shard_writer.write_shard(str(url), samples, schema)[0].entry


def run_tool(*command, data):
    """Run djpeg or jpegtran on bytes."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} IS NOT INSTALLED: apt-get install libjpeg-turbo-progs")
    return subprocess.run(command, input=data, capture_output=True, check=False)


def run_python(*words, env=(), **options):
    """What a Python process prints that finds what this one can import; it must succeed."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | dict(env),
        capture_output=True,
        text=True,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _rank(script, words, environment, log):
    """Run a script as one rank; what it prints goes to a file."""
    os.environ.update(environment)
    file = os.open(log, os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.argv = [str(script), *map(str, words)]
    multiprocessing.set_start_method(None, force=True)  # the default again, as in a shell
    runpy.run_path(str(script), run_name="__main__")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # A thread of gloo's that wants the GIL while Python ends aborts (PyTorch).
    os._exit(0)


def run_ranks(script, *words, ranks=2):
    """What the ranks of a script print, started as torchrun does, but forked with torch imported:
    an address for the ranks to meet at, and the numbers of ranks, are in their environment.
    """
    from torch.distributed import TCPStore

    meeting = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting.port)}
    where |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    where |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder, str(rank)) for rank in range(ranks)]
        started = []
        for rank, log in enumerate(logs):
            environment = where | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(context.Process(target=_rank, args=(script, words, environment, log)))
            started[-1].start()
        for process in started:
            process.join(120)
        said = "".join(log.read_text() for log in logs if log.exists())
        assert [process.exitcode for process in started] == [0] * ranks, said[-3000:]
    return said


# What PyTurboJPEG looks for, and the list that says where it is.
HIDDEN = (*sorted(pathlib.Path("/usr/lib").glob("*/libturbojpeg.so.0")), "/etc/ld.so.cache")


def hide_libturbojpeg(*command):
    """The command on a machine without libturbojpeg: an empty file lies over it, for it alone."""
    mounts = "".join(f"mount --bind /dev/null {path} && " for path in HIDDEN)
    hidden = ["unshare", "--mount", "sh", "-c", f'{mounts} exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*hidden, "true"], check=False).returncode:
        pytest.skip("expected to be allowed to mount files (unshare --mount), to hide libturbojpeg")
    return [*hidden, *command]


def saved(picture, fmt, **options):
    """The bytes of a Pillow image in a format."""
    out = io.BytesIO()
    picture.save(out, fmt, **options)
    return out.getvalue()


def write_files(folder, files):
    """Write files by their names below a folder; returns the folder."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def write_tar(path, members, fmt=tarfile.PAX_FORMAT):
    """Write a plain tar of members by name; returns its path."""
    with tarfile.open(path, "w", format=fmt) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def damage(path, place=-1):
    """Flip a bit of a byte of a file, by default of the last one."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << place % 8
    path.write_bytes(data)


def read_all(folder):
    """Digest of every file of a dataset but the journal, whose order in time is its own."""
    return {
        p.name: digest(p.read_bytes()) if p.is_file() else "a folder"
        for p in pathlib.Path(folder).iterdir()
        if p.name != JOURNAL
    }


def digest(data):
    """What of a file is compared: a failed comparison of its bytes would fill the log."""
    return len(data), hashlib.sha256(data).hexdigest()


def read_samples(folder, scan="full"):
    """The samples of a dataset by key, in order."""
    index, urls = open_dataset(str(folder))
    shards = (Shard(url, entry=entry) for url, entry in zip(urls, index.shards, strict=True))
    return {sample["__key__"]: sample for shard in shards for sample in shard.samples(scan)}


def without_place(samples):
    """WebDataset's samples without what says where they were read."""
    return [
        {k: v for k, v in sample.items() if k not in ("__url__", "__local_path__")}
        for sample in samples
    ]


def stock_samples(urls):
    """What unmodified WebDataset makes of tars."""
    return without_place(wds.WebDataset(urls, shardshuffle=False, handler=wds.reraise_exception))


def is_alive(pid):
    """Return whether a process is running; a zombie is not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def read_log(run):
    """The rows of a training's log; none before it is written."""
    path = pathlib.Path(run, "log.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_encode(src, dst, **options):
    how = {
        name: options.pop(name)
        for name in ("workers", "resume", "progress", "executor")
        if name in options
    }
    return encode(str(src), str(dst), EncodeOptions(**options), **{"workers": 1} | how)


def wait_for(condition, seconds=20.0, pause=0.002):
    """Wait until a condition holds; return whether it does."""
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(pause)
    return holds


def shard_entry(scan=None, num_groups=10):
    """Return the entry of a shard, staged up to a scan unless it is whole."""
    stops = tuple(range(2000, 2001 + num_groups))
    return ShardEntry("a-000000.tar", 1, 0, (1536, *stops), scan)


@contextlib.contextmanager
def within(seconds):
    """Fail, with all stacks, what hangs."""
    begin = time.monotonic()
    previous = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"hangs for {seconds} s"))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert time.monotonic() - begin < seconds


class Pieces(NamedTuple):
    """(N + 1, samples, streams) each: where the own bytes of each piece are, and how many."""

    starts: np.ndarray
    sizes: np.ndarray


def pieces(shard):
    """The pieces of a local shard without lists, by row, sample and stream; the tail is last."""
    index = shard.index
    data = pathlib.Path(shard.url).read_bytes()
    places = list(index.table_places(0, index.num_groups + 1))
    table = decode_tables(index, places, data)
    shape = (index.num_groups + 1, index.num_samples, len(index.schema.streams))
    sizes = table.own_bytes
    starts = sizes.cumsum(axis=1) - sizes + np.array(group_starts(index, table.rows))[:, None]
    if len(table.offsets):
        base = slice(index.schema.base)
        before = sizes[base].cumsum(axis=0) - sizes[base]
        starts[base] = table.offsets.astype(np.int64) + before
    return Pieces(starts.reshape(shape), sizes.reshape(shape))


def request_threads():
    """The threads that read from stores."""
    return {thread for thread in threading.enumerate() if thread.name == "pcrshard request"}


class CountingFS(LocalFileSystem):
    """Local files under ``counting://``; records (path, start, stop) of every range asked for."""

    protocol = "counting"
    requests = []

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix(f"{cls.protocol}://"))

    def cat_file(self, path, start=None, end=None, **kwargs):
        self.requests.append((path, start, end))
        return super().cat_file(path, start, end, **kwargs)


fsspec.register_implementation(CountingFS.protocol, CountingFS)
