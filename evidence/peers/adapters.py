"""The peers: how each stores the images, and how each reads them.

A peer is a class with ``prepare(images, folder)`` and ``epoch(folder, workers)``. ``images`` is a
list of (path, label). An epoch gives batches whose first part is the pixels. Imports stand in the
methods, because each peer runs in an environment of its own.
"""

import io
import os
import random
import tarfile

from images import (
    BATCH,
    DECODERS,
    SIDE,
    crop_picture,
    torch_loader,
)

SHARD_IMAGES = 65


def read(path):
    with open(path, "rb") as file:
        return file.read()


def groups(images):
    return [images[at : at + SHARD_IMAGES] for at in range(0, len(images), SHARD_IMAGES)]


class Peer:
    """Where the images are (``form``), in which environment, and how an image is decoded."""

    form = ""
    environment = "torch"
    streams = False  # whether it reads from a server
    s3 = False  # whether it calls the server a bucket
    started = None  # what one epoch leaves for the next, where starting it again takes seconds

    def __init__(self, decoder="plain", **options):
        self.decode = DECODERS.get(decoder)
        self.options = options

    def location(self, folder, server):
        return "s3://bucket/" if server and self.s3 else server or folder


def decoding(dataset, decode):
    """A dataset class whose samples are decoded as they are read."""

    class Images(dataset):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            return decode(sample["jpg"]), sample["cls"]

    return Images


class PCRShard(Peer):
    form = "pcr"
    environment = "pcrshard"
    streams = True
    resized = ()  # options of encode

    def prepare(self, images, folder):
        import json

        import pcrshard

        listed = os.path.join(folder, "..", "pcr.jsonl")
        with open(listed, "w") as file:
            for path, label in images:
                json.dump({"path": path, "label": label}, file)
                file.write("\n")
        options = pcrshard.EncodeOptions(samples_per_shard=SHARD_IMAGES, **dict(self.resized))
        pcrshard.encode(listed, folder, options, workers=1)

    def epoch(self, folder, workers):
        import pcrshard

        decoder = pcrshard.ImageDecoder(SIDE, "random")
        dataset = pcrshard.PCRDataset(folder, scan=self.options["scan"], decoder=decoder)
        how = {"threads": workers} if self.options.get("threads") else {"num_workers": workers}
        for batch in pcrshard.PCRLoader(dataset, BATCH, seed=1, **how):
            yield batch["jpg"]


class PCRShard256(PCRShard):
    """The shorter side 256 pixels, quality 90, as for the peers that resize once."""

    form = "pcr256"
    resized = (("resize_short", 256), ("reencode_quality", 90))


class PCRInWebDataset(PCRShard):
    """``.pcr_scan(5)`` in a pipeline that is WebDataset's otherwise."""

    def epoch(self, folder, workers):
        import webdataset as wds

        import pcrshard

        _, urls = pcrshard.open_dataset(folder)
        decoder = pcrshard.ImageDecoder(SIDE, "random", layout="hwc")
        dataset = wds.WebDataset(urls, shardshuffle=len(urls), seed=1)
        dataset = dataset.pcr_scan(self.options["scan"]).shuffle(500).to_tuple("jpg", "cls")
        dataset = dataset.map_tuple(lambda jpeg: decoder(jpeg, random), int)
        yield from torch_loader(dataset, workers)


class WebDataset(Peer):
    form = "tar"
    environment = "torch"
    streams = True

    def prepare(self, images, folder):
        for number, group in enumerate(groups(images)):
            with tarfile.open(os.path.join(folder, f"data-{number:06d}.tar"), "w") as tar:
                for i, (path, label) in enumerate(group):
                    for extension, data in (("jpg", self.stored(path)), ("cls", b"%d" % label)):
                        info = tarfile.TarInfo(f"{number:03d}{i:06d}.{extension}")
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))

    def stored(self, path):
        return read(path)

    def epoch(self, folder, workers):
        import webdataset as wds

        urls = names(folder, "data-{:06d}.tar")
        dataset = wds.WebDataset(urls, shardshuffle=len(urls), seed=1).shuffle(500)
        if self.options.get("pil"):
            dataset = dataset.decode("pil").to_tuple("jpg", "cls").map_tuple(crop_picture, int)
        else:
            dataset = dataset.to_tuple("jpg", "cls").map_tuple(self.decode, int)
        yield from torch_loader(dataset, workers)


