"""Measures pcrshard beside the other loaders, on the same photographs, each in its own environment.

    python benchmarks/peers/run.py                 everything: an hour on two cores
    python benchmarks/peers/run.py cpu --rounds 1  one question, one round more

Figures are added to the JSON file, so that rounds can be measured one by one. The questions:
prepare (time and size), cpu (images a CPU second, and a second), memory, link (20 and 80 MB/s).
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
from environments import ENVIRONMENTS, python_of, versions
from server import SlowServer
from stores import PEERS, SHARD_IMAGES

COPIES = 3
WORKERS = (1, 2)
RATES = (20e6, 80e6)
LIMIT_S = 45
QUESTIONS = ("prepare", "cpu", "memory", "link")


class Bench:
    """Where things are, and what was measured."""

    def __init__(self, args):
        self.args = args
        self.data = os.path.join(args.cache, "data")
        os.makedirs(self.data, exist_ok=True)
        os.makedirs(os.path.join(args.cache, "scratch"), exist_ok=True)
        self.results = {"runs": [], "versions": {}, "failures": {}}
        if os.path.exists(args.json):
            with open(args.json) as file:
                self.results = json.load(file)
        self.images = os.path.join(self.data, "images.json")
        self.pythons = {}

    def folder(self, name):
        return os.path.join(self.data, PEERS[name].form)

    def find_images(self):
        """Copies of the ImageNet photographs, as a list of (path, label)."""
        if not os.path.exists(self.images):
            from common import jpeg_files, photos

            target = os.path.join(self.data, "photographs")
            with photos() as folder:
                shutil.copytree(f"{folder}/photos/imagenet", target, dirs_exist_ok=True)
            files = jpeg_files(target)
            labels = sorted({os.path.dirname(path) for path in files})
            images = [(path, labels.index(os.path.dirname(path))) for path in files]
            with open(self.images, "w") as file:
                json.dump(images * COPIES, file)
        with open(self.images) as file:
            count = len(json.load(file))
        for name in self.args.peers:
            os.makedirs(self.folder(name), exist_ok=True)
            with open(os.path.join(self.folder(name), "shards"), "w") as file:
                file.write(str(-(-count // SHARD_IMAGES)))

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
            "HF_HOME": os.path.join(self.args.cache, "scratch", "hf"),
            "HF_HUB_OFFLINE": "1",
            "PEERS_SCRATCH": os.path.join(self.args.cache, "scratch"),
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
            out, error = worker.communicate(timeout=LIMIT_S)
            lines = out.strip().splitlines()
            if worker.returncode == 0 and lines:
                return json.loads(lines[-1])
            reason = (error.strip().splitlines() or ["no output"])[-1]
        except subprocess.TimeoutExpired:
            reason = f"not finished in {LIMIT_S} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)  # with the processes that it started
        print(f"  {name}: {reason}")
        self.results["failures"][f"{name}, {action}"] = reason
        return None

    def add(self, question, name, figures, **conditions):
        if figures is not None:
            self.results["failures"].pop(f"{name}, epoch", None)
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
            shutil.rmtree(folder, ignore_errors=True)
            os.makedirs(folder)
            figures = self.call(name, "prepare", images=self.images, folder=folder)
            if figures is None:
                continue
            done.add(form)
            size = sum(
                os.path.getsize(os.path.join(top, each))
                for top, _, found in os.walk(folder)
                for each in found
            )
            self.add("prepare", name, figures, form=form, bytes=size)
            print(f"{form:12} {figures['wall']:7.1f} s {size / 1e6:8.1f} MB")
        self.find_images()

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
        for rate in self.args.rates:
            for name in self.args.peers:
                if not PEERS[name].streams:
                    continue
                with SlowServer(self.folder(name), rate) as server:
                    said = self.call(
                        name,
                        "epoch",
                        folder=self.folder(name),
                        server=server.url,
                        workers=2,
                        epochs=1,
                        environment={
                            "S3_ENDPOINT_URL": server.url,
                            "AWS_ENDPOINT_URL": server.url,
                            "AWS_ACCESS_KEY_ID": "peers",
                            "AWS_SECRET_ACCESS_KEY": "peers",
                            "AWS_DEFAULT_REGION": "us-east-1",
                            "AWS_ALLOW_HTTP": "true",
                        },
                    )
                    if said is not None:
                        sent = {"bytes": server.link.bytes, "requests": server.link.requests}
                        figures = {**said["epochs"][0], **sent}
                        self.add("link", name, figures, rate=rate)
                        speed = figures["images"] / figures["wall"]
                        megabytes = figures["bytes"] / 1e6
                        print(
                            f"{rate / 1e6:3.0f} MB/s {name:26} {speed:7.0f}/s {megabytes:7.1f} MB, "
                            f"first after {figures['first']:.2f} s",
                            flush=True,
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
    parser.add_argument("--rates", type=float, nargs="*", default=RATES, help="bytes a second")
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
