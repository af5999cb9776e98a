"""Fork a writer, kill it at a random moment, look at what it left; again and again.

Usage: kill_writer.py FOLDER TIMES
"""

import os
import random
import signal
import sys
import time

from states import same, tiny_state

from pcrshard.checkpoint import DeltaStore

ORDERS = ("backward", "forward", "hop")


def write_on(url: str, order: str) -> None:
    """Save versions until killed; each is a pure function of its number."""
    store = DeltaStore(url, order=order, keyframe_every=4, bound=None)
    number = len(store.versions())
    while True:
        number += 1
        store.save(tiny_state(number), blocking=True)


def check(url: str) -> int:
    """All versions are sound and right; returns how many there are."""
    store = DeltaStore(url)
    versions = store.versions()
    assert [record.number for record in versions] == list(range(1, len(versions) + 1))
    assert not versions or store.verify() == []
    for record in versions[-5:]:
        loaded = store.load(record.number)
        assert same(loaded["model"], tiny_state(record.number)["model"])
    return len(versions)


def main(folder: str, times: int) -> None:
    random.seed(0)
    counts = {}
    for i in range(times):
        order = ORDERS[i % 3]
        url = os.path.join(folder, f"{order}-{i // 12}")
        child = os.fork()
        if child == 0:
            write_on(url, order)
            os._exit(1)
        time.sleep(random.uniform(0.02, 0.4))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        before = counts.get(url, 0)
        counts[url] = check(url)
        assert counts[url] >= before
    for url in counts:
        store = DeltaStore(url)
        store.save(tiny_state(counts[url] + 1), blocking=True)
        files = {record.file for record in store.versions()} | {"manifest.pcm"}
        assert set(os.listdir(url)) == files, "leftovers are not removed"
        store.close()
    print(f"{times} kills, {sum(counts.values())} versions in {len(counts)} stores")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
