"""The peers: how each stores the images, and how each reads them.

``FORMS`` are functions ``write(images, folder)``, where ``images`` is a list of (path, label).
``PEERS`` read a form: a function of a folder or URL and a number of workers gives an epoch's
batches of pixels. Imports stand in the functions, because each peer runs in an environment of its
own.
"""

import functools
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from typing import NamedTuple

from images import (
    BATCH,
    SIDE,
    crop_picture,
    decode_plain,
    decode_tuned,
    draw_box,
    torch_batches,
)

SHARD_IMAGES = 65


def read(path):
    with open(path, "rb") as file:
        return file.read()


def groups(images, folder, pattern):
    """(path, images) of each shard."""
    for at in range(0, len(images), SHARD_IMAGES):
        path = os.path.join(folder, pattern.format(at // SHARD_IMAGES))
        yield path, images[at : at + SHARD_IMAGES]


def names(folder, pattern):
    """The shards of a folder, on disk or on a server, which does not tell how many there are."""
    count = int(read(os.path.join(os.environ["PEERS_LOCAL"], "shards")))
    return [f"{folder}/{pattern.format(number)}" for number in range(count)]


def decoding(dataset, decode):
    """A dataset class whose samples are decoded as they are read."""

    class Images(dataset):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            return decode(sample["jpg"]), sample["cls"]

    return Images


# pcrshard


def write_pcr(images, folder, **resized):
    import pcrshard

    listed = os.path.join(folder, "..", "pcr.jsonl")
    with open(listed, "w") as file:
        file.writelines(json.dumps({"path": path, "label": label}) + "\n" for path, label in images)
    options = pcrshard.EncodeOptions(
        samples_per_shard=SHARD_IMAGES, fmt=pcrshard.ShardFormat("standard"), **resized
    )
    pcrshard.encode(listed, folder, options, workers=1)


def read_pcr(folder, workers, scan, threads=True):
    import pcrshard

    decoder = pcrshard.ImageDecoder(SIDE, "random")
    dataset = pcrshard.PCRDataset(folder, scan=scan, decoder=decoder)
    how = {"threads": workers} if threads else {"num_workers": workers}
    for batch in pcrshard.PCRLoader(dataset, BATCH, seed=1, **how):
        yield batch["jpg"]


def read_pcr_by_webdataset(folder, workers):
    """``.pcr_scan(5)`` in a pipeline that is WebDataset's otherwise."""
    import webdataset as wds

    import pcrshard

    _, urls = pcrshard.open_dataset(folder)
    decoder = pcrshard.ImageDecoder(SIDE, "random", layout="hwc")
    dataset = wds.WebDataset(urls, shardshuffle=len(urls), seed=1)
    dataset = dataset.pcr_scan(5).shuffle(500).to_tuple("jpg", "cls")
    dataset = dataset.map_tuple(decoder, int)
    return torch_batches(dataset, workers)


# Tars


def write_tars(images, folder, stored=read):
    for path, group in groups(images, folder, "data-{:06d}.tar"):
        with tarfile.open(path, "w") as tar:
            shard = os.path.basename(path).partition(".")[0]
            for i, (source, label) in enumerate(group):
                for extension, data in (("jpg", stored(source)), ("cls", b"%d" % label)):
                    info = tarfile.TarInfo(f"{shard}-{i:06d}.{extension}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def resized(path):
    """The shorter side 256 pixels, quality 90: what many people train from."""
    from PIL import Image

    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    scale = 256 / min(picture.size)
    if scale < 1:
        size = tuple(max(256, round(side * scale)) for side in picture.size)
        picture = picture.resize(size, Image.Resampling.BICUBIC)
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=90)
    return out.getvalue()


def write_indexed_tars(images, folder):
    """The same tars, and what ``pcrshard index`` adds."""
    import pcrshard

    write_tars(images, folder)
    # With checksums, the index is of the tars under any URL.
    pcrshard.index_tars(folder, options=pcrshard.IndexOptions(checksums=True))


def read_tars(folder, workers, decode=None):
    """WebDataset; without ``decode`` by its own ``decode("pil")``."""
    import webdataset as wds

    urls = names(folder, "data-{:06d}.tar")
    dataset = wds.WebDataset(urls, shardshuffle=len(urls), seed=1).shuffle(500)
    if decode is None:
        dataset = dataset.decode("pil")
    dataset = dataset.to_tuple("jpg", "cls").map_tuple(decode or crop_picture, int)
    return torch_batches(dataset, workers)


def write_energon(images, folder):
    """The same tars, and what ``energon prepare`` adds."""
    write_tars(images, folder)
    command = os.path.join(os.path.dirname(sys.executable), "energon")
    how = ["--non-interactive", "--split-ratio", "1,0,0", "--num-workers", "1"]
    how += ["--sample-type", "ImageClassificationSample"]
    how += ["--field-map", '{"image": "jpg", "label": "cls"}']
    subprocess.run([command, "prepare", folder, *how], check=True, stdout=subprocess.DEVNULL)


def read_by_energon(folder, workers, decode):
    """Megatron-Energon."""
    import numpy as np
    from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset

    class Images(DefaultTaskEncoder):
        decoder = None

        def encode_sample(self, sample):
            return decode(sample.image)

        def batch(self, samples):
            return np.stack(samples)

    dataset = get_train_dataset(
        folder,
        batch_size=BATCH,
        shuffle_buffer_size=500,
        max_samples_per_sequence=None,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=workers),
        task_encoder=Images(),
        repeat=False,
    )
    yield from get_loader(dataset)


@functools.cache  # starting it again takes seconds
def dali_pipeline(folder, workers):
    """DALI's CPU pipeline over tars: decodes only the crop."""
    from nvidia.dali import fn, pipeline_def, types

    urls = names(folder, "data-{:06d}.tar")

    @pipeline_def(batch_size=BATCH, num_threads=workers, device_id=None, seed=1)
    def pipeline():
        jpegs, _ = fn.readers.webdataset(
            paths=urls,
            ext=["jpg", "cls"],
            random_shuffle=True,
            initial_fill=500,
            missing_component_behavior="error",
            name="reader",
        )
        images = fn.decoders.image_random_crop(
            jpegs,
            device="cpu",
            output_type=types.RGB,
            random_area=[0.08, 1.0],
            random_aspect_ratio=[3 / 4, 4 / 3],
        )
        return fn.resize(images, size=[SIDE, SIDE], interp_type=types.INTERP_LINEAR)

    made = pipeline()
    made.build()
    return made


def read_by_dali(folder, workers):
    pipeline = dali_pipeline(folder, workers)
    for _ in range(pipeline.epoch_size("reader") // BATCH):
        (images,) = pipeline.run()
        yield images.as_array()


# Files


def write_files(images, folder):
    for number, (path, label) in enumerate(images):
        target = os.path.join(folder, str(label))
        os.makedirs(target, exist_ok=True)
        shutil.copy(path, os.path.join(target, f"{number:06d}.jpg"))


class FileList:
    """A map-style dataset of files, which are read and decoded."""

    def __init__(self, folder, decode):
        self.decode = decode
        self.files = sorted(
            (os.path.join(top, name), int(os.path.basename(top)))
            for top, _, found in os.walk(folder)
            for name in found
            if name.endswith(".jpg")
        )

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path, label = self.files[index]
        return self.decode(read(path)), label


def decode_by_torch(data, torchcodec=False):
    """By torchvision's or torchcodec's decoder."""
    import torch
    import torchvision.transforms.v2.functional as F

    if torchcodec:
        from torchcodec.decoders import decode_jpeg
    else:
        from torchvision.io import ImageReadMode
        from torchvision.io import decode_jpeg as decode

        decode_jpeg = functools.partial(decode, mode=ImageReadMode.RGB)
    pixels = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    pixels = pixels.expand(3, -1, -1)
    y, x, h, w = draw_box(*pixels.shape[-2:])
    return F.resized_crop(pixels, y, x, h, w, [SIDE, SIDE], antialias=True).numpy()


def read_files(folder, workers, decode):
    return torch_batches(FileList(folder, decode), workers, shuffle=True)


def read_by_spdl(folder, workers):
    """Files read and decoded by threads; FFmpeg crops and scales."""
    import numpy as np
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    files = FileList(folder, None).files
    random.Random(1).shuffle(files)

    def decode(item):
        packets = spdl.io.demux_image(read(item[0]))
        y, x, h, w = draw_box(packets.height, packets.width)
        crop = f"crop={w}:{h}:{x}:{y},scale={SIDE}:{SIDE}:flags=bilinear,format=pix_fmts=rgb24"
        frames = spdl.io.decode_packets(packets, filter_desc=crop)
        return spdl.io.to_numpy(spdl.io.convert_frames(frames))

    builder = PipelineBuilder().add_source(files).pipe(decode, concurrency=workers)
    pipeline = builder.aggregate(BATCH).pipe(np.stack).add_sink(4).build(num_threads=workers + 1)
    with pipeline.auto_stop():
        yield from pipeline.get_iterator(timeout=60)


# Formats of their own


def write_mds(images, folder):
    """MosaicML Streaming: shards of 7 MB."""
    from streaming import MDSWriter

    columns = {"jpg": "bytes", "cls": "int"}
    with MDSWriter(out=folder, columns=columns, size_limit=7 << 20) as writer:
        for path, label in images:
            writer.write({"jpg": read(path), "cls": label})


def read_mds(folder, workers, decode):
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    where = {"remote": folder, "local": fresh_folder()} if "://" in folder else {"local": folder}
    images = decoding(StreamingDataset, decode)
    dataset = images(**where, shuffle=True, batch_size=BATCH, shuffle_seed=1)
    return torch_batches(dataset, workers)


def fresh_folder():
    return tempfile.mkdtemp(dir=os.environ["PEERS_SCRATCH"])


def litdata_sample(image):
    path, label = image
    return {"jpg": read(path), "cls": label}


def write_litdata(images, folder):
    import litdata

    how = {"chunk_bytes": "7MB", "num_workers": 1, "verbose": False}
    litdata.optimize(fn=litdata_sample, inputs=images, output_dir=folder, **how)


def read_litdata(folder, workers, decode):
    import litdata

    where = {"cache_dir": fresh_folder()} if "://" in folder else {}
    images = decoding(litdata.StreamingDataset, decode)(folder, shuffle=True, seed=1, **where)
    return torch_batches(images, workers, litdata.StreamingDataLoader)


def write_parquet(images, folder):
    """HuggingFace datasets: files with an Image column."""
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    for path, group in groups(images, folder, "data-{:06d}.parquet"):
        columns = {
            "image": [{"bytes": read(source), "path": None} for source, _ in group],
            "label": [label for _, label in group],
        }
        datasets.Dataset.from_dict(columns, features=features).to_parquet(path)


def read_by_datasets(folder, workers, kind, ending, image):
    """HuggingFace datasets of Parquet files, or of tars."""
    import datasets

    urls = names(folder, f"data-{{:06d}}.{ending}")
    dataset = datasets.load_dataset(kind, data_files=urls, split="train", streaming=True)
    dataset = dataset.shuffle(seed=1, buffer_size=500)

    def crop(sample):
        return {"pixels": crop_picture(sample[image])}

    def collate(samples):
        return [sample["pixels"] for sample in samples], None

    dataset = dataset.map(crop, remove_columns=list(dataset.features or ()))
    return torch_batches(dataset, workers, collate_fn=collate)


def write_tfrecord(images, folder):
    import tensorflow as tf

    for path, group in groups(images, folder, "data-{:06d}.rec"):
        with tf.io.TFRecordWriter(path) as writer:
            for source, label in group:
                jpeg = tf.train.Feature(bytes_list=tf.train.BytesList(value=[read(source)]))
                number = tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))
                features = tf.train.Features(feature={"jpg": jpeg, "cls": number})
                writer.write(tf.train.Example(features=features).SerializeToString())


