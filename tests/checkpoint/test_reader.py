"""Reading while others write, and telling how far it is."""

import threading

import pytest
import torch
from states import tiny_state

from pcrshard.checkpoint import DeltaStore
from pcrshard.checkpoint.reader import StoreReader
from pcrshard.checkpoint.writer import Place
from pcrshard.errors import VersionUnavailable


@pytest.fixture
def url(tmp_path):
    with DeltaStore(str(tmp_path / "run"), keyframe_every=3) as store:
        for number in range(1, 5):
            store.save(tiny_state(number))
    return store.url


def test_a_reader_needs_no_bounds_and_no_thread(url):
    """It gives what the store gives."""
    reader = StoreReader(Place(url))
    store = DeltaStore(url)
    assert reader.versions() == store.versions()
    for number in range(1, 5):
        loaded = reader.load(number)["model"]["w"]
        assert torch.equal(loaded, store.load(number)["model"]["w"])
    assert reader.verify() == []
    with pytest.raises(VersionUnavailable):
        StoreReader(Place(url + "-nowhere")).load()


def test_a_reader_survives_that_files_are_replaced(url):
    """Versions are read, again and again, while another process compacts and adds."""
    reader = StoreReader(Place(url))
    expected = reader.load(4)["model"]["w"]
    ended = threading.Event()

    def rewrite():
        try:
            for order in ("forward", "hop", "backward") * 4:
                DeltaStore(url).rebase(order=order)
        finally:
            ended.set()

    thread = threading.Thread(target=rewrite)
    thread.start()
    reads = 0
    while not ended.is_set():
        assert torch.equal(reader.load(4)["model"]["w"], expected)
        reads += 1
    thread.join()
    assert reads > 3


@pytest.mark.parametrize("workers", [1, 3])
def test_progress_ends_at_its_total(url, tmp_path, workers):
    """Counts go up by one, for reading, exporting, verifying, compacting and rebasing."""
    store = DeltaStore(url, workers=workers)
    calls = {
        "read": lambda progress: store.read(1, progress=progress),
        "export": lambda progress: store.export(1, str(tmp_path / "x"), progress=progress),
        "verify": lambda progress: store.verify(progress=progress),
        "rebase": lambda progress: store.rebase(order="forward", progress=progress),
        "compact": lambda progress: store.compact([1, 3], progress=progress),
    }
    for name, call in calls.items():
        told = []
        call(lambda done, total, told=told: told.append((done, total)))
        assert told == [(done, len(told)) for done in range(1, len(told) + 1)], name
        assert told, name
