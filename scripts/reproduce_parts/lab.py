"""Where the evidence's data, runs and results are: datasets encoded once, one line a training run,
one JSON file an experiment.
"""

import dataclasses
import datetime
import json
import os
import tarfile
import tempfile

import pcrshard
from pcrshard.testing import make_jpeg

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCANS = (1, 2, 5, "full")
SAMPLES_PER_SHARD = 64


@dataclasses.dataclass(frozen=True)
class Task:
    """A classification task; ``coarse`` gives each class the number of its coarse class,
    ``coarse_name`` says what that is.
    """

    name: str
    epochs: int
    coarse: tuple[int, ...] = ()
    coarse_name: str = ""


# In the order of the classes' names. Daisies, dandelions and sunflowers are Asteraceae; akiec, bcc
# and mel are malignant or nearly so.
TASKS = (
    Task("flowers", 10, (0, 0, 1, 0, 1), "Asteraceae or not, 2 classes"),
    Task("signs", 12, (0, 0, 0, 0, 0, 0, 1, 1, 1, 1), "0 to 5 or 6 to 9"),
    Task("ham224", 12, (1, 1, 0, 0, 1, 0, 0), "malignant or benign, 2 classes"),
)
QUICK_TASKS = (Task("waves", 2, (0, 1), "two"), Task("ripples", 2, (0, 1), "two"))


@dataclasses.dataclass
class Lab:
    """Settings of a reproduction: where results go, what the tasks are, how long training is."""

    out: str
    quick: bool = False
    fresh: bool = False
    existing: bool = False  # train nothing: use the runs that are there
    scale: int = 1  # times the epochs, seeds and pictures, for a machine with a GPU

    def __post_init__(self):
        os.makedirs(self.out, exist_ok=True)
        name = f"pcrshard-evidence-{os.getuid()}{'-quick' if self.quick else ''}"
        self.cache = os.path.join(tempfile.gettempdir(), name)
        self.networks = os.path.join(self.cache, "networks")  # checkpoints: gigabytes
        self.tasks = QUICK_TASKS if self.quick else TASKS
        self.seeds = (0, 1) if self.quick else (0, 1, 2)
        self.size = 32 if self.quick else 64
        self.renewed = set()

    def task(self, number):
        """A task by number; a quick reproduction has two only."""
        return self.tasks[min(number, len(self.tasks) - 1)]

    def photos(self):
        """Folders of photographs, by name of the set."""
        if self.quick:
            return {
                task.name: os.path.join(self._pictures(), task.name, "train") for task in self.tasks
            }
        folder = self._unpacked("photos")
        return {
            name: os.path.join(folder, name)
            for name in ("imagenet", "ham10000", "cars", "faces_1024")
        }

    def dataset(self, name, split=None, script="standard"):
        """The folder of an encoded dataset: a task's split, or a set of photographs."""
        target = os.path.join(
            self.cache,
            "shards" if script == "standard" else f"shards-{script}",
            name,
            split or "all",
        )
        if not os.path.exists(os.path.join(target, "pcr.json")):
            if split is None:
                source = self.photos()[name]
            else:
                source = os.path.join(self.classify(name), split)
            per_shard = 16 if self.quick else SAMPLES_PER_SHARD
            options = pcrshard.EncodeOptions(
                samples_per_shard=per_shard, fmt=pcrshard.ShardFormat(script)
            )
            # A run that was stopped has left some shards.
            pcrshard.encode(source, target, options, workers=1, resume=True)
        return target

    def index(self, name, split=None, script="standard"):
        return pcrshard.open_dataset(self.dataset(name, split, script))[0]

    def classify(self, name):
        """The folder of a task's pictures: SPLIT/CLASS/FILE."""
        return os.path.join(self._pictures() if self.quick else self._unpacked("classify"), name)

    def _unpacked(self, name):
        """A tar of shared/data, unpacked once."""
        data = os.environ.get("PCRSHARD_DATA") or os.path.join(
            os.path.dirname(ROOT), "shared", "data"
        )
        target = os.path.join(self.cache, name)
        if not os.path.exists(target):
            path = os.path.join(data, f"{name}.tar")
            if not os.path.exists(path):
                raise SystemExit(
                    f"needs {name}.tar: set PCRSHARD_DATA to the folder that holds it, or say "
                    "--quick"
                )
            with (
                tempfile.TemporaryDirectory(dir=_made(self.cache)) as folder,
                tarfile.open(path) as tar,
            ):
                tar.extractall(folder, filter="data")
                os.rename(os.path.join(folder, name), target)
        return target

    def _pictures(self):
        """Synthetic pictures in place of photographs: TASK/SPLIT/CLASS/FILE, classes of different
        quality and texture.
        """
        folder = os.path.join(self.cache, "pictures")
        if os.path.exists(folder):
            return folder
        with tempfile.TemporaryDirectory(dir=_made(self.cache)) as temporary:
            for t, task in enumerate(self.tasks):
                for s, (split, count) in enumerate((("train", 64), ("val", 32))):
                    for i in range(count):
                        target = _made(os.path.join(temporary, "p", task.name, split, "ab"[i % 2]))
                        with open(os.path.join(target, f"{i:03d}.jpg"), "wb") as file:
                            file.write(
                                make_jpeg(
                                    1000 * (2 * t + s) + i, 64, 64, "RGB", quality=(25, 92)[i % 2]
                                )
                            )
            os.rename(os.path.join(temporary, "p"), folder)
        return folder

    def load(self, name):
        """An experiment's results, or ``None``."""
        path = os.path.join(self.out, f"{name}.json")
        if not os.path.exists(path):
            return None
        with open(path) as file:
            return json.load(file)

    def save(self, name, results):
        """Keep an experiment's results, whole or not at all."""
        report = {"experiment": name, "quick": self.quick, **stamp(), "results": results}
        write(os.path.join(self.out, f"{name}.json"), json.dumps(report, indent=1) + "\n")
        return report

    def rows(self, name):
        """What ``append`` has kept: one row a run or a block."""
        path = self._rows(name)
        if not os.path.exists(path):
            return []
        with open(path) as file:
            return [json.loads(line) for line in file if line.strip()]

    def append(self, name, row):
        """Keep a row as its run ends."""
        with open(self._rows(name), "a") as file:
            file.write(json.dumps(row) + "\n")

    def _rows(self, name):
        return os.path.join(self.out, f"{name}-rows.jsonl")

    def figure(self, name):
        return os.path.join(self.out, f"{name}.png")


def stamp():
    """When, and on what; nothing that names the machine."""
    with open("/proc/cpuinfo") as file:
        cpu = next(
            (line.partition(":")[2].strip() for line in file if line.startswith("model name")),
            "unknown",
        )
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"date": now, "cpu": cpu, "cores": len(os.sched_getaffinity(0))}


def write(path, text):
    """A file that appears whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(path)), suffix=".tmp")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


def _made(folder):
    os.makedirs(folder, exist_ok=True)
    return folder