@functools.cache
def tf_dataset(folder, workers):
    """tf.data: decode and crop in one operation."""
    import tensorflow as tf

    kinds = {
        "jpg": tf.io.FixedLenFeature([], tf.string),
        "cls": tf.io.FixedLenFeature([], tf.int64),
    }

    def crop(record):
        sample = tf.io.parse_single_example(record, kinds)
        shape = tf.io.extract_jpeg_shape(sample["jpg"])
        everything = tf.constant([[[0.0, 0.0, 1.0, 1.0]]])
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            shape, everything, area_range=(0.08, 1.0), aspect_ratio_range=(3 / 4, 4 / 3)
        )
        box = tf.concat([begin[:2], size[:2]], 0)
        pixels = tf.image.decode_and_crop_jpeg(sample["jpg"], box, channels=3)
        pixels = tf.image.resize(pixels, (SIDE, SIDE), antialias=True)
        return tf.cast(pixels, tf.uint8), sample["cls"]

    dataset = tf.data.TFRecordDataset(names(folder, "data-{:06d}.rec")).shuffle(500, seed=1)
    dataset = dataset.map(crop, num_parallel_calls=workers).batch(BATCH).prefetch(2)
    options = tf.data.Options()
    options.threading.private_threadpool_size = workers
    options.threading.max_intra_op_parallelism = 1
    return dataset.with_options(options)


