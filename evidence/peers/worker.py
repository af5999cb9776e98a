"""Runs one peer in its own environment; measure.py starts it.

worker.py PEER prepare|epoch JSON-options; prints one line of JSON at the end.
"""

import contextlib
import json
import os
import sys
import threading
import time
import warnings

warnings.simplefilter("ignore")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from adapters import PEERS

TICK = os.sysconf("SC_CLK_TCK")


def processes():
    """This process and its descendants, by number, with the fields of their stat."""
    stats = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            stats[int(name)] = file.read().rpartition(")")[2].split()
    family = {os.getpid()}
    grown = True
    while grown:
        more = {pid for pid, stat in stats.items() if int(stat[1]) in family} - family
        grown = bool(more)
        family |= more
    return {pid: stats[pid] for pid in family if pid in stats}


def cpu_seconds():
    """Return the CPU seconds of all processes of the tree, including exited ones."""
    return sum(sum(map(int, stat[11:15])) for stat in processes().values()) / TICK


def memory_bytes():
    """The proportional share of memory of the whole family."""
    total = 0
    for pid in processes():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
            total += sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return total * 1024


class Peak(threading.Thread):
    """The most memory that was seen; looks every tenth of a second."""

    def __init__(self):
        super().__init__(daemon=True)
        self.bytes = 0
        self.ended = threading.Event()

    def run(self):
        while not self.ended.wait(0.1):
            self.bytes = max(self.bytes, memory_bytes())


def pixels_of(batch):
    return batch[0] if isinstance(batch, tuple | list) else batch


def read_epoch(peer, folder, options):
    """One epoch: what it took, and when the first batch came."""
    cpu = cpu_seconds()
    start = time.perf_counter()
    first = None
    images = 0
    for batch in peer.epoch(folder, options["workers"]):
        first = first or time.perf_counter() - start
        images += len(pixels_of(batch))
    return {
        "images": images,
        "wall": time.perf_counter() - start,
        "first": first,
        "cpu": cpu_seconds() - cpu,
    }


def prepare(name, options):
    cpu = cpu_seconds()
    start = time.perf_counter()
    with open(options["images"]) as file:
        images = [tuple(image) for image in json.load(file)]
    PEERS[name].prepare(images, options["folder"])
    return {"wall": time.perf_counter() - start, "cpu": cpu_seconds() - cpu}


def epoch(name, options):
    peer = PEERS[name]
    folder = place(peer, options)
    peak = Peak()
    if options.get("memory"):
        peak.start()
    epochs = [read_epoch(peer, folder, options) for _ in range(options["epochs"])]
    peak.ended.set()
    return {"epochs": epochs, "peak_bytes": peak.bytes}


def place(peer, options):
    os.environ["PEERS_LOCAL"] = options["folder"]
    return peer.location(options["folder"], options.get("server"))


ACTIONS = {"prepare": prepare, "epoch": epoch}


def main():
    name, action, text = sys.argv[1:]
    said = ACTIONS[action](name, json.loads(text))
    print("\n" + json.dumps(said), flush=True)
    os._exit(0)  # some peers leave threads that do not end


if __name__ == "__main__":
    main()
