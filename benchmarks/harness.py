"""What the benchmarks share: photographs, interleaved rounds, tables, targets, a JSON file."""

import contextlib
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time

from evidence import ROOT
from evidence.lab import stamp, unpack
from pcrshard.fidelity.costs import table

PACKAGES = ("pcrshard", "numpy", "fsspec", "PyTurboJPEG", "webdataset", "torch", "pillow")


class Quartiles(dict):
    """Quartiles of a figure over the rounds; shows as ``median [q1 q3]``."""

    def __init__(self, values):
        values = list(values)
        found = statistics.quantiles(values * 2 if len(values) == 1 else values, method="inclusive")
        super().__init__(zip(("q1", "median", "q3"), found, strict=True))

    def __format__(self, form):
        return "{median:{form}} [{q1:{form}} {q3:{form}}]".format(form=form, **self)

    @property
    def median(self):
        return self["median"]


def ratios(first, second):
    """Quartiles of the ratio of two figures of the same rounds."""
    return Quartiles(a / b for a, b in zip(first, second, strict=True))


def cpu():
    """CPU seconds of this process and of its ended children."""
    return sum(os.times()[:4])


def peak_memory():
    """The most bytes that this process held; its parent's count in ``ru_maxrss``."""
    with open("/proc/self/status") as file:
        return 1024 * int(next(line for line in file if line.startswith("VmHWM:")).split()[1])


def read(path):
    """The bytes of a file."""
    with open(path, "rb") as file:
        return file.read()


class Bench:
    """A run of one benchmark: its rounds, and what it found."""

    def __init__(self, subject, rounds, *, quick=False):
        self.subject = subject
        self.quick = quick
        self.rounds = 1 if quick else rounds
        self.results, self.targets = {}, []

    @contextlib.contextmanager
    def photos(self, *others):
        """A temporary folder with ``photos/SET/.../FILE.jpg``; ``others`` are tars beside it."""
        with tempfile.TemporaryDirectory(prefix="pcrshard-bench-") as folder:
            for name in ("photos", *others):
                unpack(name, folder)
            yield folder

    def files(self, folder, every=1):
        """Return every ``every``-th file under a folder, sorted; at most 8 in a quick run."""
        found = sorted(os.path.join(top, n) for top, _, names in os.walk(folder) for n in names)
        return found[::every][: 8 if self.quick else None]

    def interleaved(self, ways, clock=time.process_time):
        """What each way adds to the clock, round by round, every round in another order.

        Args:
            ways: Functions by name.
            clock: Returns a number, or an array of several.
        """
        found = {name: [] for name in ways}
        shuffled = random.Random(0)
        for _ in range(self.rounds):
            for name in shuffled.sample(list(ways), len(ways)):
                begun = clock()
                ways[name]()
                found[name].append(clock() - begun)
        return found

    def compare(self, title, ways, clock=time.process_time, *, per=1):
        """The same, with a table of milliseconds per item of ``per``."""
        seconds = self.interleaved(ways, clock)
        rows = [
            {"": str(name), "ms": Quartiles(1000 * s / per for s in each)}
            for name, each in seconds.items()
        ]
        self.show(title, rows)
        return seconds

    def worker(self, function, *arguments):
        """What a function of the benchmark returns in a process of its own."""
        command = [sys.executable, "-m", "benchmarks", self.subject, "--worker", function]
        done = subprocess.run(
            [*command, *map(str, arguments)], stdout=subprocess.PIPE, check=True, cwd=ROOT
        )
        return json.loads(done.stdout.splitlines()[-1])

    def show(self, title, rows, form=".3g"):
        """Print rows of one kind as a table, and keep them."""
        self.results[title] = rows
        cells = (r.values() for r in rows)
        lines = [[v if isinstance(v, str | int) else format(v, form) for v in c] for c in cells]
        print(f"\n{title}\n{table(list(rows[0]), lines)}\n")

    def target(self, what, value, *, least=None, most=None):
        """Print and keep whether a figure, or the median of its quartiles, keeps to its limit."""
        value = float(getattr(value, "median", value))
        met = value <= most if least is None else value >= least
        limit = f"at most {most}" if least is None else f"at least {least}"
        print(f"{'met   ' if met else 'MISSED'}  {what}: {value:.4g} (target: {limit})")
        self.targets.append({"what": what, "value": value, "limit": limit, "met": bool(met)})

    def save(self, path):
        """Write the figures with machine, versions and date."""
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}
        machine = {"python": platform.python_version(), "load": os.getloadavg()[0]}
        report = {
            "benchmark": self.subject,
            "rounds": self.rounds,
            "machine": stamp() | machine | {"versions": versions},
            "targets": self.targets,
            "results": self.results,
        }
        with open(path, "w") as file:
            json.dump(report, file, indent=1)
        print(f"figures: {path}")
