"""What the benchmarks share: real photographs, options, statistics, a description of the machine, a
table, a JSON file.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile

from pcrshard.fidelity.costs import table

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGES = ("pcrshard", "numpy", "crc32c", "fsspec", "PyTurboJPEG", "webdataset", "torch", "pillow")


def parse_args(doc, rounds):
    """The options that every benchmark has; ``args.json`` is where the figures go."""
    name = os.path.basename(sys.argv[0]).removesuffix(".py")
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=rounds, help="interleaved rounds (default: %(default)s)"
    )
    default = os.path.join(tempfile.gettempdir(), "pcrshard-benchmarks", f"{name}.json")
    parser.add_argument(
        "--json", default=default, help="where to write the figures (default: %(default)s)"
    )
    return parser.parse_args()


@contextlib.contextmanager
def photos(*others):
    """A temporary folder with ``photos/SET/CLASS/FILE.jpg`` in it; removed at the end.

    ``others`` are tars to unpack beside them: ``classify``.
    """
    data = os.environ.get("PCRSHARD_DATA") or os.path.join(os.path.dirname(ROOT), "shared", "data")
    path = os.path.join(data, "photos.tar")
    if not os.path.exists(path):
        print("needs photos.tar: set PCRSHARD_DATA to the folder that holds it", file=sys.stderr)
        raise SystemExit(2)
    with tempfile.TemporaryDirectory(prefix="pcrshard-bench-") as folder:
        for name in ("photos", *others):
            with tarfile.open(os.path.join(data, f"{name}.tar")) as tar:
                tar.extractall(folder, filter="data")
        yield folder


def jpeg_files(folder):
    """All files under a folder, sorted."""
    return sorted(os.path.join(top, name) for top, _, names in os.walk(folder) for name in names)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def summary(values):
    """Quartiles of a figure over the rounds."""
    if len(values) == 1:
        values = values * 2
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"q1": q1, "median": median, "q3": q3}


def show(stats, digits=2):
    """``median [q1 q3]``."""
    return f"{stats['median']:.{digits}f} [{stats['q1']:.{digits}f} {stats['q3']:.{digits}f}]"


def child_cpu():
    """CPU seconds of all ended child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def machine_busy():
    """CPU seconds that all processes of the machine have used since it started."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _wait, irq, soft, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def judge(what, value, limit, *, at_most):
    """Print whether a figure keeps to its limit, and return that as a row for the JSON file."""
    met = bool(value <= limit if at_most else value >= limit)
    print(
        f"{'met   ' if met else 'MISSED'}  {what}: {value:.4g} "
        f"(target: at {'most' if at_most else 'least'} {limit})"
    )
    return {"what": what, "value": value, "limit": limit, "at_most": at_most, "met": met}


def print_table(title, header, rows):
    print(f"\n{title}\n{table(header, rows)}\n")


def _first(path, pattern):
    with contextlib.suppress(OSError), open(path) as file:
        match = re.search(pattern, file.read())
        return match[1] if match else None
    return None


def _output(*command):
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        return (done.stdout or done.stderr).strip() if done.returncode == 0 else ""
    return ""


def machine():
    """Processor, memory and versions; nothing that names the machine."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "cpu": _first("/proc/cpuinfo", r"model name\s*: (.*)"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_GiB": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "transparent_hugepage": _first("/sys/kernel/mm/transparent_hugepage/enabled", r"\[(\w+)\]"),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "versions": versions,
        "jpegtran": _output("jpegtran", "-version"),
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
        "load_average": os.getloadavg()[0],
    }


def save(args, results, targets):
    """Write the figures with machine, versions and date."""
    report = {
        "benchmark": os.path.basename(sys.argv[0]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rounds": args.rounds,
        "machine": machine(),
        "targets": targets,
        "results": results,
    }
    os.makedirs(os.path.dirname(os.path.abspath(args.json)), exist_ok=True)
    with open(args.json, "w") as file:
        json.dump(report, file, indent=1)
    print(f"figures: {args.json}")
