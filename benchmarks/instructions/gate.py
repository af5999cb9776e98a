"""Instructions per image and word, compared with a stored baseline: ``scripts/check --speed``.

Noise cannot touch them as it touches seconds: two runs differ by less than 1 %. Baselines belong to
a compiler. Above 3 % more than the baseline is a failure; ``--update`` stores what was counted.

``--arm`` counts ARM instructions under qemu instead, of the vector kernels and of plain C, from
photographs in $PCRSHARD_DATA; both must give the pixels of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

from benchmarks.harness import Bench

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BASELINES = HERE / "baselines.json"
LARGEST_GROWTH = 1.03
SOURCES = ROOT / "pcrshard" / "native" / "src"
FLAGS = ("-std=c11", "-O3", "-pthread", "-ffp-contract=off", f"-I{SOURCES}")
ARM_LIMITS = {"1": 0.25, "2": 0.3, "5": 0.4, "full": 0.58, "original": 0.48}  # of plain C
NUM_PHOTOS = 32


def run(*command: str | pathlib.Path, **options) -> subprocess.CompletedProcess[str]:
    """Run a command, and stop with what it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"[-3000:])
    return done


def compiler() -> str:
    """What compiled the core, such as ``gcc 12``, and for which processor."""
    version = run("cc", "--version").stdout
    name = "clang" if "clang" in version else "gcc"
    (major,) = re.findall(r"(\d+)\.\d+\.\d+", version.splitlines()[0])[:1]
    python = ".".join(platform.python_version_tuple()[:2])
    return f"{name} {major}, {platform.machine()}, Python {python}"


def count(folder: pathlib.Path) -> dict[str, float]:
    """Instructions of each operation, per image or word."""
    marks = folder / "marks.so"
    run("cc", "-O1", "-shared", "-fPIC", "-o", marks, HERE / "marks.c")
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "0",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    callgrind = ("valgrind", "--tool=callgrind", "--instr-atstart=no", "--combine-dumps=no")
    output = f"--callgrind-out-file={folder}/out"
    program = (sys.executable, HERE / "operations.py", marks, folder)
    done = run(*callgrind, output, *program, env=environment)
    counted = {}
    for number, (name, unit, times) in enumerate(json.loads(done.stdout.splitlines()[-1]), 1):
        dump = (folder / f"out.{number}").read_text()
        (total,) = re.findall(r"^(?:totals|summary): (\d+)", dump, re.MULTILINE)[:1]
        counted[f"{name} (per {unit})"] = round(int(total) / times, 3)
    return counted


def gate(update: bool) -> None:
    """Compare with the baseline, or store it."""
    baselines = json.loads(BASELINES.read_text())
    key = compiler()
    with tempfile.TemporaryDirectory() as folder:
        counted = count(pathlib.Path(folder))
    if update:
        BASELINES.write_text(json.dumps(baselines | {key: counted}, indent=1) + "\n")
    elif key not in baselines:
        print(f"no baseline for {key}: store one with scripts/check --speed --update")
    before = baselines.get(key, {})
    ratios = {name: now / before.get(name, now) for name, now in counted.items()}
    print(f"instructions, {key}")
    for name, now in counted.items():
        print(f"{name:40} {now:16,.3f} {ratios[name]:.3f}")
    grown = [name for name, ratio in ratios.items() if ratio > LARGEST_GROWTH]
    if grown and not update:
        raise SystemExit(f"more than {LARGEST_GROWTH} times the instructions: {', '.join(grown)}")


def write_pictures(folder: pathlib.Path) -> None:
    """Photographs at each scan, and their baseline originals, as SCAN-NUMBER.jpg."""
    from pcrshard.encoding.encode_jpeg import encode_jpeg
    from pcrshard.jpeg.split import join_pieces

    bench = Bench("instructions", 1)
    with bench.photos() as photos:
        paths = list(map(pathlib.Path, bench.files(f"{photos}/photos/imagenet")))
        for number, path in enumerate(paths[:: len(paths) // NUM_PHOTOS][:NUM_PHOTOS]):
            pieces = encode_jpeg(path.read_bytes()).pieces
            shutil.copy(path, folder / f"original-{number:02}.jpg")
            for name, scan in (("1", 1), ("2", 2), ("5", 5), ("full", len(pieces) - 1)):
                (folder / f"{name}-{number:02}.jpg").write_bytes(join_pieces(pieces[:scan]))


def arm(folder: pathlib.Path) -> None:
    """Count the ARM build's instructions, of vector kernels and of plain C."""
    tools = sorted(ROOT.glob("build/wheels-*/bin/python"))
    if not tools:
        raise SystemExit(
            "expected Zig, which compiles the ARM wheel: run scripts/wheels macos once"
        )
    zig = (tools[-1], "-m", "ziglang", "cc")
    write_pictures(folder)
    files = (HERE / "decode_files.c", *sorted(SOURCES.glob("*.c")))
    run("cc", *FLAGS, "-o", folder / "here", *files, "-lm")
    target = ("-target", "aarch64-linux-musl", "-fno-sanitize=undefined")
    run(*zig, *target, *FLAGS, "-o", folder / "arm", *files, "-lm")
    plugin = folder / "count.so"
    run("cc", "-O2", "-shared", "-fPIC", "-o", plugin, HERE / "count_guest.c")

    def instructions(backend: str, repeats: int, pictures: list[pathlib.Path]) -> tuple[int, str]:
        qemu = ("qemu-aarch64", "-plugin", plugin, "-d", "plugin")
        done = run(*qemu, folder / "arm", backend, str(repeats), *pictures)
        (total,) = re.findall(r"instructions: (\d+)", done.stderr)
        return int(total), done.stdout

    missed = []
    print(f"{'scan':10} {'plain C':>12} {'vectors':>12}  ratio, at most")
    for scan, limit in ARM_LIMITS.items():
        pictures = sorted(folder.glob(f"{scan}-*.jpg"))
        expected = run(folder / "here", "auto", "1", *pictures).stdout
        per_image = []
        for backend in ("portable", "auto"):
            once, pixels = instructions(backend, 1, pictures)
            if pixels != expected:
                raise SystemExit(f"scan {scan}, {backend}: ARM decodes to other pixels than x86")
            per_image.append((instructions(backend, 2, pictures)[0] - once) / len(pictures))
        plain, vectors = per_image
        print(f"{scan:10} {plain:12,.0f} {vectors:12,.0f}  {vectors / plain:.3f}, {limit}")
        if vectors / plain > limit:
            missed.append(scan)
    if missed:
        raise SystemExit(f"too many ARM instructions at scan {', '.join(missed)}")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--arm", action="store_true", help="the ARM build, under qemu")
    parser.add_argument("--update", action="store_true", help="store the counts as the baseline")
    arguments = parser.parse_args()
    needed = "qemu-aarch64" if arguments.arm else "valgrind"
    if shutil.which(needed) is None:
        raise SystemExit(f"expected {needed}: install Debian's qemu-user or valgrind")
    if arguments.arm:
        with tempfile.TemporaryDirectory() as folder:
            arm(pathlib.Path(folder))
    else:
        gate(arguments.update)


if __name__ == "__main__":
    main()
