"""Decoding in CPU milliseconds per image: whole images by each backend, WebDataset's own decoders
against pcrshard.JpegHandler, random crops to 224 pixels against Pillow and OpenCV, and ten views.

Asserts that backends give the same pixels, libjpeg-turbo's where the image is complete or smoothed,
and that the decoders' pictures of complete images are equal.
"""

import functools
import io
import os

import cv2
import numpy as np
import turbojpeg
import webdataset as wds
from PIL import Image

import pcrshard
from pcrshard import ImageDecoder, JpegHandler, View, native
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.jpeg.pixels import decode, image_size
from pcrshard.native.pieces import piece_table
from pcrshard.native.pool import Draw, Pool, draw_boxes, draw_keys

from .harness import Quartiles, ratios, read

ROUNDS = 5
SCANS = (1, 2, 5, 10, "source")
BACKENDS = {
    "native": lambda jpeg: native.decode([jpeg]),
    "native, smoothing": lambda jpeg: native.decode([jpeg], smoothing=True),
    "native, portable": lambda jpeg: native.decode([jpeg], backend="portable"),
    "native, portable, smoothing": lambda jpeg: native.decode(
        [jpeg], smoothing=True, backend="portable"
    ),
    "libjpeg-turbo, smoothing": decode,
}
# WebDataset's decoder and the handler that takes its place.
HANDLERS = {"pil": "rgb8", "rgb8": "rgb8", "torchrgb": "torchrgb"}
SIZE = 224
VIEWS = [View(SIZE, 2, scale=(0.25, 1)), View(96, 8, scale=(0.05, 0.25))]
TARGETS = {
    "Pillow": {1: 6.0, 2: 5.0, 5: 3.0, 10: 1.6},
    "OpenCV": {1: 4.5, 2: 4.0, 5: 2.2, 10: 1.25},
}


def _load(bench, folder):
    """JPEGs of three-component photographs at each scan, and as they were."""
    jpegs = {scan: [] for scan in SCANS}
    for path in bench.files(os.path.join(folder, "photos", "imagenet"), 2):
        source = read(path)
        if native.read_header([source]).num_components == 3:
            pieces = encode_jpeg(source).pieces
            jpegs["source"].append(source)
            for scan in SCANS[:-1]:
                jpegs[scan].append(pcrshard.join_scans(pieces[0], pieces[1:scan]))
    return jpegs


def _check_backends(jpeg, *, complete):
    fast, smooth, portable, portable_smooth, reference = (way(jpeg) for way in BACKENDS.values())
    assert np.array_equal(fast, portable)
    assert np.array_equal(smooth, portable_smooth)
    assert not complete or np.array_equal(fast, smooth)
    # Near the upper and lower edges versions of libjpeg-turbo differ.
    rows = slice(None) if complete else slice(34, -38)
    assert np.array_equal(smooth[rows], reference[rows])


def _times(bench, ways, jpegs, scans=SCANS):
    """CPU milliseconds per image of each (way, scan), round by round."""

    def all_of(way, scan):
        for jpeg in jpegs[scan]:
            way(jpeg)

    jobs = {
        (name, scan): functools.partial(all_of, way, scan)
        for name, way in ways.items()
        for scan in scans
    }
    return {
        key: [1000 * each / len(jpegs[key[1]]) for each in seconds]
        for key, seconds in bench.interleaved(jobs).items()
    }


def _show(bench, title, times):
    names = dict.fromkeys(name for name, _ in times)
    rows = [
        {"": name} | {str(s): Quartiles(ms) for (n, s), ms in times.items() if n == name}
        for name in names
    ]
    bench.show(f"{title}: CPU ms per image by scan, median [quartiles]", rows)


def _stage(how, jpeg):
    (sample,) = wds.decode(how)(iter([{"__key__": "0", "jpg": jpeg}]))
    return np.asarray(sample["jpg"])


def _webdataset(bench, jpegs):
    ways = {f"WebDataset {name}": functools.partial(_stage, name) for name in HANDLERS}
    ways |= {f"JpegHandler for {name}": functools.partial(_stage, JpegHandler(ours))
             for name, ours in HANDLERS.items()}  # fmt: skip
    for name in HANDLERS:
        for jpeg in jpegs["source"][::10]:
            pair = (ways[f"WebDataset {name}"](jpeg), ways[f"JpegHandler for {name}"](jpeg))
            assert np.abs(pair[0].astype(float) - pair[1]).max() < 1e-3
    times = _times(bench, ways, jpegs)
    _show(bench, "Decoders of WebDataset", times)
    gains = [
        ratios(times[f"WebDataset {name}", scan], times[f"JpegHandler for {name}", scan]).median
        for name in HANDLERS
        for scan in SCANS
    ]
    bench.target("least gain over WebDataset", min(gains), least=1.0)


def _boxes(jpegs):
    """The random crop of each image: (y, x, height, width)."""
    draw = Draw("random", (0.08, 1.0), (3 / 4, 4 / 3), 0.0)
    keys = draw_keys((1,), range(len(jpegs)))
    return [
        tuple(draw_boxes(key, image_size(jpeg), [draw])[0, :4].tolist())
        for key, jpeg in zip(keys, jpegs, strict=True)
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
    _show(bench, "Views", per_image)
    over = ratios(times["ten views", 5], times["one view", 5]).median
    bench.target("ten views over one view of 224, scan 5", over, most=2.6)


def run(bench):
    with bench.photos() as folder:
        jpegs = _load(bench, folder)
    for scan, images in jpegs.items():
        for jpeg in images[::10]:
            _check_backends(jpeg, complete=scan in (10, "source"))
    times = _times(bench, BACKENDS, jpegs)
    _show(bench, "Whole images", times)
    for scan in (1, 2):
        over = ratios(times["native, smoothing", scan], times["native", scan]).median
        bench.target(f"smoothed over plain, whole images, scan {scan}", over, most=1.6)
    _webdataset(bench, jpegs)
    _crops(bench, jpegs)
    _views(bench, jpegs)
