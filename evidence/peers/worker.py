"""Runs one peer in its own environment; measure.py starts it.

worker.py FORM write JSON-options, worker.py PEER epoch JSON-options; prints one line of JSON at the
end. Leads its session, by which its processes are known.
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
from adapters import FORMS, PEERS

TICK = os.sysconf("SC_CLK_TCK")


def processes():
    """The processes of this session, by number, with the fields of their stat."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            found[name] = file.read().rpartition(")")[2].split()
    return {name: fields for name, fields in found.items() if int(fields[3]) == os.getsid(0)}


def cpu_seconds():
    """Return the CPU seconds of all processes of the session, including exited ones."""
    return sum(sum(map(int, fields[11:15])) for fields in processes().values()) / TICK


def memory_bytes():
    """The proportional share of memory of all of them."""
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


def write(form, options):
    """What the images take to be written."""
    cpu, start = cpu_seconds(), time.perf_counter()
    with open(options["images"]) as file:
        images = [tuple(image) for image in json.load(file)]
    FORMS[form][1](images, options["folder"])
    return {"wall": time.perf_counter() - start, "cpu": cpu_seconds() - cpu}


def read_epoch(peer, place, workers):
    """One epoch: what it took, and when the first batch came."""
    cpu, start = cpu_seconds(), time.perf_counter()
    first = None
    images = 0
    for pixels in peer.read(place, workers, **peer.options or {}):
        first = first or time.perf_counter() - start
        images += len(pixels)
    wall = time.perf_counter() - start
    return {"images": images, "wall": wall, "first": first, "cpu": cpu_seconds() - cpu}


def epoch(name, options):
    """What epochs take, and the peak of memory."""
    os.environ["PEERS_LOCAL"] = options["folder"]
    place = options.get("server", options["folder"])
    peak = Peak()
    if options.get("memory"):
        peak.start()
    epochs = [read_epoch(PEERS[name], place, options["workers"]) for _ in range(options["epochs"])]
    peak.ended.set()
    return {"epochs": epochs, "peak_bytes": peak.bytes}


if __name__ == "__main__":
    name, action, text = sys.argv[1:]
    said = {"write": write, "epoch": epoch}[action](name, json.loads(text))
    print("\n" + json.dumps(said), flush=True)
    os._exit(0)  # some peers leave threads that do not end
