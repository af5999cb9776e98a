"""Folders to encode."""

import pytest
from encode_support import (
    save_image,
)
from support import run_encode

from pcrshard.testing import make_jpeg


@pytest.fixture
def mixed_folder(tmp_path):
    """Four good images and three bad ones."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    for i in range(4):
        (folder / f"good{i}.jpg").write_bytes(make_jpeg(i))
    (folder / "cut.jpg").write_bytes(make_jpeg(9)[:-30])
    (folder / "empty.jpg").write_bytes(b"")
    save_image(folder / "png.png")
    return folder


@pytest.fixture(scope="session")
def larger_folder(tmp_path_factory):
    """Images that take some time to encode."""
    folder = tmp_path_factory.mktemp("larger")
    jpegs = [make_jpeg(i, 600, 800, quality=95) for i in range(6)]
    for i in range(48):
        (folder / f"{i:02d}.jpg").write_bytes(jpegs[i % 6])
    return folder


@pytest.fixture(scope="session")
def larger_dataset(larger_folder, tmp_path_factory):
    target = tmp_path_factory.mktemp("larger_dataset")
    run_encode(larger_folder, target, num_shards=12)
    return target
