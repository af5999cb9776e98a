"""Where the evidence's data and results are: datasets encoded once, rows appended as runs end."""

import collections
import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import tarfile
import tempfile
from typing import NamedTuple

import pcrshard
from pcrshard import storage
from pcrshard.testing import make_jpeg

from . import ROOT, pages

SCANS = (1, 2, 5, "full")
SAMPLES_PER_SHARD = 64


class Task(NamedTuple):
    """A classification task, and how long a network is trained on it."""

    name: str
    epochs: int


TASKS = (Task("flowers", 10), Task("signs", 12), Task("ham224", 12))
QUICK_TASKS = (Task("waves", 2), Task("ripples", 2))
QUICK_SPLITS = (("train", 64), ("val", 32))


@dataclasses.dataclass
class Lab:
    """Where a subject's results go, what the tasks are, and how long training is."""

    root: str
    subject: str
    quick: bool = False
    scale: int = 1  # times the epochs, seeds and pictures, for a machine with a GPU

    def __post_init__(self):
        self.out = os.path.join(self.root, self.subject)
        os.makedirs(self.out, exist_ok=True)
        name = f"pcrshard-evidence-{os.getuid()}{'-quick' if self.quick else ''}"
        self.cache = os.path.join(tempfile.gettempdir(), name)
        self.tasks = QUICK_TASKS if self.quick else TASKS
        self.seeds = (0, 1) if self.quick else (0, 1, 2)
        self.size = 32 if self.quick else 64

    def beside(self, subject):
        """The same settings for another subject, whose results are read."""
        return dataclasses.replace(self, subject=subject)

    def task(self, number):
        """A task by number; a quick reproduction has two only."""
        return self.tasks[min(number, len(self.tasks) - 1)]

    # Data

    def photos(self):
        """Folders of photographs, by name of the set."""
        if self.quick:
            return {
                task.name: os.path.join(self.classify(task.name), "train") for task in self.tasks
            }
        folder = self.unpacked("photos")
        return {
            name: os.path.join(folder, name)
            for name in ("imagenet", "ham10000", "cars", "faces_1024")
        }

    def dataset(self, name, split=None, script="standard", shares=()):
        """The folder of an encoded dataset: a task's split, or a set of photographs. Levels may
        have shares of the bytes of their own.
        """
        shards = "shards" if script == "standard" else f"shards-{script}"
        target = os.path.join(self.cache, shards, name, split or "all")
        if not os.path.exists(os.path.join(target, "pcr.json")):
            source = os.path.join(self.classify(name), split) if split else self.photos()[name]
            options = pcrshard.EncodeOptions(
                samples_per_shard=16 if self.quick else SAMPLES_PER_SHARD,
                fmt=pcrshard.ShardFormat(script, level_shares=shares),
            )
            # A run that was stopped has left some shards.
            pcrshard.encode(source, target, options, workers=1, resume=True)
        return target

    def index(self, name, split=None, script="standard"):
        """The dataset index of the same."""
        return pcrshard.open_dataset(self.dataset(name, split, script))[0]

    def classify(self, name):
        """The folder of a task's pictures: SPLIT/CLASS/FILE."""
        return os.path.join(self._pictures() if self.quick else self.unpacked("classify"), name)

    def unpacked(self, name):
        """A tar of shared/data, unpacked once."""
        target = os.path.join(self.cache, name)
        if not os.path.exists(target):
            with made_whole(target) as folder:
                unpack(name, folder)
        return target

    def _pictures(self):
        """Synthetic pictures in place of photographs: TASK/SPLIT/CLASS/FILE, classes of different
        quality and texture.
        """
        target = os.path.join(self.cache, "pictures")
        if not os.path.exists(target):
            with made_whole(target) as folder:
                parts = [(task.name, *part) for task in self.tasks for part in QUICK_SPLITS]
                for number, (task, split, count) in enumerate(parts):
                    for i in range(count):
                        name = os.path.join(folder, "pictures", task, split, "ab"[i % 2])
                        os.makedirs(name, exist_ok=True)
                        jpeg = make_jpeg(1000 * number + i, 64, 64, quality=(25, 92)[i % 2])
                        with open(os.path.join(name, f"{i:03d}.jpg"), "wb") as file:
                            file.write(jpeg)
        return target

    # Results

    def path(self, name):
        """A file of the subject's results."""
        return os.path.join(self.out, name)

    def load(self, name, key="results"):
        """What was measured of a part, or ``None``."""
        if not os.path.exists(self.path(f"{name}.json")):
            return None
        with open(self.path(f"{name}.json")) as file:
            report = json.load(file)
        return report[key]

    def read(self, name):
        """What was measured of a part; raises NotMeasured without it."""
        found = self.load(name)
        if found is None:
            raise pages.NotMeasured
        return found

    def values(self):
        """What the subject's page is made of: every file's results, their dates, and what
        ``figures.py`` computes of them.
        """
        values = {"dates": {}, "made": {}}
        for file in os.listdir(self.out):
            name, ending = os.path.splitext(file)
            key = name.replace("-", "_")
            if ending == ".json":
                values[key] = self.load(name)
                values["dates"][key] = self.load(name, "date")[:10]
                with contextlib.suppress(KeyError):
                    values["made"][key] = {part: self.load(name, part) for part in versions()}
            elif ending == ".jsonl":
                values[key] = self.rows(name)
        figures = f"{__package__}.{self.subject}.figures"
        if importlib.util.find_spec(figures):
            for section in importlib.import_module(figures).SECTIONS:
                with contextlib.suppress(pages.NotMeasured):
                    values[section.__name__] = section(self)
        return values

    def save(self, name, results):
        """Keep what was measured of a part, whole or not at all, and return it."""
        report = {"experiment": name, "quick": self.quick} | stamp() | versions()
        report["results"] = results
        self.write(f"{name}.json", json.dumps(report, indent=1) + "\n")
        return results

    def write(self, name, text):
        """Write a file of the subject's results, whole or not at all."""
        with storage.atomic_write(self.path(name)) as file:
            file.write(text.encode())

    def measured(self, name, measure):
        """The results of a part, measured unless they are there."""
        found = self.load(name)
        if found is None:
            print(f"{self.subject}: {name}", flush=True)
            found = self.save(name, measure())
        return found

    def rows(self, name="runs"):
        """What ``append`` has kept: a row for each run."""
        if not os.path.exists(self.path(f"{name}.jsonl")):
            return []
        with open(self.path(f"{name}.jsonl")) as file:
            return [json.loads(line) for line in file if line.strip()]

    def missing(self, wanted, name="runs"):
        """Yield the keys (parts of rows) that no kept row contains, reading the rows each time."""
        for key in wanted:
            if not any(key.items() <= row.items() for row in self.rows(name)):
                yield key

    def append(self, row, name="runs"):
        """Keep a row as its run ends, with what measured it, and print its figures."""
        row = row | versions() | row
        with open(self.path(f"{name}.jsonl"), "a") as file:
            file.write(json.dumps(row) + "\n")
        figures = (str, int, float)
        print({k: v for k, v in row.items() if k == "spec" or isinstance(v, figures)}, flush=True)

    def forget(self, parts=(), kept=()):
        """Remove what was measured: some parts, or all of the subject but what is kept."""
        for name in os.listdir(self.out):
            part, ending = os.path.splitext(name)
            wanted = part in parts if parts else part not in kept
            if wanted and ending in (".json", ".jsonl"):
                os.remove(self.path(name))

    def sources(self):
        """For each data file, its rows by the commit and the PyTorch that measured them.

        Rows whose commit was not kept have the one that recorded them, whose program they are of.

        Raises:
            ValueError: A row says neither.
        """
        found = {}
        for file in sorted(os.listdir(self.out)):
            name, ending = os.path.splitext(file)
            if ending not in (".json", ".jsonl"):
                continue
            if ending == ".jsonl":
                rows = self.rows(name)
            else:
                with open(self.path(file)) as opened:
                    rows = [json.load(opened)]
            counts = collections.Counter(map(source_of, rows))
            if None in counts:
                raise ValueError(f"{self.path(file)}: a row has no commit and versions")
            found[file] = counts
        return found


