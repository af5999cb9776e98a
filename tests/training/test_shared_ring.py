"""One child process that decodes: the same batches, in memory that is never written to too early,
and nothing left behind, however it ends.
"""

import gc
import itertools
import multiprocessing
import os
import pathlib
import pickle
import re
import resource
import signal
import subprocess
import sys
import weakref
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from support import wait_for

from pcrshard import EpochOptions, ImageDecoder, PCRDataset, ShardWriter, View
from pcrshard.errors import PCRError
from pcrshard.testing import make_jpeg
from pcrshard.training.batch_images import BatchMemory
from pcrshard.training.loader import Ahead
from pcrshard.training.shared_ring import SharedRing, for_parent

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


WORKERS = [
    {},
    {"persistent_workers": True},
    pytest.param({"multiprocessing_context": "spawn"}, marks=pytest.mark.long),
    pytest.param(
        {"persistent_workers": True, "multiprocessing_context": "forkserver"},
        marks=pytest.mark.long,
    ),
]


@pytest.mark.parametrize("options", WORKERS)
def test_workers_send_places(folder, options):
    """Their batches are those of no worker, over epochs, and take no shared memory of torch's
    unless many are kept.
    """
    whole = dataset(folder, image=96)
    loader = dataset(folder, image=96).loader(2, **options)
    for _ in range(2):
        expected = copies(whole.loader(threads=0))
        found = []
        for images, labels in loader:
            assert not images.is_shared()
            found.append((images.clone(), labels))
        assert same(found, expected)
    kept = list(loader)
    assert any(images.is_shared() for images, _ in kept)
    assert same(kept, copies(whole.loader(threads=0)))


def test_workers_end_before_their_memory(folder):
    """What still receives a batch while a loop is left finds the ring that the batch lies in."""
    held = [Ahead(memory=BatchMemory(ring=SharedRing(1, 1)))]
    ring = weakref.ref(held[0].memory.ring)
    alive = []

    class Coming:
        def __iter__(self):
            return self

        def __next__(self):
            return 1

        def __del__(self):
            alive.append(ring() is not None)

    batches = dataset(folder).hand_out(Coming, lambda _: held.pop())
    assert next(batches) == 1
    batches.close()
    assert alive == [True]
    assert ring() is None


def test_a_limit_of_memory_stops_no_loader(folder):
    """Where a job may not take so much at once, it goes on with less."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, before[1]))
    try:
        with pytest.raises(OSError, match="large"):
            SharedRing(1 << 14, 1)
        found = copies(dataset(folder).loader(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert same(found, copies(dataset(folder).loader(threads=0)))


def in_floats(batch):
    return {"x": batch[0][1:].float() / 255, "pixels": batch[0].permute(0, 2, 3, 1), "n": batch[1]}


VIEWS = ImageDecoder(views=[View(16, 2, scale=(0.3, 1)), View(8, 3)], return_geometry=True)


@pytest.mark.parametrize(
    ("choices", "options"),
    [
        ({}, {"collate_fn": in_floats}),
        ({"image": VIEWS, "fields": None}, {}),
        ({"image": ImageDecoder(), "fields": None}, {}),
    ],
)
def test_whatever_workers_make_comes(folder, choices, options):
    """Batches of a collate_fn of one's own, of views, of whole images of many sizes."""
    expected = list(dataset(folder, **choices).loader(threads=0, **options))
    found = list(dataset(folder, **choices).loader(2, **options))
    assert str(found) == str(expected)


def received(sent):
    """What a parent gets of it."""
    return pickle.loads(ForkingPickler.dumps(sent))


def test_a_ring_is_used_again():
    """A slot is free again when the last tensor of it is gone in both processes, never before."""
    ring = SharedRing(12, 2)
    taken = ring.take(12)
    taken[:] = 7
    first = ring.place(taken.view(3, 4), set())
    opened = received(first)
    row = opened[1]
    assert ring.take(13) is None
    other = ring.take(12)
    assert ring.take(1) is None
    del opened
    del taken
    assert ring.take(1) is None
    assert row.tolist() == [7] * 4
    del row
    assert ring.take(1) is not None
    # What is not sent is free when it is dropped.
    del other
    assert ring.take(1) is not None


def test_several_tensors_lie_in_one_slot():
    """Views of an image, rows, and pictures turned round are sent as places, each as it is."""
    ring = SharedRing(48, 1)
    whole = ring.take(48)
    whole.copy_(torch.arange(48))
    pixels = whole.view(2, 4, 2, 3)
    parts = {"a": pixels[0], "b": [pixels[1].permute(2, 0, 1), whole[5:5]], "c": pixels[:, ::2]}
    sent = for_parent(parts)
    assert len(ForkingPickler.dumps(sent)) < 600
    found = received(sent)
    assert str(found) == str(parts)
    del whole, pixels, parts, sent
    del found["a"], found["b"]
    assert ring.take(1) is None
    assert found["c"].flatten().tolist()[:3] == [0, 1, 2]


def test_a_slot_is_sent_once():
    """A worker that keeps a batch and sends it again sends a copy: the first may be gone."""
    ring = SharedRing(12, 1)
    kept = ring.take(12)
    kept[:] = 3
    first = received(for_parent([kept]))
    again = for_parent([kept])
    assert torch.equal(received(again)[0], first[0])
    assert ring.take(1) is None


SMALL = [
    torch.tensor(3),
    torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.arange(6).view(2, 3).t(),
    torch.zeros(0, 3),
    torch.tensor([1 + 2j]),
    torch.nn.Parameter(torch.ones(2)),
]


def test_small_tensors_are_sent_as_bytes():
    """Labels and the like come as they were, without shared memory of their own."""
    found = received(for_parent(SMALL))
    assert list(map(str, found)) == list(map(str, SMALL))
    assert [each.dtype for each in found] == [each.dtype for each in SMALL]
    found[0].add_(1)
    odd = [torch.eye(3, dtype=torch.uint8).to_sparse(), "text", None]
    assert for_parent(odd) == odd


def test_a_forked_child_gives_nothing_back():
    """What it drops of a batch its parent may still use."""
    ring = SharedRing(12, 1)
    taken = ring.take(12)
    opened = received(ring.place(taken, set()))
    del taken
    child = os.fork()
    if child == 0:
        del opened
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ring.take(1) is None
    assert opened.shape == (12,)


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


PROCESSES = [{"threads": 2}, {"threads": 2, "isolate": True}, {"num_workers": 2}]


def end_often(folder, end, options, times):
    """However an iteration ends, its threads or processes, descriptors and segments are gone."""
    end(dataset(folder).loader(**options))
    gc.collect()
    before = open_things()
    for _ in range(times):
        end(dataset(folder).loader(**options))
        gc.collect()
        wait_for(lambda: open_things() == before, 5)
        assert open_things() == before


@pytest.mark.parametrize("options", PROCESSES)
@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left(folder, end, options):
    """A loop may end in any way, several times."""
    end_often(folder, end, options, 3)


@pytest.mark.long
@pytest.mark.parametrize("options", PROCESSES)
@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left_of_a_hundred(folder, end, options):
    """Nor of a hundred loops."""
    end_often(folder, end, options, 100)


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
