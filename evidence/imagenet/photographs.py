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

import pcrshard
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.format.shard_format import SCRIPTS

# What users of FFCV and DALI store: the shorter side, and the quality.
RESIZED = (256, 90)
EOI = b"\xff\xd9"


class Photograph(NamedTuple):
    """A file, and the number of its class."""

    path: pathlib.Path
    label: int


def synsets():
    """The 1,000 classes in their order."""
    return pathlib.Path(__file__).with_name("synsets.txt").read_text().split()


def photographs(lab):
    """Those of shared/data first, then those of the other folder that have other names."""
    if lab.quick:
        files = sorted(pathlib.Path(next(iter(lab.photos().values()))).rglob("*.jpg"))
        return [Photograph(path, label) for label, path in enumerate(files[:3])]
    numbers = {name: number for number, name in enumerate(synsets())}
    found = {}
    for folder in (lab.photos()["imagenet"], os.environ.get("PCRSHARD_IMAGENET")):
        if not folder:
            continue
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


def points():
    """All of them: each scan of each script, the source as it is, and the resized file."""
    scans = [
        Point(script, scan)
        for script in SCRIPTS
        for scan in range(1, SCRIPTS[script].num_groups + 1)
    ]
    return [*scans, Point("source", "full"), Point("resized", "full")]


def unfinished(point):
    """Whether a decoder can smooth at a point: not where every bit is there."""
    return point.scan != "full" and point.scan < SCRIPTS[point.store].num_groups


def stored(jpeg):
    """The bytes of a photograph at every point, by the point's name."""
    found = {}
    for script in SCRIPTS:
        pieces = encode_jpeg(jpeg, SCRIPTS[script]).pieces[:-1]
        for count in range(1, len(pieces) + 1):
            found[Point(script, count).name] = b"".join(pieces[:count]) + EOI
    return found | {"source full": jpeg, "resized full": resized(jpeg)}


def resized(jpeg):
    """A JPEG of the picture at ``RESIZED``, by Pillow."""
    from PIL import Image

    side, quality = RESIZED
    with Image.open(io.BytesIO(jpeg)) as picture:
        scale = side / min(picture.size)
        size = [max(1, round(length * scale)) for length in picture.size]
        small = picture.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    out = io.BytesIO()
    small.save(out, "JPEG", quality=quality)
    return out.getvalue()


def shard_bytes(lab, chosen):
    """Mean bytes of a photograph at each point; scans as parts of whole shards, index included."""
    found = {}
    for script in SCRIPTS:
        index, _ = encoded(lab, chosen, script)
        for scan in range(1, index.num_groups + 1):
            found[Point(script, scan).name] = index.prefix_bytes(scan) / index.num_samples
    sources = [photograph.path.read_bytes() for photograph in chosen]
    found["source full"] = sum(map(len, sources)) / len(sources)
    found["resized full"] = sum(len(resized(jpeg)) for jpeg in sources) / len(sources)
    return found


def encoded(lab, chosen, script, resized=None):
    """The index and the paths of a dataset of these photographs, made once; ``resized`` is None or
    a shorter side and a JPEG quality.
    """
    side, quality = resized or (None, None)
    name = f"{script}-{len(chosen)}" + (f"-{side}-{quality}" if resized else "")
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