def source_of(row):
    """Return what measured a row, in words; ``None`` if it does not say."""
    if {"commit", "torch"} <= row.keys():
        return f"{row['commit']}, PyTorch {row['torch']}"
    return f"recorded in {row['recorded']}" if "recorded" in row else None


def stamp():
    """When, and on what; nothing that names the machine."""
    with open("/proc/cpuinfo") as file:
        models = re.findall(r"model name\s*: (.+)", file.read())
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"date": now, "cpu": [*models, ""][0], "cores": len(os.sched_getaffinity(0))}


def versions():
    """What measured a row: the commit, and PyTorch."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return {"commit": found.stdout.strip(), "torch": str(importlib.metadata.version("torch"))}


def unpack(name, folder):
    """Unpack a tar of shared/data."""
    beside = os.path.join(os.path.dirname(ROOT), "shared", "data")
    path = os.path.join(os.environ.get("PCRSHARD_DATA") or beside, f"{name}.tar")
    if not os.path.exists(path):
        raise SystemExit(f"needs {name}.tar: set PCRSHARD_DATA to the folder that holds it")
    with tarfile.open(path) as tar:
        tar.extractall(folder, filter="data")


@contextlib.contextmanager
def made_whole(target):
    """A folder in which a folder of the target's name is put together, which then moves there."""
    top, name = os.path.split(target)
    os.makedirs(top, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=top) as folder:
        yield folder
        os.rename(os.path.join(folder, name), target)
