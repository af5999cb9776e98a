"""Makes wheels and the source distribution, checks what is in them, and tries them out.

Run by ``scripts/wheels``, whose environment has the tools.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
GLIBC = "2.17"
MANYLINUX = ("manylinux2014", "manylinux_2_17")  # the old name and the new one
# Of a wheel, with the C module, which setuptools leaves out where it does not compile.
CONTENT = ("pcrshard/py.typed", "pcrshard/native/_core.pyi", "pcrshard/native/_core.abi3.so")


def main() -> None:
    """Make what is asked for, by default everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help="x86_64, aarch64, sdist or macos (default: all)")
    parser.add_argument("--out", default="dist", help="folder for the files (default: dist)")
    parser.add_argument("--demo", help="site-packages with torch, to try the demonstration too")
    args = parser.parse_args()
    out = pathlib.Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)

    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        sdist = make_sdist(out)
        for target in args.targets or ("sdist", "x86_64", "aarch64", "macos"):
            if target == "macos":
                compile_for_macos(folder)
            elif target == "sdist":
                try_out(sdist, folder / target, None)
            else:
                wheel = make_wheel(sdist, target, out, folder / target)
                if target == os.uname().machine:
                    try_out(wheel, folder / "try", args.demo)


def run(*command: str | pathlib.Path, **options) -> None:
    """Run a command; what it prints is shown only if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")


def make_sdist(out: pathlib.Path) -> pathlib.Path:
    """The source distribution of the working tree."""
    with tempfile.TemporaryDirectory() as folder:
        code = f"from setuptools import build_meta; build_meta.build_sdist({folder!r})"
        run(sys.executable, "-c", code, cwd=ROOT)
        (made,) = pathlib.Path(folder).iterdir()
        return publish(made, out)


def publish(made: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """Move a file to the folder of results."""
    print(out / made.name)
    return pathlib.Path(shutil.move(made, out / made.name))


def make_wheel(
    sdist: pathlib.Path, machine: str, out: pathlib.Path, folder: pathlib.Path
) -> pathlib.Path:
    """A wheel of the source distribution for a kind of processor, by Zig's C compiler."""
    with tarfile.open(sdist) as tar:
        tar.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    zig = f"{sys.executable} -m ziglang"
    compiler = f"{zig} cc -target {machine}-linux-gnu.{GLIBC}"
    environment = {
        **os.environ,
        "CC": compiler,
        "LDSHARED": f"{compiler} -shared",
        "AR": f"{zig} ar",
        # Zig traps undefined behavior unless told otherwise; debug information is for nobody.
        "CFLAGS": "-fno-sanitize=undefined -g0 -s",
        # The headers are those of this machine; both are 64 bits and little-endian.
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
    }
    code = "from setuptools import build_meta; build_meta.build_wheel('made')"
    run(sys.executable, "-c", code, cwd=source, env=environment)
    (plain,) = source.glob("made/*.whl")
    with zipfile.ZipFile(plain) as archive:
        missing = set(CONTENT) - set(archive.namelist())
    if missing:
        raise SystemExit(f"expected {sorted(missing)} in {plain.name}")
    check_symbols(plain, machine)
    tags = ".".join(f"{version}_{machine}" for version in MANYLINUX)
    run(sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tags, plain)
    (wheel,) = source.glob("made/*.whl")
    return publish(wheel, out)


def compile_for_macos(folder: pathlib.Path) -> None:
    """Compile and link the C sources for Apple Silicon. No wheel: this cannot be run here."""
    sources = ROOT / "pcrshard" / "native" / "src"
    driver = ROOT / "benchmarks" / "instructions" / "decode_files.c"
    flags = ("-target", "aarch64-macos", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror")
    files = (driver, *sorted(sources.glob("*.c")))
    zig = (sys.executable, "-m", "ziglang", "cc")
    run(*zig, *flags, f"-I{sources}", "-o", folder / "decode_files", *files, "-lm")
    print("the native core compiles for aarch64-macos; it was not run there")


def check_symbols(wheel: pathlib.Path, machine: str) -> None:
    """That auditwheel finds no symbol younger than glibc 2.17, and no library but the system's."""
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = " ".join(said.split())
    tag = f"{MANYLINUX[-1]}_{machine}"
    if f'following platform tag: "{tag}"' not in words:
        raise SystemExit(f"expected a wheel for {tag}, auditwheel says: {said}")


def try_out(package: pathlib.Path, folder: pathlib.Path, demo: str | None) -> None:
    """Encode, verify, decode and train in an empty environment, without compiler on its path."""
    run(sys.executable, "-m", "venv", folder / "venv")
    binaries = folder / "venv" / "bin"
    python = binaries / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    # PyTurboJPEG comes as Python sources only, which need no compiler.
    binary = ("--only-binary", ":all:", "--no-binary", "PyTurboJPEG")
    run(*pip, *(binary if package.suffix == ".whl" else ()), package)
    bare = {"PATH": f"{binaries}:/usr/sbin:/sbin", "HOME": str(folder), "LC_ALL": "C.UTF-8"}
    golden = next((ROOT / "tests" / "golden").glob("v*"))
    run(python, ROOT / "scripts" / "try_wheel.py", golden, folder / "work", env=bare)
    print(f"{package.name}: installed, encoded, verified, exported, decoded")
    if demo:
        path = next((folder / "venv").glob("lib/python*/site-packages")) / "demo.pth"
        path.write_text(f"{demo}\n")
        words = ("demo", "--epochs", "1", "--out", folder / "demo")
        run(binaries / "pcrshard", *words, env=bare, cwd=folder)
        print(f"{package.name}: demonstrated")


if __name__ == "__main__":
    main()
