"""One child process that decodes: the same batches, in memory that is never written to too early,
and nothing left behind, however it ends.
"""

import gc
import itertools
import multiprocessing
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
import torch
from support import wait_for

from pcrshard import EpochOptions, ImageDecoder, PCRDataset, ShardWriter
from pcrshard.errors import PCRError
from pcrshard.testing import make_jpeg
from pcrshard.training.shared_ring import SharedRing

OPTIONS = EpochOptions(seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """8 shards of 6."""
    path = str(tmp_path_factory.mktemp("isolate"))
    with ShardWriter(path, samples_per_shard=6) as writer:
        for i in range(48):
            jpeg = make_jpeg(i, 20 + i % 3, 24 + i % 5)
            writer.write({"__key__": f"k{i:03d}", "jpg": jpeg, "cls": i})
    return path


def dataset(folder, **options):
    choices = {"scan": 3, "image": ImageDecoder(16, "random", flip=0.5), "fields": ("jpg", "cls")}
    return PCRDataset(folder, 4, epoch=OPTIONS, **(choices | options))


def same(found, expected):
    return all(
        torch.equal(a, b) and torch.equal(m, n)
        for (a, m), (b, n) in itertools.zip_longest(found, expected)
    )


def copies(loader):
    return [(images.clone(), labels) for images, labels in loader]


def open_things():
    """Children, threads and descriptors of this process, and shared memory that it maps."""
    children = multiprocessing.active_children()
    folders = ("/proc/self/task", "/proc/self/fd")
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    segments = [line for line in maps if "/dev/shm/" in line or "memfd:pcrshard" in line]
    return len(children), *(len(os.listdir(folder)) for folder in folders), len(segments)


def segments_of(*processes):
    """Names of torch's shared memory that some processes have left."""
    begins = tuple(f"torch_{process}_" for process in processes)
    return [name for name in os.listdir("/dev/shm") if name.startswith(begins)]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_gives_the_same_batches(folder, method):
    """Over several epochs, by any start method, and after a resume."""
    expected = copies(dataset(folder).loader(threads=0))
    whole = dataset(folder)
    loader = whole.loader(threads=2, isolate=True, multiprocessing_context=method)
    assert loader.num_workers == 1
    seen = copies(itertools.islice(loader, 5))
    state = loader.state_dict()
    resumed = dataset(folder)
    resumed.load_state_dict(state)
    loader = resumed.loader(threads=1, isolate=True)
    assert same(seen + copies(loader), expected)
    assert resumed.epoch == 1


@pytest.mark.parametrize(
    "options",
    [
        {"fields": None},
        {"image": None, "fields": ("cls",)},
        {"image": ImageDecoder(), "fields": ("cls",)},
        {"transform": lambda sample: (torch.from_numpy(sample["jpg"]), int(sample["cls"]))},
    ],
)
def test_options_work_in_a_child(folder, options):
    """Dicts, labels alone and transforms come as they do without a child."""
    expected = list(dataset(folder, **options).loader(threads=0))
    found = list(dataset(folder, **options).loader(threads=1, isolate=True))
    assert str(found) == str(expected)


def test_batches_that_are_kept_are_not_written_to(folder):
    """All batches of an epoch may be kept, which are more than the ring has slots; and rows of
    them, after the loader is gone.
    """
    expected = copies(dataset(folder).loader(threads=0))
    kept = list(dataset(folder).loader(threads=2, isolate=True))
    rows = [images[2] for images, _ in kept]
    assert same(kept, expected)
    del kept
    gc.collect()
    assert all(torch.equal(row, images[2]) for row, (images, _) in zip(rows, expected, strict=True))


def test_a_ring_is_used_again():
    """A slot is free again when the last tensor of it is gone, and never before."""
    ring = SharedRing(12, 2)
    first, sent = ring.take((3, 4))
    first[:] = 7
    opened = ring.open(sent)
    row = opened[1]
    assert ring.take((13,)) is None
    assert ring.take((12,)) is not None
    assert ring.take((1,)) is None
    del opened
    assert ring.take((1,)) is None
    assert row.tolist() == [7] * 4
    del row
    assert ring.take((1,)) is not None


def leave_early(loader):
    next(iter(loader))


def fail(loader):
    with pytest.raises(ZeroDivisionError):
        for _ in loader:
            _ = 1 / 0


def go_through(loader):
    list(loader)


def fork(loader):
    """A child of the training process, in the middle of an epoch: it is told, and ends."""
    batches = iter(loader)
    first, _ = next(batches)
    second, _ = next(batches)
    child = os.fork()
    if child == 0:
        try:
            list(batches)
        except (RuntimeError, AssertionError):
            os._exit(7)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 7
    assert len(list(batches)) == 10
    assert first.shape == second.shape


ENDS = [leave_early, fail, go_through, fork]


def end_often(folder, end, isolate, times):
    """However an iteration ends, its threads or child, descriptors and segments are gone."""
    end(dataset(folder).loader(threads=2, isolate=isolate))
    gc.collect()
    before = open_things()
    for _ in range(times):
        end(dataset(folder).loader(threads=2, isolate=isolate))
        gc.collect()
        wait_for(lambda: open_things() == before, 5)
        assert open_things() == before


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left(folder, end, isolate):
    """A loop may end in any way, several times."""
    end_often(folder, end, isolate, 3)


@pytest.mark.long
@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left_of_a_hundred(folder, end, isolate):
    """Nor of a hundred loops."""
    end_often(folder, end, isolate, 100)


@pytest.mark.parametrize("isolate", [False, True])
def test_memory_does_not_grow(folder, isolate):
    """Twenty epochs take the memory of a few."""
    loader = dataset(folder, image=ImageDecoder(96, "random")).loader(threads=2, isolate=isolate)

    def resident():
        for _ in range(10):
            for _batch in loader:
                pass
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    first = resident()
    assert resident() - first < 3 << 20


def test_an_error_of_the_child_names_the_sample(folder):
    """What is wrong is said as without a child."""

    class Refusing(ImageDecoder):
        def __call__(self, jpeg, rng, out=None):
            raise PCRError("no", key="k007")

    with pytest.raises(PCRError, match="k007"):
        list(dataset(folder, image=Refusing(16)).loader(threads=1, isolate=True))


def test_a_child_is_no_worker(folder):
    """Both at once would be two ways to say how many processes there are."""
    with pytest.raises(ValueError, match="threads or workers"):
        dataset(folder).loader(2, isolate=True)
    with pytest.raises(ValueError, match="persistent_workers"):
        dataset(folder).loader(threads=1, isolate=True, persistent_workers=True)


KILLED = """
import multiprocessing, os, signal, sys
from pcrshard import ImageDecoder, PCRDataset
loader = PCRDataset(sys.argv[1], 4, image=16).loader(threads=2, isolate=True)
batches = iter(loader)
next(batches)
[child] = multiprocessing.active_children()
print(child.pid, flush=True)
os.kill(child.pid if sys.argv[2] == "child" else os.getpid(), int(sys.argv[3]))
list(batches)
"""


@pytest.mark.parametrize(
    ("who", "number", "status", "word"),
    [
        ("child", signal.SIGKILL, 1, "DataLoader worker|ConnectionResetError"),
        ("parent", signal.SIGKILL, -9, ""),
        ("parent", signal.SIGINT, -2, "KeyboardInterrupt"),
    ],
)
def test_a_kill_ends_both(folder, who, number, status, word):
    """Whichever process is killed, the other one ends soon, and nothing stays in /dev/shm."""
    command = [sys.executable, "-c", KILLED, folder, who, str(int(number))]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said, error = parent.communicate(timeout=60)
    assert parent.returncode == status
    assert re.search(word, error)
    child = int(said)
    wait_for(lambda: not os.path.exists(f"/proc/{child}"), 20)
    assert not os.path.exists(f"/proc/{child}")
    assert segments_of(parent.pid, child) == []
