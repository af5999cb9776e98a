"""ARM instructions of the vector kernels and of plain C, under qemu: scripts/check --speed --arm.

The photographs are those of $PCRSHARD_DATA. Both must give the pixels of this machine.
"""

import pathlib
import re
import shutil
import subprocess
import tempfile

from benchmarks.harness import ROOT, Bench, read
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.jpeg.split import join_pieces

from .gate import HERE, run

SOURCES = pathlib.Path(ROOT) / "pcrshard" / "native" / "src"
FLAGS = ("-std=c11", "-O3", "-pthread", "-ffp-contract=off", f"-I{SOURCES}")
FILES = (HERE / "decode_files.c", *sorted(SOURCES.glob("*.c")), "-lm")
LIMITS = {"1": 0.25, "2": 0.3, "5": 0.4, "full": 0.58, "original": 0.48}  # of plain C
NUM_PHOTOS = 32


def write_pictures(folder):
    """Photographs at each scan, and their baseline originals, as SCAN-NUMBER.jpg."""
    with Bench("instructions", 1).photos() as photos:
        paths = Bench("instructions", 1).files(f"{photos}/photos/imagenet")
        for number, path in enumerate(paths[:: len(paths) // NUM_PHOTOS][:NUM_PHOTOS]):
            pieces = encode_jpeg(read(path)).pieces
            stops = {"1": 1, "2": 2, "5": 5, "full": len(pieces) - 1}
            jpegs = {name: join_pieces(pieces[:stop]) for name, stop in stops.items()}
            for name, jpeg in (jpegs | {"original": read(path)}).items():
                (folder / f"{name}-{number:02}.jpg").write_bytes(jpeg)


def count(folder, backend, repeats, pictures):
    """Instructions of decoding, and what the decoder printed of the pixels."""
    done = subprocess.run(
        ("qemu-aarch64", "-plugin", folder / "count.so", "-d", "plugin",
         folder / "arm", backend, str(repeats), *pictures),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (total,) = re.findall(r"instructions: (\d+)", done.stderr)
    return int(total), done.stdout


def main():
    """Count at each scan, and compare vectors with plain C."""
    if shutil.which("qemu-aarch64") is None:
        raise SystemExit("expected qemu-aarch64: install Debian's qemu-user")
    tools = sorted(pathlib.Path(ROOT).glob("build/wheels-*/bin/python"))
    if not tools:
        raise SystemExit("expected Zig, which compiles for ARM: run scripts/wheels macos once")
    missed = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_pictures(folder)
        run("cc", *FLAGS, "-o", folder / "here", *FILES)
        zig = (tools[-1], "-m", "ziglang", "cc", "-target", "aarch64-linux-musl")
        run(*zig, "-fno-sanitize=undefined", *FLAGS, "-o", folder / "arm", *FILES)
        run("cc", "-O2", "-shared", "-fPIC", "-o", folder / "count.so", HERE / "count_guest.c")
        print(f"{'scan':10} {'plain C':>12} {'vectors':>12}  ratio, at most")
        for scan, limit in LIMITS.items():
            pictures = sorted(folder.glob(f"{scan}-*.jpg"))
            expected = run(folder / "here", "auto", "1", *pictures, stderr=subprocess.DEVNULL)
            per_image = []
            for backend in ("portable", "auto"):
                once, pixels = count(folder, backend, 1, pictures)
                if pixels != expected:
                    raise SystemExit(f"scan {scan}, {backend}: not the pixels of this machine")
                twice, _ = count(folder, backend, 2, pictures)
                per_image.append((twice - once) / len(pictures))
            plain, vectors = per_image
            print(f"{scan:10} {plain:12,.0f} {vectors:12,.0f}  {vectors / plain:.3f}, {limit}")
            if vectors / plain > limit:
                missed.append(scan)
    if missed:
        raise SystemExit(f"too many ARM instructions at scan {', '.join(missed)}")


if __name__ == "__main__":
    main()
