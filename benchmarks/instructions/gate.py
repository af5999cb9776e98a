"""Instructions per image and word, compared with a stored baseline: ``scripts/check --speed``.

Noise cannot touch them as it touches seconds: two runs differ by less than 1 %. Baselines belong to
a compiler. Above 3 % more than the baseline is a failure; ``--update`` stores what was counted.
"""

import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
BASELINES = HERE / "baselines.json"
LARGEST_GROWTH = 1.03


def run(*command, **options):
    """What a command prints."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **options).stdout


def compiler():
    """What compiled the core, such as ``gcc 12``, and for which processor."""
    version = run("cc", "--version")
    name = "clang" if "clang" in version else "gcc"
    (major,) = re.findall(r"(\d+)\.\d+\.\d+", version.splitlines()[0])[:1]
    python = ".".join(platform.python_version_tuple()[:2])
    return f"{name} {major}, {platform.machine()}, Python {python}"


def count(folder):
    """Instructions of each operation, per image or word."""
    marks = folder / "marks.so"
    run("cc", "-O1", "-shared", "-fPIC", "-o", marks, HERE / "marks.c")
    root = str(HERE.parents[1])
    always = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": root}
    # Threads that ended confuse callgrind: on one core, calibration has none.
    callgrind = (
        "taskset",
        "-c",
        "0",
        "valgrind",
        "--tool=callgrind",
        "--instr-atstart=no",
        "--combine-dumps=no",
    )
    output = f"--callgrind-out-file={folder}/out"
    program = (sys.executable, HERE / "operations.py", marks, folder)
    said = run(*callgrind, "--quiet", output, *program, env=os.environ | always)
    counted = {}
    for number, (name, unit, times) in enumerate(json.loads(said.splitlines()[-1]), 1):
        dump = (folder / f"out.{number}").read_text()
        (total,) = re.findall(r"^(?:totals|summary): (\d+)", dump, re.MULTILINE)[:1]
        counted[f"{name} (per {unit})"] = round(int(total) / times, 3)
    return counted


def main():
    """Compare with the baseline, or store it."""
    update = sys.argv[1:] == ["--update"]
    if shutil.which("valgrind") is None:
        raise SystemExit("expected valgrind: install Debian's valgrind")
    baselines, key = json.loads(BASELINES.read_text()), compiler()
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


if __name__ == "__main__":
    main()
