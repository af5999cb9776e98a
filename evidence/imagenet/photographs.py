"""ImageNet photographs with their classes, as pieces of two scan scripts and resized once.

A file is named by its synset, as ImageNet names it (``n01440764_tench.JPEG``); the number of the
class is the place of the synset among the 1,000 (``synsets.txt``). ``shared/data`` has 260;
``PCRSHARD_IMAGENET`` may name a folder of more.
"""

import io
import os
import pathlib
import re
import tempfile
from typing import NamedTuple

from PIL import Image

import pcrshard
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.format.shard_format import SCRIPTS

# What users of FFCV and DALI store: the shorter side, and the quality.
SIDE, QUALITY = 256, 90


class Photograph(NamedTuple):
    """A file, and the number of its class."""

    path: pathlib.Path
    label: int


def photographs(lab):
    """Those of shared/data first, then those of the other folder that have other names."""
    if lab.quick:
        files = sorted(pathlib.Path(next(iter(lab.photos().values()))).rglob("*.jpg"))
        return [Photograph(path, label) for label, path in enumerate(files[:3])]
    synsets = pathlib.Path(__file__).with_name("synsets.txt").read_text().split()
    numbers = {name: number for number, name in enumerate(synsets)}
    found = {}
    for folder in filter(None, (lab.photos()["imagenet"], os.environ.get("PCRSHARD_IMAGENET"))):
        for path in sorted(pathlib.Path(folder).rglob("n*_*.*")):
            match = re.match(r"n\d{8}", path.name)
            if match and match[0] in numbers:
                found.setdefault(path.name, Photograph(path, numbers[match[0]]))
    return list(found.values())


class Point(NamedTuple):
    """A way to store and read a photograph: a scan of a script, or a file made once."""

    store: str
    scan: int | str

    @property
    def name(self):
        """As it stands in results."""
        return f"{self.store} {self.scan}"

    @property
    def unfinished(self):
        """Whether a decoder can smooth: not where every bit is there."""
        return self.store in SCRIPTS and self.scan < SCRIPTS[self.store].num_groups


SCANS = [Point(name, 1 + n) for name, script in SCRIPTS.items() for n in range(script.num_groups)]
POINTS = [*SCANS, Point("source", "full"), Point("resized", "full")]


def stored(jpeg):
    """The bytes of a photograph at every point, by the point's name."""
    pieces = {name: encode_jpeg(jpeg, script).pieces for name, script in SCRIPTS.items()}
    scans = {scan.name: b"".join(pieces[scan.store][: scan.scan]) + b"\xff\xd9" for scan in SCANS}
    return scans | {"source full": jpeg, "resized full": resized(jpeg)}


def resized(jpeg):
    """A JPEG of SIDE and QUALITY, by Pillow."""
    with Image.open(io.BytesIO(jpeg)) as picture:
        scale = SIDE / min(picture.size)
        size = [max(1, round(length * scale)) for length in picture.size]
        small = picture.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    out = io.BytesIO()
    small.save(out, "JPEG", quality=QUALITY)
    return out.getvalue()


def encoded(lab, chosen, script, side=None, quality=None):
    """The index and the paths of a dataset of these photographs, made once."""
    name = f"{script}-{len(chosen)}" + (f"-{side}-{quality}" if side else "")
    target = os.path.join(lab.cache, "imagenet-shards", name)
    if not os.path.exists(os.path.join(target, "pcr.json")):
        with tempfile.TemporaryDirectory() as folder:
            for photograph in chosen:
                os.symlink(photograph.path.resolve(), os.path.join(folder, photograph.path.name))
            options = pcrshard.EncodeOptions(
                fmt=pcrshard.ShardFormat(script), resize_short=side, reencode_quality=quality
            )
            pcrshard.encode(folder, target, options, workers=1)
    return pcrshard.open_dataset(target)
