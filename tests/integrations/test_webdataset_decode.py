"""The JPEG handler for WebDataset's ``.decode()``."""

import pickle

import numpy as np
import pytest
import webdataset as wds
from support import read_samples

from pcrshard import JpegHandler, Shard
from pcrshard.testing import make_jpeg


@pytest.mark.parametrize(
    "spec", ["l8", "rgb8", "l", "rgb", "torchl8", "torchrgb8", "torchl", "torchrgb", "torch"]
)
def test_the_jpeg_handler_agrees_with_webdatasets(spec, dataset):
    """JpegHandler gives shape, type and nearly the values of WebDataset's own handler.

    Other fields it leaves to others.
    """
    samples = read_samples(dataset, 10)
    del samples["cat/005"], samples["dog/006"]
    for sample in list(samples.values())[:4]:
        ours = np.asarray(JpegHandler(spec)(".jpg", sample["jpg"]))
        theirs = np.asarray(wds.autodecode.ImageHandler(spec)(".jpg", sample["jpg"]))
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert np.abs(ours.astype(float) - theirs.astype(float)).max() <= (
            3 if spec.endswith("8") else 3 / 255
        )
    assert JpegHandler(spec)(".cls", b"5") is None
    with pytest.raises(ValueError, match="imagespec"):
        JpegHandler("nonsense")


def test_a_handler_travels_to_workers():
    """It pickles, and decodes the same afterwards."""
    handler = pickle.loads(pickle.dumps(JpegHandler("rgb8")))
    jpeg = make_jpeg()
    assert repr(handler) == "JpegHandler('rgb8')"
    assert np.array_equal(handler(".JPG", jpeg), JpegHandler("rgb8")(".jpg", jpeg))


@pytest.mark.parametrize(("spec", "mode"), [("pil", "RGB"), ("pilrgb", "RGB"), ("pill", "L")])
def test_pictures_of_pillow(spec, mode):
    """For transforms that take pictures, as WebDataset's own "pil" gives them."""
    jpeg = make_jpeg(3)
    picture = JpegHandler(spec)(".jpg", jpeg)
    assert (picture.mode, picture.size) == (mode, (64, 48))
    assert np.array_equal(np.asarray(picture), JpegHandler(f"{mode.lower()}8")(".jpg", jpeg))


def test_a_shard_without_pcr_scan_is_pointed_out(shard_urls):
    """Stock WebDataset reads a PCR shard as one sample; decoding it raises an error that names the
    missing stage.
    """
    plain = wds.WebDataset(shard_urls[:1], shardshuffle=False)
    for stage in (
        plain.pcr_decode(8),
        plain.decode(JpegHandler("rgb8"), handler=wds.ignore_and_stop),
    ):
        with pytest.warns(UserWarning, match=r"read as a plain tar.*\.pcr_scan\(5\)"):
            list(stage)


def test_smoothed_images_are_webdatasets(shard_urls):
    """With ``smoothing`` an unfinished image is what WebDataset's own handler shows of it."""
    sample = next(iter(Shard(shard_urls[0]).samples(1)))
    theirs = np.asarray(wds.autodecode.ImageHandler("rgb8")(".jpg", sample["jpg"])).astype(int)
    smooth = JpegHandler("rgb8", smoothing=True)
    assert np.abs(pickle.loads(pickle.dumps(smooth))(".jpg", sample["jpg"]) - theirs).max() <= 3
    plain = JpegHandler("rgb8", smoothing=False)(".jpg", sample["jpg"])
    assert np.abs(plain - theirs).max() > 3
