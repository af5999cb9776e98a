"""Workers that are forked while threads of their parent read."""

import os
import signal
import threading
import time

import pytest
import servers

from pcrshard import PCRDataset


def forks_that_end(dataset, count, seconds=20):
    """Fork while two threads read samples; how many children read one, too, before the deadline."""
    over, errors = threading.Event(), []

    def read(number):
        try:
            while not over.is_set():
                number = (number + 7) % len(dataset)
                _ = dataset[number]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    ended = 0
    try:
        for number in range(count):
            child = os.fork()
            if not child:
                try:
                    _ = dataset[number % len(dataset)]
                    os._exit(0)
                finally:
                    os._exit(1)
            deadline = time.monotonic() + seconds
            while (found := os.waitpid(child, os.WNOHANG)) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                    found = os.waitpid(child, 0)
                    break
                time.sleep(0.001)
            ended += found[1] == 0
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not errors
    return ended


@pytest.mark.parametrize("count", [5, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize("where", ["local", "http", "cached"])
def test_a_child_reads_whatever_threads_of_its_parent_held(dataset, tmp_path, where, count):
    """A thread of the main process reads ``dataset[i]`` while a DataLoader forks its workers: each
    worker reads, too.
    """
    with servers.nginx(dataset) as server:
        url = dataset if where == "local" else server.url("")
        cached = {"cache_dir": tmp_path, "cache_bytes": 20_000} if where == "cached" else {}
        # Prefixes are dropped and loaded again all the time.
        opened = PCRDataset(url, held_bytes=20_000, **cached)
        assert forks_that_end(opened, count) == count
