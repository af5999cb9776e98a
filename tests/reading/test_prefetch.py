"""Loading ahead: in order, within bounds, and gone when the caller is."""

import gc
import itertools
import random
import threading
import time
import weakref

import pytest
from support import request_threads, wait_for

from pcrshard.reading.prefetch import prefetch


class Thing:
    """A result; those in memory are in ``alive``."""

    alive: weakref.WeakSet = weakref.WeakSet()

    def __init__(self, number):
        self.number = number
        Thing.alive.add(self)


@pytest.fixture(autouse=True)
def _nothing_left():
    """After each test no thread runs and nothing that was loaded is in memory."""
    before = request_threads()  # of stores that never answered in other tests
    yield
    gc.collect()
    wait_for(lambda: not (Thing.alive or request_threads() - before), 5)
    assert not Thing.alive
    assert request_threads() <= before


@pytest.mark.parametrize("depth", [0, 1, 2, 7])
def test_everything_comes_once_in_order(depth):
    """Whatever the timing of loads, items come in their order, each once, a failed load fails its
    own item, and a result that was dropped makes room for the next.
    """
    rng = random.Random(0)
    pauses = [rng.random() * 0.005 for _ in range(60)]

    def load(item, cancel):
        assert len(Thing.alive) <= depth
        time.sleep(pauses[item])
        if item % 5 == 1:
            raise ValueError(f"bad {item}")
        return Thing(item)

    seen = []
    for item, future in prefetch(range(60), load, depth=depth):
        seen.append(item)
        if item % 5 == 1:
            with pytest.raises(ValueError, match=f"bad {item}"):
                future.result()
        else:
            assert future.result().number == item
            del future
    assert seen == list(range(60))


@pytest.mark.parametrize("end", ["break", "close", "collect", "throw"])
def test_leaving_cancels_what_runs(end):
    """However an epoch ends, loads that run are told, and what was loaded is dropped."""

    def load(item, cancel):
        if item > 2 and cancel.wait(60):
            raise TimeoutError("canceled")
        return Thing(item)

    begin, before = time.monotonic(), request_threads()
    loaded = prefetch(itertools.count(), load, depth=3)
    for item, future in loaded:
        future.result()
        if item == 2:
            break
    if end == "close":
        loaded.close()
    elif end == "throw":
        with pytest.raises(RuntimeError, match="stop"):
            loaded.throw(RuntimeError("stop"))
    del loaded, future
    gc.collect()
    assert request_threads() <= before
    assert time.monotonic() - begin < 20  # of 60


def test_a_load_that_ignores_cancel_is_dropped_when_it_ends():
    """A load that cannot be interrupted does not keep the caller for long."""
    release = threading.Event()

    def load(item, cancel):
        if item:
            release.wait(60)
        return Thing(item)

    loaded = prefetch(range(2), load, depth=1)
    next(loaded)[1].result()
    begin = time.monotonic()
    loaded.close()
    assert time.monotonic() - begin < 20  # of 60
    release.set()
