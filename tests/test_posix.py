"""Systems without Linux's own calls, such as macOS: each is hidden, and the result is the same."""

import mmap
import os

import pytest
from support import write_files

import pcrshard
from pcrshard.testing import make_jpeg

LINUX_ONLY = {
    os: ("sched_getaffinity", "posix_fadvise", "RWF_NOWAIT", "POSIX_FADV_WILLNEED"),
    mmap: ("MADV_HUGEPAGE",),
}


@pytest.fixture
def posix(monkeypatch):
    """A system that has none of LINUX_ONLY."""
    for module, names in LINUX_ONLY.items():
        for name in names:
            monkeypatch.delattr(module, name)


def test_encode_and_load_without_linux_calls(posix, tmp_path):
    """Encoding by two processes and training from the shards need only what POSIX has."""
    photos = {f"cat/{i}.jpg": make_jpeg(i, 640, 640, quality=95) for i in range(8)}
    write_files(tmp_path / "photos", photos)
    options = pcrshard.EncodeOptions(num_shards=2)
    pcrshard.encode(tmp_path / "photos", tmp_path / "shards", options, workers=2)
    dataset = pcrshard.PCRDataset(tmp_path / "shards", cache_dir=str(tmp_path / "cache"))
    assert len(dataset) == 8
    decoder = pcrshard.ImageDecoder(224, "center")
    dataset = pcrshard.PCRDataset(tmp_path / "shards", decoder=decoder)
    batches = list(pcrshard.PCRLoader(dataset, 4, threads=2))
    assert [batch["jpg"].shape for batch in batches] == [(4, 3, 224, 224)] * 2
