"""Fixtures of this folder."""

import pytest
from support import write_files

import pcrshard
from pcrshard.testing import make_jpeg


@pytest.fixture(scope="session")
def large_dataset(tmp_path_factory):
    """Two shards: six images large enough for five scales, one gray, one small, one tiny."""
    folder, target = tmp_path_factory.mktemp("large"), tmp_path_factory.mktemp("large-shards")
    files = {f"{i}.jpg": make_jpeg(i, 180 + i, 200 - i, quality=90) for i in range(6)}
    files["gray.jpg"] = make_jpeg(7, 190, 190, "L")
    files |= {"small.jpg": make_jpeg(8, 60, 190), "tiny.jpg": make_jpeg(9, 10, 190)}
    write_files(folder, files)
    pcrshard.encode(folder, target, pcrshard.EncodeOptions(num_shards=2), workers=1)
    return str(target)
