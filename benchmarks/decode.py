"""Decoding in CPU milliseconds per image: whole images by each backend, and WebDataset's own
decoders against pcrshard.JpegHandler.

Asserts that backends give the same pixels, libjpeg-turbo's where the image is complete or smoothed,
and that the decoders' pictures of complete images are equal.
"""

import functools
import os

import numpy as np
import webdataset as wds

import pcrshard
from pcrshard import JpegHandler, native
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.jpeg.pixels import decode

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


def load(bench, folder):
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


def show(bench, title, times):
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
    show(bench, "Decoders of WebDataset", times)
    gains = [
        ratios(times[f"WebDataset {name}", scan], times[f"JpegHandler for {name}", scan]).median
        for name in HANDLERS
        for scan in SCANS
    ]
    bench.target("least gain over WebDataset", min(gains), least=1.0)


def run(bench):
    with bench.photos() as folder:
        jpegs = load(bench, folder)
    for scan, images in jpegs.items():
        for jpeg in images[::10]:
            _check_backends(jpeg, complete=scan in (10, "source"))
    times = _times(bench, BACKENDS, jpegs)
    show(bench, "Whole images", times)
    for scan in (1, 2):
        over = ratios(times["native, smoothing", scan], times["native", scan]).median
        bench.target(f"smoothed over plain, whole images, scan {scan}", over, most=1.6)
    _webdataset(bench, jpegs)
