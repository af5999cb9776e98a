"""The members of a shard fit into tar headers."""

import dataclasses

import numpy as np
import pytest
from support import write_shard

from pcrshard import Shard, ShardFormat
from pcrshard.encoding.shard_writer import encode_sample
from pcrshard.errors import EncodeError
from pcrshard.format.group_table import decode_tables
from pcrshard.format.tar_members import lay_out
from pcrshard.testing import make_jpeg

MODES = ["RGB", "L", "RGB"]


@pytest.fixture(params=["compact", "preview"])
def shard(request, tmp_path):
    """A shard of three images, one of them gray, one with the longest key; the longest field."""
    keys = ["a/0", "b" * 1024, "c/ünï"]
    samples = [
        encode_sample(
            {"__key__": key, "jpg": make_jpeg(i, 20, 30, MODES[i]), "cls": i, "f" * 100: b""}
        )
        for i, key in enumerate(keys)
    ]
    path = tmp_path / "data-000000.tar"
    fmt = ShardFormat("standard", layout=request.param, preview_fields=("cls",))
    write_shard(str(path), samples, fmt)
    return Shard(path)


def tables_of(shard):
    """The tables of all groups."""
    with open(shard.url, "rb") as file:
        data = file.read()
    places = shard.index.table_places(0, shard.index.num_groups + 1)
    return [decode_tables(shard.index, [place], data) for place in places]


def test_a_group_beyond_a_tar_header_is_refused(shard):
    """A group of 8 GiB is refused with the remedy, before a byte is written; a byte less is not."""
    *tables, tail = tables_of(shard)
    room = (1 << 33) - len(tail.encoded)

    def lay_out_tail(size):
        sizes = np.array([[size // 2, size - size // 2, 0]], np.uint32)
        lay_out(shard.index, [*tables, dataclasses.replace(tail, sizes=sizes)], "data-000000")

    lay_out_tail(room - 1)
    with pytest.raises(EncodeError, match="use fewer samples per shard"):
        lay_out_tail(room)
