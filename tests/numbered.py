"""Datasets whose samples are numbered, for the tests of datasets and loaders."""

import itertools
import json

from support import write_tar

from pcrshard import PCRDataset, PCRLoader, ShardFormat, ShardWriter, index_tars, open_dataset
from pcrshard.testing import make_jpeg


def write(folder, samples, rows=6, **options):
    """A dataset of these samples."""
    how = {"samples_per_shard": rows, "fmt": ShardFormat("standard")} | options
    with ShardWriter(str(folder), **how) as writer:
        for sample in samples:
            writer.write(sample)
    return str(folder)


def write_tars(folder, samples, rows=6):
    """The same as plain tars with an index."""
    for number, start in enumerate(range(0, len(samples), rows)):
        own = samples[start : start + rows]
        members = {
            f"{sample['__key__']}.{name}": value
            if isinstance(value, bytes)
            else str(value).encode()
            for sample in own
            for name, value in sample.items()
            if name != "__key__"
        }
        write_tar(folder / f"data-{number:06d}.tar", members)
    index_tars(folder)
    return str(folder)


WRITERS = {"shards": write, "tars": write_tars}


def scan_of(urls, scan):
    """A scan of datasets: plain tars have only the full one."""
    first = urls[0] if isinstance(urls, list) else urls
    return scan if open_dataset(first)[0].num_groups else "full"


def numbered(count, first=0):
    """Small images; ``cls`` is the sample's id, and no two samples of a dataset look alike."""
    numbers = range(first, first + count)
    jpegs = [make_jpeg(i, 20 + i % 3, 24 - i % 4, quality=90) for i in numbers]
    assert len(set(jpegs)) == count
    return [
        {"__key__": f"k{i:03d}", "jpg": jpeg, "cls": i}
        for i, jpeg in zip(numbers, jpegs, strict=True)
    ]


def ids(batches):
    """The ``cls`` of all samples, batch by batch."""
    return [batch["cls"].tolist() for batch in batches]


def flat(batches):
    """The samples of all batches."""
    return list(itertools.chain(*batches))


OF_DATASETS = ("scan", "decoder", "fields", "transform")


def loader_of(urls, batch_size, *, epoch=None, **options):
    """A loader of a new dataset; ``epoch`` is the one that it reads next."""
    choices = {name: options.pop(name) for name in OF_DATASETS if name in options}
    if "scan" in choices:
        choices["scan"] = scan_of(urls, choices["scan"])
    made = PCRLoader(PCRDataset(urls, **choices), batch_size, **options)
    if epoch is not None:
        made.set_epoch(epoch)
    return made


def through_json(state):
    """What a checkpoint keeps of a state; small."""
    text = json.dumps(state)
    assert len(text) < 1000
    return json.loads(text)