def read_tfrecord(folder, workers):
    for pixels, _ in tf_dataset(folder, workers):
        yield pixels.numpy()


def write_arrayrecord(images, folder):
    from array_record.python import array_record_module

    for path, group in groups(images, folder, "data-{:06d}.array_record"):
        writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
        for source, label in group:
            writer.write(b"%06d" % label + read(source))
        writer.close()


def record_pixels(record, decode):
    return decode(record[6:])


def read_by_grain(folder, workers, decode):
    """Grain over ArrayRecord, with worker processes."""
    import grain
    import grain.python as gp

    source = gp.ArrayRecordDataSource(names(folder, "data-{:06d}.array_record"))
    # Its worker processes are sent the function.
    crop = functools.partial(record_pixels, decode=decode)
    dataset = grain.MapDataset.source(source).shuffle(seed=1).map(crop)
    dataset = dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=8))
    dataset = dataset.batch(BATCH)
    yield from dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))


class PictureList:
    """Pictures as FFCV's writer takes them."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        from PIL import Image

        path, label = self.images[index]
        with Image.open(path) as picture:
            return picture.convert("RGB"), label


def write_ffcv(images, folder, side=None):
    """FFCV's own files; it stores JPEGs that it has compressed again, at quality 90."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    image = RGBImageField(write_mode="jpg", max_resolution=side)
    fields = {"image": image, "label": IntField()}
    writer = DatasetWriter(os.path.join(folder, "data.ffcv"), fields, num_workers=1)
    writer.from_indexed_dataset(PictureList(images))


