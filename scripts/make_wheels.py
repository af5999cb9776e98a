"""Makes wheels and the source distribution, checks what is in them, and tries them out.

Run by ``scripts/wheels``, whose environment has the tools.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
GLIBC = "2.17"
MANYLINUX = ("manylinux2014", "manylinux_2_17")  # the old name and the new one
# Whatever else is installed here: a wheel must need neither.
EMPTY_PATH = "/usr/sbin:/sbin"
MODULES = ("_core",)
TYPES = ("pcrshard/py.typed", "pcrshard/native/_core.pyi")


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
        for machine in args.targets or ("sdist", "x86_64", "aarch64", "macos"):
            if machine == "macos":
                compile_for_macos(folder)
                continue
            if machine == "sdist":
                try_out(sdist, folder / machine, None)
                continue
            wheel = make_wheel(sdist, machine, out, folder / machine)
            if machine == os.uname().machine:
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
        build = f"from setuptools import build_meta; build_meta.build_sdist({folder!r})"
        run(sys.executable, "-c", build, cwd=ROOT)
        (made,) = pathlib.Path(folder).iterdir()
        shutil.move(made, out / made.name)
    print(out / made.name)
    return out / made.name


def make_wheel(
    sdist: pathlib.Path, machine: str, out: pathlib.Path, folder: pathlib.Path
) -> pathlib.Path:
    """A wheel of the source distribution for a kind of processor, by Zig's C compiler."""
    unpack(sdist, folder)
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
    build = "from setuptools import build_meta; build_meta.build_wheel('made')"
    run(sys.executable, "-c", build, cwd=folder, env=environment)
    (plain,) = folder.glob("made/*.whl")
    check_content(plain)
    check_symbols(plain, machine)
    tags = ".".join(f"{version}_{machine}" for version in MANYLINUX)
    words = ("-m", "wheel", "tags", "--remove", "--platform-tag", tags)
    run(sys.executable, *words, plain)
    (wheel,) = folder.glob("made/*.whl")
    shutil.move(wheel, out / wheel.name)
    print(out / wheel.name)
    return out / wheel.name


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


def unpack(sdist: pathlib.Path, folder: pathlib.Path) -> None:
    """The content of a source distribution, without its one folder."""
    with tarfile.open(sdist) as tar:
        tar.extractall(folder.with_suffix(".tmp"), filter="data")
    (inner,) = folder.with_suffix(".tmp").iterdir()
    inner.rename(folder)


def check_content(wheel: pathlib.Path) -> None:
    """Both C modules, which setuptools leaves out where they do not compile, and the types."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for module in MODULES:
        found = [name for name in names if name.startswith(f"pcrshard/native/{module}.")]
        if not any(name.endswith(".so") for name in found):
            raise SystemExit(f"expected pcrshard/native/{module}.*.so in {wheel.name}, got none")
    missing = set(TYPES) - set(names)
    if missing:
        raise SystemExit(f"expected {sorted(missing)} in {wheel.name}")


def try_out(wheel: pathlib.Path, folder: pathlib.Path, demo: str | None) -> None:
    """Encode, verify, decode and train in an empty environment, without what was there to build."""
    python = make_environment(folder / "venv", wheel)
    golden = next((ROOT / "tests" / "golden").glob("v*"))
    script = ROOT / "scripts" / "try_wheel.py"
    run(*hidden(python, script, golden, folder / "work"), env=bare_environment(python))
    print(f"{wheel.name}: installed, encoded, verified, exported, decoded")
    if demo:
        path = next((folder / "venv").glob("lib/python*/site-packages")) / "demo.pth"
        path.write_text(f"{demo}\n")
        command = (python.parent / "pcrshard", "demo", "--epochs", "1", "--out", folder / "demo")
        run(*hidden(*command), env=bare_environment(python), cwd=folder)
        print(f"{wheel.name}: demonstrated")


def make_environment(folder: pathlib.Path, what: pathlib.Path) -> pathlib.Path:
    """A new virtual environment with nothing but a wheel or source distribution; its Python."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    # PyTurboJPEG comes as Python sources only, which need no compiler.
    binary = ("--only-binary", ":all:", "--no-binary", "PyTurboJPEG")
    prebuilt = binary if what.suffix == ".whl" else ()
    run(*pip, *prebuilt, what)
    return python


def bare_environment(python: pathlib.Path) -> dict[str, str]:
    """No compiler on the path, and nothing of this environment."""
    return {
        "PATH": f"{python.parent}:{EMPTY_PATH}",
        "HOME": str(python.parent.parent),
        "LC_ALL": "C.UTF-8",
    }


def hidden(*command: str | pathlib.Path) -> list[str | pathlib.Path]:
    """The command without libturbojpeg, where this user may lay an empty file over it."""
    library = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    covered = [f"/usr/lib/{library}/libturbojpeg.so.0", "/etc/ld.so.cache"]
    mounts = " && ".join(
        f"/usr/bin/mount --bind /dev/null {path}" for path in filter(os.path.exists, covered)
    )
    unshare = [
        "/usr/bin/unshare",
        "--mount",
        "/bin/sh",
        "-c",
        f'{mounts or ":"} && exec "$@"',
        "sh",
    ]
    with contextlib.suppress(OSError):
        if (
            subprocess.run([*unshare, "/bin/true"], capture_output=True, check=False).returncode
            == 0
        ):
            return [*unshare, *command]
    print("not tried without libturbojpeg: unshare --mount is not allowed here")
    return list(command)


if __name__ == "__main__":
    main()
