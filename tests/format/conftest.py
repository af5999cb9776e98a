"""A shard with all that the tables of groups can hold."""

import pytest

from pcrshard import Shard, ShardFormat
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.encoding.shard_writer import encode_sample, write_shard
from pcrshard.format.group_table import decode_tables
from pcrshard.testing import make_jpeg


def keep_bad(_, file):
    return encode_jpeg(file) if file[:1] == b"\xff" else file


@pytest.fixture(scope="module", params=["compact", "preview"])
def table_shard(request, tmp_path_factory):
    """Color and gray images, a stream that some samples lack, a list, late fields, a kept file."""
    samples = []
    for i, mode in enumerate(["RGB", "L", "RGB", "CMYK"]):
        sample = {"__key__": f"k{i}", "jpg": make_jpeg(i, 30 + i, 41, mode), "npy": b"n" * i}
        sample["views.jpg"] = [make_jpeg(i, 8, 8)] * i
        if i % 2:
            sample["mask.jpg"] = make_jpeg(i, 9, 9, "L")
        else:
            sample["json"] = b"{}"
        samples.append(sample)
    samples.append({"__key__": "k4", "jpg": b"kept"})
    encoded = [encode_sample(sample, keep_bad) for sample in samples]
    path = tmp_path_factory.mktemp("tables") / "a-000000.tar"
    late = {"npy": 2, "json": "full"}
    write_shard(str(path), encoded, ShardFormat(layout=request.param, deferred=late))
    return Shard(str(path)), path.read_bytes()


@pytest.fixture
def tables(table_shard):
    """The table of each group of that shard, and of its tail."""
    shard, data = table_shard
    places = shard.index.table_places(0, shard.num_groups + 1)
    return [
        decode_tables(shard.index, [place], [data[place.start : place.stop]]) for place in places
    ]
