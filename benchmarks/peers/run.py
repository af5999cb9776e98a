"""Measures pcrshard beside the other loaders, on the same photographs, each in its own environment.

    python benchmarks/peers/run.py                 everything: three hours on two cores
    python benchmarks/peers/run.py cpu --rounds 1  one question, one round more

Figures are added to the JSON file, so that rounds can be measured one by one. The questions:
prepare (time and size), cpu (images a CPU second, and a second), memory, link (20 MB/s, also four
times as many images, and 80 MB/s), cache (a second epoch with half of the originals' bytes on
disk), resume (in another process, from the middle of an epoch), corrupt (one shard with 16 bytes
inverted).
"""

import argparse
import contextlib
import inspect
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
from damage import damaged_copy
from environments import ENVIRONMENTS, python_of, versions
from resume import WAYS, compare
from server import SlowServer
from stores import PEERS, SHARD_IMAGES

# 780 images are enough where nothing is waited for; a link needs more, because the first seconds of
# an epoch are unlike the others.
COPIES = {"data": 3, "data-link": 12}
WORKERS = (1, 2)
LINKS = ((20e6, "data"), (20e6, "data-link"), (80e6, "data"))  # bytes a second, which set
LIMIT_S = {"prepare": 180, "epoch": 75, "part": 75, "pixels": 45}
CACHED = (
    "pcrshard scan 2",
    "pcrshard scan 5",
    "pcrshard scan 5, threads",
    "pcrshard full",
    "WebDataset .pcr_scan(5)",
    "WebDataset tuned",
    "256 px tuned",
    "MosaicML tuned",
    "LitData tuned",
)
CACHE_RATE = 20e6
CACHE_BYTES = 41_350_000  # half of the photographs
STOP_AFTER = 48  # batches, of 97
PLACES = (0.3, 0.5, 0.7)  # of a shard, and of the list of shards
QUESTIONS = ("prepare", "cpu", "memory", "link", "cache", "resume", "corrupt")
# They read as their plain twins do.
SAME_BYTES = {"LitData tuned", "MosaicML tuned", "Grain tuned"}
SKIPS = {"WebDataset .pcr_scan(5)", "WebDataset pil", "WebDataset tuned"}  # by a handler
SERVED = {
    "AWS_ACCESS_KEY_ID": "peers",
    "AWS_SECRET_ACCESS_KEY": "peers",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}


