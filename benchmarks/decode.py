"""Decoding in CPU milliseconds per image: whole images against libjpeg-turbo, random crops to 224
pixels against Pillow and OpenCV of the sources, and ten views of each image, as DINO takes them.

Asserts that whole images equal libjpeg-turbo's, and crops Pillow's within a gray level.
"""

import functools
import io
import os

import cv2
import numpy as np
import turbojpeg
from PIL import Image

from pcrshard import ImageDecoder, View, join_scans, native
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.jpeg.markers import map_jpeg
from pcrshard.jpeg.other_formats import decode
from pcrshard.native.pool import Draw, draw_boxes, draw_keys

from .harness import ratios, read

ROUNDS = 5
SIZE = 224
SCANS = (1, 2, 5, 10)
VIEWS = [View(SIZE, 2, scale=(0.25, 1)), View(96, 8, scale=(0.05, 0.25))]
LEAST_FASTER = {
    "Pillow": {1: 6.0, 2: 5.0, 5: 3.0, 10: 1.6},
    "OpenCV": {1: 4.5, 2: 4.0, 5: 2.2, 10: 1.25},
}


def _load(bench, folder):
    """JPEGs of three-component photographs at each scan, and the sources."""
    jpegs = {scan: [] for scan in (*SCANS, "source")}
    for path in bench.files(os.path.join(folder, "photos", "imagenet"), 2):
        source = read(path)
        if len(map_jpeg(source).frame.components) == 3:
            pieces = encode_jpeg(source).pieces
            jpegs["source"].append(source)
            for scan in SCANS:
                jpegs[scan].append(join_scans(pieces[0], pieces[1:scan]))
    return jpegs


def _compare(bench, title, decoders, jpegs):
    """Seconds of ``decoder(jpeg, index)`` over all images, by "name, scan"."""

    def run_all(decoder, images):
        for index, jpeg in enumerate(images):
            decoder(jpeg, index)

    ways = {
        f"{name}, {scan}": functools.partial(run_all, decoder, images)
        for name, decoder in decoders.items()
        for scan, images in jpegs.items()
    }
    return bench.compare(f"{title}: CPU ms per image", ways, per=len(jpegs["source"]))


def _whole(bench, jpegs):
    decoders = {
        "native core": lambda jpeg, _: native.decode([jpeg]),
        "native core, smoothing": lambda jpeg, _: native.decode([jpeg], smoothing=True),
        "libjpeg-turbo, smoothing": lambda jpeg, _: decode(jpeg),
    }
    for jpeg in [*jpegs[10][::10], *jpegs["source"][::10]]:
        plain, smooth, reference = (decoder(jpeg, 0) for decoder in decoders.values())
        assert np.array_equal(plain, reference)
        assert np.array_equal(smooth, reference)
    seconds = _compare(bench, "Whole images", decoders, jpegs)
    for scan in (1, 2):
        over = ratios(seconds[f"native core, smoothing, {scan}"], seconds[f"native core, {scan}"])
        bench.target(f"smoothing over none, scan {scan}", over, most=1.6)


def _boxes(jpegs):
    """The random crop of each image: (y, x, height, width)."""
    draw = Draw("random", (0.08, 1.0), (3 / 4, 4 / 3), 0.0)
    keys = draw_keys((1,), range(len(jpegs)))
    sizes = [map_jpeg(jpeg).frame[1:3] for jpeg in jpegs]
    drawn = zip(keys, sizes, strict=True)
    return [tuple(draw_boxes(key, size, [draw])[0, :4].tolist()) for key, size in drawn]


def _crops(bench, jpegs):
    codec, boxes = turbojpeg.TurboJPEG(), _boxes(jpegs["source"])

    def ours(jpeg, index):
        native.decode([jpeg], crop=boxes[index], size=(SIZE, SIZE))

    def pillow(jpeg, index):
        y, x, height, width = boxes[index]
        image, box = Image.open(io.BytesIO(jpeg)).convert("RGB"), (x, y, x + width, y + height)
        return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box))

    def opencv(jpeg, index):
        y, x, height, width = boxes[index]
        pixels = codec.decode(jpeg, pixel_format=turbojpeg.TJPF_RGB)[y : y + height, x : x + width]
        return cv2.resize(pixels, (SIZE, SIZE), interpolation=cv2.INTER_AREA)

    first = jpegs["source"][0]
    exact = native.decode([first], crop=boxes[0], size=(SIZE, SIZE), scale=1)
    assert np.abs(exact.astype(int) - pillow(first, 0)).mean() < 1
    decoders = {"native core": ours, "Pillow": pillow, "OpenCV": opencv}
    seconds = _compare(bench, "Random crops to 224 pixels", decoders, jpegs)
    for name, limits in LEAST_FASTER.items():
        for scan, least in limits.items():
            faster = ratios(seconds[f"{name}, source"], seconds[f"native core, {scan}"])
            bench.target(f"crop at scan {scan} over {name} of the source", faster, least=least)


def _views(bench, jpegs):
    keys = draw_keys((7, 0), range(len(jpegs["source"])))
    one = ImageDecoder(views=[View(SIZE, scale=(0.25, 1))], flip=0.5)
    ten = ImageDecoder(views=VIEWS, flip=0.5)
    decoders = {
        "one view": lambda jpeg, index: one(jpeg, keys[index]),
        "ten views": lambda jpeg, index: ten(jpeg, keys[index]),
    }
    seconds = _compare(bench, "Views", decoders, jpegs)
    over = ratios(seconds["ten views, 5"], seconds["one view, 5"])
    bench.target("ten views over one view of 224 pixels, scan 5", over, most=2.6)


def run(bench):
    with bench.photos() as folder:
        jpegs = _load(bench, folder)
    _whole(bench, jpegs)
    _crops(bench, jpegs)
    _views(bench, jpegs)
