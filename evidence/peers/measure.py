"""pcrshard beside the other loaders, on the same photographs, each in its own environment.

Parts are questions, each adds a round to the rows: prepare (time and size), cpu (images a CPU
second, and a second), memory, link (20 MB/s, also four times as many images, and 80 MB/s). A quick
run asks pcrshard's own adapters only, which need no environment.
"""

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

# Workers run these modules in environments without this package.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from adapters import PEERS, SHARD_IMAGES
from environments import python_of
from server import SlowServer

# 780 images are enough where nothing is waited for; a link needs more, because the first seconds of
# an epoch are unlike the others.
COPIES = {"data": 3, "data-link": 12}
LINKS = ((20e6, "data"), (20e6, "data-link"), (80e6, "data"))  # bytes a second, which set
LIMIT_S = {"prepare": 180, "epoch": 75}
# Measured once.
KEPT = ("imread", "once", "versions")
QUICK = ("pcrshard scan 5", "pcrshard scan 5, threads")
SERVED = {
    "AWS_ACCESS_KEY_ID": "peers",
    "AWS_SECRET_ACCESS_KEY": "peers",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}


class Peers:
    """Where the peers' data are, and rows of what they did."""

    def __init__(self, lab):
        self.lab = lab
        self.top = os.path.join(lab.cache, "peers")
        self.scratch = os.path.join(self.top, "scratch")
        os.makedirs(self.scratch, exist_ok=True)
        self.names = list(QUICK if lab.quick else PEERS)
        random.shuffle(self.names)  # whoever comes after whom, and what a time limit cuts off
        self.python = functools.cache(
            lambda environment: python_of(environment, os.path.join(self.top, "environments"))
        )

    def folder(self, name, data="data"):
        """A peer's form of the images, written if it is not there."""
        folder = os.path.join(self.top, data, PEERS[name].form)
        if not os.path.exists(os.path.join(folder, "shards")):
            self.write(name, folder, data)
        return folder

    def write(self, name, folder, data="data"):
        """The images in a peer's form; what that took."""
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        images = self.images(data)
        listed = os.path.join(self.top, data, "images.json")
        with open(listed, "w") as file:
            json.dump(images, file)
        found = self.call(name, "prepare", images=listed, folder=folder)
        with open(os.path.join(folder, "shards"), "w") as file:
            # A server does not tell how many there are.
            file.write(str(-(-len(images) // SHARD_IMAGES)))
        return found

    def images(self, data):
        """Copies of the ImageNet photographs, as a list of (path, label)."""
        source = next(iter(self.lab.photos().values()))
        files = sorted(os.path.join(top, n) for top, _, names in os.walk(source) for n in names)
        labels = sorted({os.path.dirname(path) for path in files})
        return [(path, labels.index(os.path.dirname(path))) for path in files] * COPIES[data]

    def call(self, name, action, **options):
        """What a peer's worker says in its environment, or None."""
        python = self.python(PEERS[name].environment)
        if python is None:
            return None
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HOME": os.path.join(self.scratch, "hf"),
            "HF_HUB_OFFLINE": "1",
            "PEERS_SCRATCH": self.scratch,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            **options.pop("environment", {}),
        }
        worker = os.path.join(os.path.dirname(__file__), "worker.py")
        process = subprocess.Popen(
            [python, worker, name, action, json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            out, error = process.communicate(timeout=LIMIT_S[action])
            if process.returncode == 0 and out.strip():
                return json.loads(out.strip().splitlines()[-1])
            reason = (error.strip().splitlines() or ["no output"])[-1]
        except subprocess.TimeoutExpired:
            reason = f"not finished in {LIMIT_S[action]} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
        print(f"  {name}, {action}: {reason}", flush=True)
        return None

    def add(self, question, name, figures, **conditions):
        """Keep a row."""
        row = {"question": question, "peer": name, **conditions, **figures, "at": time.time()}
        self.lab.append(row)

    # The questions

    def prepare(self):
        """Each form once: the time, the CPU time and the bytes."""
        forms = {run["form"] for run in self.lab.rows() if run["question"] == "prepare"}
        for name in self.names:
            form = PEERS[name].form
            folder = os.path.join(self.top, "data", form)
            figures = None if form in forms else self.write(name, folder)
            if figures is not None:
                forms.add(form)
                self.add("prepare", name, figures, form=form, bytes=_tree_bytes(folder))

    def cpu(self):
        for workers in (1, 2):
            for name in self.names:
                said = self.call(name, "epoch", folder=self.folder(name), workers=workers, epochs=2)
                if said is not None:
                    first, second = said["epochs"]
                    figures = {**second, "first": first["first"], "cold_cpu": first["cpu"]}
                    self.add("cpu", name, figures, workers=workers)

    def memory(self):
        for name in self.names:
            folder = self.folder(name)
            said = self.call(name, "epoch", folder=folder, workers=2, epochs=1, memory=True)
            if said is not None:
                self.add("memory", name, {"peak_bytes": said["peak_bytes"]})

    def link(self):
        for rate, data in LINKS:
            for name in [name for name in self.names if PEERS[name].streams]:
                options = {"folder": self.folder(name, data), "workers": 2, "epochs": 1}
                with SlowServer(options["folder"], rate) as server:
                    ends = {"S3_ENDPOINT_URL": server.url, "AWS_ENDPOINT_URL": server.url}
                    options |= {"server": server.url, "environment": SERVED | ends}
                    said = self.call(name, "epoch", **options)
                if said is not None:
                    figures = said["epochs"][0] | {"bytes": server.link.bytes}
                    self.add("link", name, figures, rate=rate, data=data)


def _tree_bytes(top):
    return sum(
        os.path.getsize(os.path.join(folder, name))
        for folder, _, names in os.walk(top)
        for name in names
    )


QUESTIONS = ("prepare", "cpu", "memory", "link")


def measure(lab, parts=()):
    """A round of some questions, or of all."""
    peers = Peers(lab)
    for question in parts or QUESTIONS:
        getattr(peers, question)()
