"""Runs one peer in its own environment; benchmarks/peers/run.py starts it.

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
from stores import PEERS

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
    """Of the whole family, those that have ended included."""
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


def count(batch):
    pixels = batch[0] if isinstance(batch, tuple | list) else batch
    return len(pixels)


def read_epoch(peer, folder, options):
    """One epoch: what it took, and when the first batch came."""
    cpu = cpu_seconds()
    start = time.perf_counter()
    first = None
    images = 0
    for batch in peer.epoch(folder, options["workers"], **options.get("more", {})):
        first = first or time.perf_counter() - start
        images += count(batch)
        if options.get("stop_at") and images >= options["stop_at"]:
            break
    wall = time.perf_counter() - start
    return {"images": images, "wall": wall, "first": first, "cpu": cpu_seconds() - cpu}


def main():
    name, action, text = sys.argv[1:]
    options = json.loads(text)
    peer = PEERS[name]
    if action == "prepare":
        cpu = cpu_seconds()
        start = time.perf_counter()
        with open(options["images"]) as file:
            peer.prepare([tuple(image) for image in json.load(file)], options["folder"])
        said = {"wall": time.perf_counter() - start, "cpu": cpu_seconds() - cpu}
    else:
        os.environ["PEERS_LOCAL"] = options["folder"]
        folder = peer.location(options["folder"], options.get("server"))
        peak = Peak()
        if options.get("memory"):
            peak.start()
        said = {"epochs": [read_epoch(peer, folder, options) for _ in range(options["epochs"])]}
        peak.ended.set()
        said["peak_bytes"] = peak.bytes
    print("\n" + json.dumps(said), flush=True)
    os._exit(0)  # some peers leave threads that do not end


if __name__ == "__main__":
    main()