class StaticResize(WebDataset):
    """The shorter side 256 pixels, quality 90: what many people train from."""

    form = "tar256"
    streams = True

    def stored(self, path):
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


def names(folder, pattern):
    """The shards of a folder, on disk or on a server, which tells their number in its path."""
    count = int(read(os.path.join(os.environ["PEERS_LOCAL"], "shards")))
    return [f"{folder}/{pattern.format(number)}" for number in range(count)]


class Files(Peer):
    """A file an image, by a torch Dataset."""

    form = "files"

    def prepare(self, images, folder):
        import shutil

        for number, (path, label) in enumerate(images):
            target = os.path.join(folder, str(label))
            os.makedirs(target, exist_ok=True)
            shutil.copy(path, os.path.join(target, f"{number:06d}.jpg"))

    def epoch(self, folder, workers):
        yield from torch_loader(FileList(folder, self.decode_file), workers, shuffle=True)

    def decode_file(self, path):
        return self.decode(read(path))


class TorchFiles(Files):
    """The same by torchvision's or torchcodec's decoder."""

    environment = "torchvision"

    def decode_file(self, path):
        import torch
        import torchvision.transforms.v2.functional as F
        from images import draw_box

        data = torch.frombuffer(bytearray(read(path)), dtype=torch.uint8)
        if self.options["decoder_of"] == "torchcodec":
            from torchcodec.decoders import decode_jpeg

            pixels = decode_jpeg(data)
        else:
            from torchvision.io import ImageReadMode, decode_jpeg

            pixels = decode_jpeg(data, ImageReadMode.RGB)
        if pixels.shape[0] == 1:
            pixels = pixels.expand(3, -1, -1)
        y, x, h, w = draw_box(random, *pixels.shape[-2:])
        return F.resized_crop(pixels, y, x, h, w, [SIDE, SIDE], antialias=True).numpy()


class FileList:
    """A map-style dataset."""

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
        return self.decode(path), label


class Streaming(Peer):
    """MosaicML Streaming: MDS shards of 64 MB."""

    form = "mds"
    environment = "torchvision"
    streams = True
    s3 = True

    def prepare(self, images, folder):
        from streaming import MDSWriter

        columns = {"jpg": "bytes", "cls": "int"}
        with MDSWriter(out=folder, columns=columns, size_limit=7 << 20) as writer:
            for path, label in images:
                writer.write({"jpg": read(path), "cls": label})

    def epoch(self, folder, workers):
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        where = {"local": folder}
        if "://" in folder:
            where = {"remote": folder, "local": fresh_folder()}
        images = decoding(StreamingDataset, self.decode)
        dataset = images(**where, shuffle=True, batch_size=BATCH, shuffle_seed=1)
        yield from torch_loader(dataset, workers)


def fresh_folder():
    import tempfile

    return tempfile.mkdtemp(dir=os.environ["PEERS_SCRATCH"])


class LitData(Peer):
    form = "litdata"
    environment = "litdata"
    streams = True
    s3 = True

    def prepare(self, images, folder):
        import litdata

        litdata.optimize(
            fn=litdata_sample,
            inputs=images,
            output_dir=folder,
            chunk_bytes="7MB",
            num_workers=1,
            verbose=False,
        )

    def epoch(self, folder, workers):
        import litdata
        import torch
        from images import batches_of

        torch.set_num_threads(1)
        where = {"cache_dir": fresh_folder()} if "://" in folder else {}
        images = decoding(litdata.StreamingDataset, self.decode)
        yield from litdata.StreamingDataLoader(
            images(folder, shuffle=True, seed=1, **where),
            batch_size=BATCH,
            num_workers=workers,
            collate_fn=batches_of,
        )


def litdata_sample(image):
    path, label = image
    return {"jpg": read(path), "cls": label}


