"""Decoding to training batches in CPU milliseconds per image: random crops to 224 pixels against
Pillow and OpenCV of the sources, and ten views of each image, as DINO takes them.

Asserts that crops are Pillow's within a gray level, and that views are those of single calls.
"""

import functools
import io

import cv2
import numpy as np
import turbojpeg
from PIL import Image

from pcrshard import ImageDecoder, View, native
from pcrshard.native.pieces import piece_table
from pcrshard.native.pool import Draw, Pool, draw_boxes, draw_keys

from .decode import SCANS, load, show
from .harness import Quartiles, ratios

ROUNDS = 5
SIZE = 224
VIEWS = [View(SIZE, 2, scale=(0.25, 1)), View(96, 8, scale=(0.05, 0.25))]
TARGETS = {
    "Pillow": {1: 6.0, 2: 5.0, 5: 3.0, 10: 1.6},
    "OpenCV": {1: 4.5, 2: 4.0, 5: 2.2, 10: 1.25},
}


def _boxes(jpegs):
    """The random crop of each image: (y, x, height, width)."""
    draw = Draw("random", (0.08, 1.0), (3 / 4, 4 / 3), 0.0)
    keys = draw_keys((1,), range(len(jpegs)))
    sizes = [native.read_header([jpeg])[:2] for jpeg in jpegs]
    return [
        tuple(draw_boxes(key, size, [draw])[0, :4].tolist())
        for key, size in zip(keys, sizes, strict=True)
    ]


def _pillow(jpeg, box):
    y, x, height, width = box
    image = Image.open(io.BytesIO(jpeg)).convert("RGB")
    box = (x, y, x + width, y + height)
    return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box))


def _opencv(codec, jpeg, box):
    y, x, height, width = box
    pixels = codec.decode(jpeg, pixel_format=turbojpeg.TJPF_RGB)[y : y + height, x : x + width]
    return cv2.resize(pixels, (SIZE, SIZE), interpolation=cv2.INTER_AREA)


def _crops(bench, jpegs):
    """Random crops to 224 pixels of prefixes, against Pillow and OpenCV of the sources."""
    codec, boxes, sources = turbojpeg.TurboJPEG(), _boxes(jpegs["source"]), jpegs["source"]
    out = np.empty((SIZE, SIZE, 3), np.uint8)

    def ours(scan):
        for jpeg, box in zip(jpegs[scan], boxes, strict=True):
            native.decode([jpeg], out=out, crop=box, size=(SIZE, SIZE))

    def others(crop):
        for jpeg, box in zip(sources, boxes, strict=True):
            crop(jpeg, box)

    exact = native.decode([sources[0]], crop=boxes[0], size=(SIZE, SIZE), scale=1)
    assert np.abs(exact.astype(int) - _pillow(sources[0], boxes[0])).mean() < 1
    ways = {f"scan {scan}": functools.partial(ours, scan) for scan in SCANS[:-1]}
    ways |= {"Pillow": lambda: others(_pillow)}
    ways |= {"OpenCV": lambda: others(functools.partial(_opencv, codec))}
    times = bench.interleaved(ways)
    milliseconds = {n: Quartiles(1000 * s / len(sources) for s in t) for n, t in times.items()}
    bench.show("Random crops to 224 pixels: CPU ms per image", [milliseconds])
    for name, limits in TARGETS.items():
        for scan, least in limits.items():
            faster = ratios(times[name], times[f"scan {scan}"]).median
            bench.target(f"crop at scan {scan} over {name} of the source", faster, least=least)


def _views(bench, jpegs):
    """Ten views of each image, as DINO takes them, against one view."""
    one = ImageDecoder(views=[View(SIZE, scale=(0.25, 1))], flip=0.5)
    decoders = {"one view": one, "ten views": ImageDecoder(views=VIEWS, flip=0.5)}
    keys = draw_keys((7, 0), range(len(jpegs[1])))

    def all_of(decoder, scan):
        outs = [np.empty(shape, np.uint8) for shape in decoder.batch_shapes(len(jpegs[scan]))]
        with Pool(0) as pool:
            table = piece_table([[jpeg] for jpeg in jpegs[scan]])
            assert all(decoder.begin(pool, table, outs, keys, keep=jpegs[scan]).wait())
        return outs

    together, alone = all_of(decoders["ten views"], 5), decoders["ten views"](jpegs[5][0], keys[0])
    assert all(np.array_equal(a[0], b) for a, b in zip(together, alone, strict=True))
    jobs = {(name, scan): functools.partial(all_of, decoder, scan)
            for name, decoder in decoders.items() for scan in SCANS[:-1]}  # fmt: skip
    times = bench.interleaved(jobs)
    per_image = {k: [1000 * s / len(jpegs[1]) for s in v] for k, v in times.items()}
    show(bench, "Views", per_image)
    over = ratios(times["ten views", 5], times["one view", 5]).median
    bench.target("ten views over one view of 224, scan 5", over, most=2.6)


def run(bench):
    with bench.photos() as folder:
        jpegs = load(bench, folder)
    _crops(bench, jpegs)
    _views(bench, jpegs)
