"""What an installed pcrshard must do by itself; scripts/make_wheels.py runs it there."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import numpy as np

import pcrshard
from pcrshard.jpeg.markers import SOI

COMMAND = pathlib.Path(sys.executable).with_name("pcrshard")


def main() -> None:
    """Try it with the images of the golden files."""
    golden, work = map(pathlib.Path, sys.argv[1:3])
    assert COMMAND.parent.parent in pathlib.Path(pcrshard.__file__).parents, pcrshard.__file__
    assert command("--version").split()[-1] == pcrshard.__version__
    print(command("info", "--system"))
    shard = golden / "compact-000000.tar"  # written by another version
    command("verify", shard)
    command("info", shard)

    source = work / "source"
    found = sorted((golden / "sources").iterdir())
    for number, path in enumerate(p for p in found if p.read_bytes().startswith(SOI)):
        target = source / f"class{number % 2}" / f"{number}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    command("encode", source, work / "shards", "--workers", "1")
    command("verify", work / "shards", "--against", source)
    command("export", work / "shards", work / "out", "--baseline")
    for path in source.rglob("*.jpg"):
        exported = (work / "out" / path.relative_to(source)).read_bytes()
        pixels = pcrshard.decode_image(path.read_bytes())
        assert np.array_equal(pcrshard.decode_image(exported), pixels), path
        assert pcrshard.decode_image(exported, size=32).shape == (32, 32, 3)


def command(*words: str | pathlib.Path) -> str:
    """What a command prints."""
    done = subprocess.run([COMMAND, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


if __name__ == "__main__":
    main()