class HuggingFace(Peer):
    """datasets: parquet files with an Image column, or tars in its webdataset form."""

    form = "parquet"
    environment = "hf"
    streams = True

    def prepare(self, images, folder):
        import datasets

        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        for number, group in enumerate(groups(images)):
            columns = {
                "image": [{"bytes": read(path), "path": None} for path, _ in group],
                "label": [label for _, label in group],
            }
            dataset = datasets.Dataset.from_dict(columns, features=features)
            dataset.to_parquet(os.path.join(folder, f"data-{number:06d}.parquet"))

    def epoch(self, folder, workers):
        import datasets

        kind, image = self.options["kind"], self.options["image"]
        urls = names(folder, f"data-{{:06d}}.{self.form}")
        dataset = datasets.load_dataset(kind, data_files=urls, split="train", streaming=True)
        dataset = dataset.shuffle(seed=1, buffer_size=500)

        def crop(sample):
            return {"pixels": crop_picture(sample[image])}

        def collate(samples):
            return [sample["pixels"] for sample in samples]

        dataset = dataset.map(crop, remove_columns=list(dataset.features or ()))
        for batch in torch_loader(dataset, workers, collate_fn=collate):
            yield (batch,)


class HuggingFaceTars(HuggingFace):
    form = "tar"


class TFRecord(Peer):
    """tf.data: decode and crop in one operation."""

    form = "tfrecord"
    environment = "tensorflow"

    def prepare(self, images, folder):
        import tensorflow as tf

        for number, group in enumerate(groups(images)):
            with tf.io.TFRecordWriter(os.path.join(folder, f"data-{number:06d}.rec")) as writer:
                for path, label in group:
                    jpeg = tf.train.Feature(bytes_list=tf.train.BytesList(value=[read(path)]))
                    number_of = tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))
                    features = tf.train.Features(feature={"jpg": jpeg, "cls": number_of})
                    writer.write(tf.train.Example(features=features).SerializeToString())

    def epoch(self, folder, workers):
        self.started = self.started or self.start(folder, workers)
        for pixels, label in self.started:
            yield pixels.numpy(), label

    def start(self, folder, workers):
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
            y, x, _ = tf.unstack(begin)
            h, w, _ = tf.unstack(size)
            box = tf.stack([y, x, h, w])
            pixels = tf.image.decode_and_crop_jpeg(sample["jpg"], box, channels=3)
            pixels = tf.image.resize(pixels, (SIDE, SIDE), antialias=True)
            return tf.cast(pixels, tf.uint8), sample["cls"]

        dataset = tf.data.TFRecordDataset(names(folder, "data-{:06d}.rec")).shuffle(500, seed=1)
        dataset = dataset.map(crop, num_parallel_calls=workers).batch(BATCH).prefetch(2)
        options = tf.data.Options()
        options.threading.private_threadpool_size = workers
        options.threading.max_intra_op_parallelism = 1
        return dataset.with_options(options)


class Grain(Peer):
    """Grain over ArrayRecord, with worker processes."""

    form = "arrayrecord"
    environment = "grain"

    def prepare(self, images, folder):
        from array_record.python import array_record_module

        for number, group in enumerate(groups(images)):
            path = os.path.join(folder, f"data-{number:06d}.array_record")
            writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
            for path, label in group:
                writer.write(b"%06d" % label + read(path))
            writer.close()

    def epoch(self, folder, workers):
        import grain
        import grain.python as gp

        source = gp.ArrayRecordDataSource(names(folder, "data-{:06d}.array_record"))
        dataset = grain.MapDataset.source(source).shuffle(seed=1).map(GrainDecode(self.decode))
        dataset = dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=8))
        dataset = dataset.batch(BATCH)
        yield from dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))


class GrainDecode:
    """A function that Grain's worker processes can be sent."""

    def __init__(self, decode):
        self.decode = decode

    def __call__(self, record):
        return self.decode(record[6:]), int(record[:6])