@functools.cache
def ffcv_loader(folder, workers):
    from ffcv.fields import decoders
    from ffcv.loader import Loader, OrderOption

    return Loader(
        os.path.join(folder, "data.ffcv"),
        batch_size=BATCH,
        num_workers=workers,
        order=OrderOption.RANDOM,
        pipelines={
            "image": [decoders.RandomResizedCropRGBImageDecoder((SIDE, SIDE))],
            "label": [decoders.IntDecoder()],
        },
        os_cache=True,
    )


def read_ffcv(folder, workers):
    for pixels, _ in ffcv_loader(folder, workers):
        yield pixels


# Of each form: its environment, and how it is written.
FORMS = {
    "pcr": ("pcrshard", write_pcr),
    "pcr256": (
        "pcrshard",
        functools.partial(write_pcr, resize_short=256, reencode_quality=90),
    ),
    "tar": ("torch", write_tars),
    "indexed tar": ("pcrshard", write_indexed_tars),
    "energon": ("energon", write_energon),
    "tar256": ("torch", functools.partial(write_tars, stored=resized)),
    "files": ("torch", write_files),
    "mds": ("torchvision", write_mds),
    "litdata": ("litdata", write_litdata),
    "parquet": ("hf", write_parquet),
    "tfrecord": ("tensorflow", write_tfrecord),
    "arrayrecord": ("grain", write_arrayrecord),
    "ffcv": ("ffcv", write_ffcv),
    "ffcv256": ("ffcv", functools.partial(write_ffcv, side=256)),
}


