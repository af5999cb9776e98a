"""What an installed pcrshard must do by itself; scripts/make_wheels.py runs it there."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np

import pcrshard
from pcrshard.jpeg.libjpeg_turbo import system
from pcrshard.jpeg.markers import SOI

COMMAND = pathlib.Path(sys.executable).with_name("pcrshard")


def main() -> None:
    """Try it with the images of the golden files."""
    golden, work = map(pathlib.Path, sys.argv[1:3])
    assert COMMAND.parent.parent in pathlib.Path(pcrshard.__file__).parents, pcrshard.__file__
    version = command("--version").split()[-1]
    assert version == pcrshard.__version__
    said = json.loads(command("info", "--system", "--json"))
    print(json.dumps(said))
    read(golden)
    assert said["native core"] == system()["native core"]
    write(golden, work)


def command(*words: str | pathlib.Path) -> str:
    """What a command prints."""
    done = subprocess.run([COMMAND, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def read(golden: pathlib.Path) -> None:
    """Read a shard that another version wrote."""
    shard = golden / "compact-000000.tar"
    command("verify", shard)
    command("info", shard)


def write(golden: pathlib.Path, work: pathlib.Path) -> None:
    """Encode images, and get their pixels back."""
    source = work / "source"
    found = sorted((golden / "sources").iterdir())
    jpegs = [path for path in found if path.read_bytes().startswith(SOI)]
    for number, path in enumerate(jpegs):
        target = source / f"class{number % 2}" / f"{number}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    command("encode", source, work / "shards", "--workers", "1")
    command("verify", work / "shards", "--against", source)
    command("export", work / "shards", work / "out", "--baseline")

    sources = sorted(source.rglob("*.jpg"))
    for path in sources:
        exported = work / "out" / path.relative_to(source)
        pixels = pcrshard.decode_image(path.read_bytes())
        assert np.array_equal(pcrshard.decode_image(exported.read_bytes()), pixels), path
        assert pcrshard.decode_image(exported.read_bytes(), size=32).shape == (32, 32, 3)
    index, urls = pcrshard.open_dataset(str(work / "shards"))
    assert index.num_samples == len(sources)
    assert pcrshard.Shard(urls[0]).index.num_samples == len(sources)


if __name__ == "__main__":
    main()
