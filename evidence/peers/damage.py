"""A peer's data with a few bytes inverted in one of its files of images."""

import os
import shutil

from adapters import PEERS

INVERTED = 16
LEAST_BYTES = 10_000  # smaller files are indexes


def damaged_copy(name, source, target, place):
    """Copy ``source`` to ``target`` and damage one file of it, at this place of what is read."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    files = sorted(
        path
        for folder, _, found in os.walk(target)
        for path in (os.path.join(folder, each) for each in found)
        if os.path.getsize(path) > LEAST_BYTES and not path.endswith(".json")
    )
    path = files[int(place * len(files))]
    start = int(place * bytes_read(name, path))
    with open(path, "r+b") as file:
        file.seek(start)
        data = file.read(INVERTED)
        file.seek(start)
        file.write(bytes(byte ^ 0xFF for byte in data))


def bytes_read(name, path):
    """Up to where a peer reads a file."""
    if PEERS[name].form != "pcr":
        return os.path.getsize(path)
    import pcrshard

    index, _ = pcrshard.open_dataset(os.path.dirname(path))
    shard = next(entry for entry in index.shards if entry.name == os.path.basename(path))
    return shard.prefix_stop(PEERS[name].options["scan"])
