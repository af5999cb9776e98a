"""pcrshard beside the other loaders, on the same photographs, each in its own environment.

Parts are questions, each adds a round to the rows: prepare (time and size), cpu (images a CPU
second, and a second), tars (plain tars as they are, and what others make of them, one worker),
memory, link (20 MB/s, also four times as many images, and 80 MB/s). A quick run asks pcrshard's own
adapters only, which need no environment.
"""

import contextlib
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
from adapters import FORMS, PEERS, SHARD_IMAGES
from environments import python_of

from ..server import serve

# 780 images are enough where nothing is waited for; a link needs more, because the first seconds of
# an epoch are unlike the others.
COPIES = {"data": 3, "data-link": 12}
LINKS = ((20e6, "data"), (20e6, "data-link"), (80e6, "data"))  # bytes a second, which set
LIMIT_S = {"write": 180, "epoch": 75}
# Measured once.
KEPT = ("imread", "once", "versions")
QUICK = ("pcrshard scan 5", "pcrshard scan 5, threads")
# The same tars, as they are or in the form that a loader makes of them.
TARS = (
    "pcrshard tars",
    "pcrshard tars, threads",
    "pcrshard full, threads",
    "pcrshard scan 5, threads",
    "WebDataset pil",
    "WebDataset tuned",
    "Energon",
    "Energon tuned",
)
S3 = {
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

    def folder(self, form, data="data"):
        """The images in a form, written if they are not there."""
        folder = os.path.join(self.top, data, form)
        if not os.path.exists(os.path.join(folder, "shards")):
            self.write(form, folder, data)
        return folder

    def write(self, form, folder, data="data"):
        """The images in a form; what that took."""
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        source = next(iter(self.lab.photos().values()))
        files = sorted(os.path.join(top, n) for top, _, names in os.walk(source) for n in names)
        labels = sorted({os.path.dirname(path) for path in files})
        images = [(path, labels.index(os.path.dirname(path))) for path in files] * COPIES[data]
        listed = os.path.join(self.top, data, "images.json")
        with open(listed, "w") as file:
            json.dump(images, file)
        found = self.call(FORMS[form][0], form, "write", images=listed, folder=folder)
        with open(os.path.join(folder, "shards"), "w") as file:
            file.write(str(-(-len(images) // SHARD_IMAGES)))
        return found

    def epoch(self, name, folder, epochs=1, **options):
        """What a peer's worker says of some epochs, or None."""
        options = {"folder": folder, "workers": 2, "epochs": epochs} | options
        return self.call(PEERS[name].environment, name, "epoch", **options)

    def call(self, environment, name, action, **options):
        """What a worker says in an environment, or None."""
        python = python_of(environment, os.path.join(self.top, "environments"))
        if python is None:
            return None
        variables = {
            "OMP_NUM_THREADS": "1",
            "HF_HOME": os.path.join(self.scratch, "hf"),
            "HF_HUB_OFFLINE": "1",
            "PEERS_SCRATCH": self.scratch,
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        if "endpoint" in options:
            variables |= dict.fromkeys(("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL"), options["endpoint"])
        worker = os.path.join(os.path.dirname(__file__), "worker.py")
        process = subprocess.Popen(
            [python, worker, name, action, json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | S3 | variables,
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
        known = {run["form"] for run in self.lab.rows() if run["question"] == "prepare"}
        for form in dict.fromkeys(PEERS[name].form for name in self.names):
            folder = os.path.join(self.top, "data", form)
            figures = None if form in known else self.write(form, folder)
            if figures is not None:
                files = [os.path.join(top, n) for top, _, names in os.walk(folder) for n in names]
                size = sum(map(os.path.getsize, files))
                self.add("prepare", form, figures, form=form, bytes=size)

    def cpu(self):
        for workers in (1, 2):
            for name in self.names:
                self.second_epoch("cpu", name, workers)

    def tars(self):
        for name in filter(TARS.__contains__, self.names):
            self.second_epoch("tars", name, 1)

    def second_epoch(self, question, name, workers):
        """What a second epoch takes, from the page cache."""
        said = self.epoch(name, self.folder(PEERS[name].form), 2, workers=workers)
        if said is not None:
            first, second = said["epochs"]
            figures = {**second, "first": first["first"], "cold_cpu": first["cpu"]}
            self.add(question, name, figures, workers=workers)

    def memory(self):
        for name in self.names:
            said = self.epoch(name, self.folder(PEERS[name].form), memory=True)
            if said is not None:
                self.add("memory", name, {"peak_bytes": said["peak_bytes"]})

    def link(self):
        for rate, data in LINKS:
            for name in [name for name in self.names if PEERS[name].server]:
                folder = self.folder(PEERS[name].form, data)
                with serve(folder, rate) as (url, link):
                    place = "s3://bucket/" if PEERS[name].server == "s3" else url
                    said = self.epoch(name, folder, server=place, endpoint=url)
                if said is not None:
                    figures = said["epochs"][0] | {"bytes": link.bytes}
                    self.add("link", name, figures, rate=rate, data=data)


def measure(lab, parts=()):
    """A round of some questions, or of all."""
    peers = Peers(lab)
    for question in parts or ("prepare", "cpu", "tars", "memory", "link"):
        getattr(peers, question)()