class SPDL(Files):
    """SPDL: files read and decoded by threads; FFmpeg crops and scales."""

    environment = "spdl"

    def epoch(self, folder, workers):
        import numpy as np
        import spdl.io
        from images import draw_box
        from spdl.pipeline import PipelineBuilder

        files = FileList(folder, None).files
        random.Random(1).shuffle(files)

        def decode(item):
            path, label = item
            data = read(path)
            packets = spdl.io.demux_image(data)
            height, width = packets.height, packets.width
            y, x, h, w = draw_box(random, height, width)
            crop = f"crop={w}:{h}:{x}:{y},scale={SIDE}:{SIDE}:flags=bilinear,format=pix_fmts=rgb24"
            frames = spdl.io.decode_packets(packets, filter_desc=crop)
            return spdl.io.to_numpy(spdl.io.convert_frames(frames)), label

        def collate(items):
            pixels, labels = zip(*items, strict=True)
            return np.stack(pixels), labels

        builder = PipelineBuilder().add_source(files).pipe(decode, concurrency=workers)
        pipeline = builder.aggregate(BATCH).pipe(collate).add_sink(4).build(num_threads=workers + 1)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator(timeout=60)


class DALI(WebDataset):
    """DALI's CPU pipeline over tars: decodes only the crop."""

    environment = "dali"
    streams = False

    def epoch(self, folder, workers):
        self.started = self.started or self.start(folder, workers)
        size = self.started.epoch_size("reader")
        for _ in range(size // BATCH):
            (images,) = self.started.run()
            yield (images.as_array(),)

    def start(self, folder, workers):
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


class FFCV(Peer):
    """FFCV's own files; it stores JPEGs that it has compressed again, at quality 90."""

    form = "ffcv"
    environment = "ffcv"

    def prepare(self, images, folder):
        from ffcv.fields import IntField, RGBImageField
        from ffcv.writer import DatasetWriter

        fields = {
            "image": RGBImageField(write_mode="jpg", max_resolution=self.options.get("side")),
            "label": IntField(),
        }
        writer = DatasetWriter(os.path.join(folder, "data.ffcv"), fields, num_workers=1)
        writer.from_indexed_dataset(PictureList(images))

    def epoch(self, folder, workers):
        self.started = self.started or self.start(folder, workers)
        yield from self.started

    def start(self, folder, workers):
        from ffcv.fields import decoders
        from ffcv.loader import Loader, OrderOption

        pipelines = {
            "image": [decoders.RandomResizedCropRGBImageDecoder((SIDE, SIDE))],
            "label": [decoders.IntDecoder()],
        }
        return Loader(
            os.path.join(folder, "data.ffcv"),
            batch_size=BATCH,
            num_workers=workers,
            order=OrderOption.RANDOM,
            pipelines=pipelines,
            os_cache=True,
        )


class FFCV256(FFCV):
    form = "ffcv256"


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


PEERS = {
    "pcrshard scan 2": PCRShard(scan=2),
    "pcrshard scan 5": PCRShard(scan=5),
    "pcrshard full": PCRShard(scan="full"),
    "pcrshard scan 2, threads": PCRShard(scan=2, threads=True),
    "pcrshard scan 5, threads": PCRShard(scan=5, threads=True),
    "pcrshard full, threads": PCRShard(scan="full", threads=True),
    "pcrshard 256 px, threads": PCRShard256(scan="full", threads=True),
    "pcrshard 256 px scan 5, threads": PCRShard256(scan=5, threads=True),
    "WebDataset .pcr_scan(5)": PCRInWebDataset(scan=5),
    "WebDataset pil": WebDataset(pil=True),
    "WebDataset tuned": WebDataset("tuned"),
    "256 px pil": StaticResize(pil=True),
    "256 px tuned": StaticResize("tuned"),
    "files pil": Files(),
    "files torchvision": TorchFiles(decoder_of="torchvision"),
    "files torchcodec": TorchFiles(decoder_of="torchcodec"),
    "MosaicML": Streaming(),
    "MosaicML tuned": Streaming("tuned"),
    "LitData": LitData(),
    "LitData tuned": LitData("tuned"),
    "HF parquet": HuggingFace(kind="parquet", image="image"),
    "HF webdataset": HuggingFaceTars(kind="webdataset", image="jpg"),
    "TFRecord": TFRecord(),
    "Grain": Grain(),
    "Grain tuned": Grain("tuned"),
    "SPDL": SPDL(),
    "DALI CPU": DALI(),
    "FFCV": FFCV(),
    "FFCV 256 px": FFCV256(side=256),
}