class Bench:
    """Where things are, and what was measured."""

    def __init__(self, args):
        self.args = args
        self.scratch = os.path.join(args.cache, "scratch")
        os.makedirs(self.scratch, exist_ok=True)
        self.results = {"runs": [], "versions": {}, "failures": {}}
        if os.path.exists(args.json):
            with open(args.json) as file:
                self.results = json.load(file)
        self.pythons = {}

    def folder(self, name, data="data"):
        return os.path.join(self.args.cache, data, PEERS[name].form)

    def images(self, data="data"):
        return os.path.join(self.args.cache, data, "images.json")

    def find_images(self, data="data"):
        """Copies of the ImageNet photographs, as a list of (path, label)."""
        top = os.path.join(self.args.cache, data)
        os.makedirs(top, exist_ok=True)
        if not os.path.exists(self.images(data)):
            from common import jpeg_files, photos

            target = os.path.join(top, "photographs")
            with photos() as folder:
                shutil.copytree(f"{folder}/photos/imagenet", target, dirs_exist_ok=True)
            files = jpeg_files(target)
            labels = sorted({os.path.dirname(path) for path in files})
            images = [(path, labels.index(os.path.dirname(path))) for path in files]
            with open(self.images(data), "w") as file:
                json.dump(images * COPIES[data], file)

    def python(self, name):
        environment = PEERS[name].environment
        if environment not in self.pythons:
            self.pythons[environment] = python_of(environment, self.args.environments)
        return self.pythons[environment]

    def call(self, name, action, **options):
        """Run a peer's worker; its figures, or None with the reason kept."""
        python = self.python(name)
        if python is None:
            self.results["failures"][name] = f"cannot be installed: {ENVIRONMENTS}"
            return None
        if name not in self.results["versions"]:
            self.results["versions"][name] = versions(python, PEERS[name].packages)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HOME": os.path.join(self.scratch, "hf"),
            "HF_HUB_OFFLINE": "1",
            "PEERS_SCRATCH": self.scratch,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            **options.pop("environment", {}),
        }
        command = [python, os.path.join(HERE, "worker.py"), name, action, json.dumps(options)]
        worker = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            out, error = worker.communicate(timeout=LIMIT_S[action])
            lines = out.strip().splitlines()
            if worker.returncode == 0 and lines:
                return json.loads(lines[-1])
            reason = (error.strip().splitlines() or ["no output"])[-1]
        except subprocess.TimeoutExpired:
            reason = f"not finished in {LIMIT_S[action]} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)  # with the processes that it started
        print(f"  {name}: {reason}")
        self.results["failures"][f"{name}, {action}"] = reason
        return None

    def add(self, question, name, figures, **conditions):
        if figures is not None:
            for action in LIMIT_S:
                self.results["failures"].pop(f"{name}, {action}", None)
            self.results["runs"].append(
                {"question": question, "peer": name, **conditions, **figures, "at": time.time()}
            )
            with open(self.args.json, "w") as file:
                json.dump(self.results, file, indent=1)

    def prepare(self):
        """Each form once: the time, the CPU time and the bytes."""
        done = {run["form"] for run in self.results["runs"] if run["question"] == "prepare"}
        for name in self.args.peers:
            form = PEERS[name].form
            if form in done:
                continue
            folder = self.folder(name)
            figures = self.write(name)
            if figures is None:
                continue
            done.add(form)
            size = tree_bytes(folder)
            self.add("prepare", name, figures, form=form, bytes=size)
            print(f"{form:12} {figures['wall']:7.1f} s {size / 1e6:8.1f} MB")

    def write(self, name, data="data"):
        """The images in a peer's form."""
        folder = self.folder(name, data)
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        figures = self.call(name, "prepare", images=self.images(data), folder=folder)
        with open(self.images(data)) as images, open(f"{folder}/shards", "w") as file:
            # A server does not tell how many there are.
            file.write(str(-(-len(json.load(images)) // SHARD_IMAGES)))
        return figures

    def cpu(self):
        for workers in self.args.workers:
            for name in self.args.peers:
                folder = self.folder(name)
                said = self.call(name, "epoch", folder=folder, workers=workers, epochs=2)
                if said is not None:
                    first, second = said["epochs"]
                    figures = {**second, "first": first["first"], "cold_cpu": first["cpu"]}
                    self.add("cpu", name, figures, workers=workers)
                    rate = second["images"] / second["cpu"]
                    wall = second["images"] / second["wall"]
                    print(f"{workers} {name:26} {rate:7.0f}/CPU s {wall:7.0f}/s", flush=True)

    def memory(self):
        for name in self.args.peers:
            folder = self.folder(name)
            said = self.call(name, "epoch", folder=folder, workers=2, epochs=1, memory=True)
            if said is not None:
                self.add("memory", name, {"peak_bytes": said["peak_bytes"]})
                print(f"{name:26} {said['peak_bytes'] / 1e6:7.0f} MB", flush=True)

    def link(self):
        streaming = [name for name in self.args.peers if PEERS[name].streams]
        self.make_long(streaming)
        for rate, data in LINKS:
            for name in streaming:
                folder = self.folder(name, data)
                said, sent = self.over_link(name, "epoch", rate, folder=folder, workers=2, epochs=1)
                if said is not None:
                    figures = {**said["epochs"][0], **sent}
                    self.add("link", name, figures, rate=rate, data=data)
                    print(
                        f"{rate / 1e6:3.0f} MB/s {name:26} {figures['images']} images, "
                        f"{figures['images'] / figures['wall']:7.0f}/s "
                        f"{figures['bytes'] / 1e6:7.1f} MB, first after {figures['first']:.2f} s",
                        flush=True,
                    )

    def make_long(self, names, data="data-link"):
        """More copies of the images, for who has not got them."""
        self.find_images(data)
        for name in names:
            if not os.path.exists(os.path.join(self.folder(name, data), "shards")):
                self.write(name, data)

    def over_link(self, name, action, rate, **options):
        """What a worker says whose data come over a link, and what the link carried."""
        with SlowServer(options["folder"], rate) as server:
            ends = {"S3_ENDPOINT_URL": server.url, "AWS_ENDPOINT_URL": server.url}
            environment = SERVED | ends | options.pop("environment", {})
            said = self.call(name, action, server=server.url, environment=environment, **options)
            return said, {"bytes": server.link.bytes, "requests": server.link.requests}

    def cache(self):
        for name in filter(CACHED.__contains__, self.args.peers):
            with tempfile.TemporaryDirectory(dir=self.scratch) as cache:
                said, _ = self.over_link(
                    name,
                    "epoch",
                    CACHE_RATE,
                    folder=self.folder(name),
                    workers=2,
                    epochs=2,
                    more={"cache": [cache, CACHE_BYTES]},
                )
                held = tree_bytes(cache)
            if said is not None:
                first, second = said["epochs"]
                figures = {**second, "first_epoch": first["wall"], "held": held}
                figures["first_bytes"] = first["bytes"]
                self.add("cache", name, figures)
                print(
                    f"{name:26} epochs of {first['wall']:5.1f} and {second['wall']:5.1f} s, "
                    f"{first['bytes'] / 1e6:5.1f} and {second['bytes'] / 1e6:5.1f} MB; "
                    f"{held / 1e6:.1f} MB on disk",
                    flush=True,
                )

    def resume(self):
        names = [name for name in self.args.peers if name in WAYS]
        self.make_long(names)
        for name in names:
            with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
                whole = self.part(name, os.path.join(folder, "whole"), None)
                state = os.path.join(folder, "state")
                before = self.part(name, state, STOP_AFTER)
                after = self.part(name, state, None)
            if None not in (whole, before, after):
                figures = {
                    **compare(whole["batches"], before["batches"], after["batches"]),
                    "first": after["first"],
                    "first_of_whole": whole["first"],
                    "bytes": after["bytes"],
                    "bytes_of_whole": whole["bytes"],
                    "streams": PEERS[name].streams,
                }
                self.add("resume", name, figures)
                print(f"{name:26} {figures}", flush=True)

    def part(self, name, state, stop_after):
        """A part of an epoch over the link, or from disk for who reads no URLs."""
        options = {
            "folder": self.folder(name, "data-link"),
            "workers": 2,
            "state": state,
            "stop_after": stop_after,
            "environment": {"PEERS_IDENTIFY": "1"},
        }
        if not PEERS[name].streams:
            said = self.call(name, "part", **options)
            sent = {"bytes": 0}
        else:
            said, sent = self.over_link(name, "part", CACHE_RATE, **options)
        return said and {**said, **sent}

    def corrupt(self):
        for name in self.args.peers:
            if name in SAME_BYTES:
                continue
            clean = self.pixels(name, self.folder(name))
            if clean is None:
                continue
            for place in PLACES:
                with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
                    damaged_copy(name, self.folder(name), folder, place)
                    said = self.pixels(name, folder)
                    skipped = None
                    if name in SKIPS and said and said["error"]:
                        skipped = self.pixels(name, folder, PEERS_SKIP="1")
                if said is not None:
                    figures = what_came(clean, said)
                    if skipped is not None:
                        figures["lost_if_skipped"] = what_came(clean, skipped)["lost"]
                    self.add("corrupt", name, figures, place=place)
                    print(f"{name:26} at {place} {figures}", flush=True)

    def pixels(self, name, folder, **environment):
        environment["PEERS_FIXED"] = "1"
        return self.call(name, "pixels", folder=folder, workers=1, environment=environment)


def what_came(clean, said):
    """How many pictures were wrong, and how many did not come until an error or the end."""
    known = set(clean["pixels"])
    return {
        "wrong": sum(each not in known for each in said["pixels"]),
        "lost": len(clean["pixels"]) - len(said["pixels"]),
        "error": said["error"],
    }


def tree_bytes(top):
    return sum(
        os.path.getsize(os.path.join(folder, name))
        for folder, _, names in os.walk(top)
        for name in names
    )


def can_run(name):
    """Threads came later than workers."""
    import pcrshard

    parameters = inspect.signature(pcrshard.PCRDataset.loader).parameters
    return not PEERS[name].options.get("threads") or "threads" in parameters


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="*", help=f"of {', '.join(QUESTIONS)} (default: all)")
    cache = os.path.join(tempfile.gettempdir(), "pcrshard-peers")
    parser.add_argument("--cache", default=cache, help="folder for data (default: %(default)s)")
    parser.add_argument("--environments", help="folder for environments (default: in the cache)")
    parser.add_argument("--json", help="where the figures are added (default: in the cache)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", help="only these, separated by semicolons")
    parser.add_argument("--workers", type=int, nargs="*", default=WORKERS)
    args = parser.parse_args()
    args.environments = args.environments or os.path.join(args.cache, "environments")
    args.json = args.json or os.path.join(args.cache, "peers.json")
    args.peers = args.peers.split(";") if args.peers else list(filter(can_run, PEERS))
    os.makedirs(args.cache, exist_ok=True)

    bench = Bench(args)
    bench.find_images()
    questions = args.questions or QUESTIONS
    with contextlib.suppress(KeyboardInterrupt):
        if "prepare" in questions:
            bench.prepare()
        for _ in range(args.rounds):
            random.shuffle(args.peers)  # whoever comes after whom, and what a time limit cuts off
            for question in questions:
                if question != "prepare":
                    getattr(bench, question)()


if __name__ == "__main__":
    main()