class Peer(NamedTuple):
    """A form, the environment that it is read in, and how."""

    form: str
    environment: str
    read: Callable
    options: dict | None = None
    server: str = ""  # of its files: "http", "s3" or none


PLAIN, TUNED = {"decode": decode_plain}, {"decode": decode_tuned}
TORCHCODEC = {"decode": functools.partial(decode_by_torch, torchcodec=True)}
PARQUET = {"kind": "parquet", "ending": "parquet", "image": "image"}
HF_TARS = {"kind": "webdataset", "ending": "tar", "image": "jpg"}

PEERS = {
    f"pcrshard {label}{ending}": Peer("pcr", "pcrshard", read_pcr, {"scan": scan, **how}, "http")
    for ending, how in (("", {"threads": False}), (", threads", {}))
    for label, scan in (("scan 2", 2), ("scan 5", 5), ("full", "full"))
}
PEERS |= {
    "pcrshard 256 px, threads": Peer("pcr256", "pcrshard", read_pcr, {"scan": "full"}, "http"),
    "pcrshard 256 px scan 5, threads": Peer("pcr256", "pcrshard", read_pcr, {"scan": 5}, "http"),
    "pcrshard tars": Peer(
        "indexed tar", "pcrshard", read_pcr, {"scan": "full", "threads": False}, "http"
    ),
    "pcrshard tars, threads": Peer("indexed tar", "pcrshard", read_pcr, {"scan": "full"}, "http"),
    "WebDataset .pcr_scan(5)": Peer("pcr", "pcrshard", read_pcr_by_webdataset, server="http"),
    "WebDataset pil": Peer("tar", "torch", read_tars, server="http"),
    "WebDataset tuned": Peer("tar", "torch", read_tars, TUNED, "http"),
    "Energon": Peer("energon", "energon", read_by_energon, PLAIN),
    "Energon tuned": Peer("energon", "energon", read_by_energon, TUNED),
    "256 px pil": Peer("tar256", "torch", read_tars, server="http"),
    "256 px tuned": Peer("tar256", "torch", read_tars, TUNED, "http"),
    "files pil": Peer("files", "torch", read_files, PLAIN),
    "files torchvision": Peer("files", "torchvision", read_files, {"decode": decode_by_torch}),
    "files torchcodec": Peer("files", "torchvision", read_files, TORCHCODEC),
    "MosaicML": Peer("mds", "torchvision", read_mds, PLAIN, "s3"),
    "MosaicML tuned": Peer("mds", "torchvision", read_mds, TUNED, "s3"),
    "LitData": Peer("litdata", "litdata", read_litdata, PLAIN, "s3"),
    "LitData tuned": Peer("litdata", "litdata", read_litdata, TUNED, "s3"),
    "HF parquet": Peer("parquet", "hf", read_by_datasets, PARQUET, "http"),
    "HF webdataset": Peer("tar", "hf", read_by_datasets, HF_TARS, "http"),
    "TFRecord": Peer("tfrecord", "tensorflow", read_tfrecord),
    "Grain": Peer("arrayrecord", "grain", read_by_grain, PLAIN),
    "Grain tuned": Peer("arrayrecord", "grain", read_by_grain, TUNED),
    "SPDL": Peer("files", "spdl", read_by_spdl),
    "DALI CPU": Peer("tar", "dali", read_by_dali),
    "FFCV": Peer("ffcv", "ffcv", read_ffcv),
    "FFCV 256 px": Peer("ffcv256", "ffcv", read_ffcv),
}
