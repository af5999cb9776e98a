"""The plan of a shard's members is the tar that any tool sees."""

import dataclasses
import tarfile

import numpy as np
import pytest

from pcrshard import Shard, ShardFormat
from pcrshard.encoding.shard_writer import encode_sample, write_shard
from pcrshard.errors import EncodeError
from pcrshard.format.tar_members import index_name, lay_out, plan_members, tar_header
from pcrshard.testing import make_jpeg

MODES = ["RGB", "L", "RGB"]


@pytest.fixture(params=["compact", "preview"])
def shard(request, tmp_path):
    """A shard of three images, one of them gray, one with a key that needs a pax header."""
    keys = ["a/0", "b" * 120, "c/ünï"]
    samples = [
        encode_sample({"__key__": key, "jpg": make_jpeg(i, 20, 30, MODES[i]), "cls": i})
        for i, key in enumerate(keys)
    ]
    path = tmp_path / "data-000000.tar"
    fmt = ShardFormat(layout=request.param, preview_fields=("cls",))
    write_shard(str(path), samples, fmt)
    return Shard(str(path))


def test_the_plan_is_what_tar_lists(shard):
    """Names, sizes and ends of members are those that Python's tarfile finds in the file."""
    planned = list(plan_members(shard.index, "data-000000"))
    with tarfile.open(shard.url) as tar:
        index, *listed = tar.getmembers()
    assert index.name == index_name(shard.index.schema, "data-000000")
    assert [(m.name, m.size) for m in listed] == [(m.name, m.size) for m in planned]
    ends = {}
    for member, info in zip(planned, listed, strict=True):
        ends[member.row] = -(-(info.offset_data + info.size) // 512) * 512
    assert ends == {row: shard.head.prefix_stops[row] for row in ends}


def test_headers_are_tarfiles(shard):
    """A member's header is what stands before its data."""
    with open(shard.url, "rb") as file, tarfile.open(shard.url) as tar:
        data = file.read()
        infos = {info.name: info for info in tar}
    for member in plan_members(shard.index, "data-000000"):
        header = member.header()
        stop = infos[member.name].offset_data
        assert data[stop - len(header) : stop] == header == tar_header(member.name, member.size)


def test_an_index_is_laid_out_again_as_it_was(shard):
    """Offsets, stops and checksums follow from the other columns alone."""
    with open(shard.url, "rb") as file:
        data = file.read()
    blank = dataclasses.replace(shard.index, base_offsets=np.zeros_like(shard.index.base_offsets))
    index, written = lay_out(blank, "data-000000")
    assert index.head == shard.head
    assert data[512 : 512 + len(written)] == written


def test_a_group_beyond_a_tar_header_is_refused(shard):
    """A group of 8 GiB is refused with the remedy, before a byte is written."""
    sizes = shard.index.sizes.copy()
    sizes[-2] = 0xFFFFFFFE
    index = dataclasses.replace(shard.index, sizes=sizes)
    with pytest.raises(EncodeError, match="use fewer samples per shard"):
        lay_out(index, "data-000000")
