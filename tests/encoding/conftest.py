"""Folders to encode."""

import pytest
from encode_support import image_bytes
from support import run_encode, write_files

from pcrshard.testing import make_jpeg


@pytest.fixture
def mixed_folder(tmp_path):
    """Four good images and three bad ones."""
    bad = {"cut.jpg": make_jpeg(9)[:-30], "empty.jpg": b"", "png.png": image_bytes("png")}
    return write_files(tmp_path / "mixed", {f"good{i}.jpg": make_jpeg(i) for i in range(4)} | bad)


@pytest.fixture(scope="session")
def larger_folder(tmp_path_factory):
    """Images that take some time to encode."""
    jpegs = [make_jpeg(i, 600, 800, quality=95) for i in range(6)]
    files = {f"{i:02d}.jpg": jpegs[i % 6] for i in range(48)}
    return write_files(tmp_path_factory.mktemp("larger"), files)


@pytest.fixture(scope="session")
def larger_dataset(larger_folder, tmp_path_factory):
    """The same as 12 shards; read only."""
    target = tmp_path_factory.mktemp("larger_dataset")
    run_encode(larger_folder, target, num_shards=12)
    return target
