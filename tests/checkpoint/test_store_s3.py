"""A store on S3 (moto's server): ranged reads and leftovers."""

import fsspec
import torch
from states import tiny_state

from pcrshard.checkpoint import DeltaStore


def test_one_tensor_reads_little(s3):
    """Loading a small tensor reads its payload and the headers, but not the large tensors."""
    state = {"large": torch.randn(1000, 1000), "small": torch.randn(4, 4)}
    with DeltaStore(s3.url("names"), options=s3.storage_options) as store:
        store.save(state, blocking=True)
        s3.reset()
        assert torch.equal(store.load(names=["small"])["small"], state["small"])
    assert sum(request.body_bytes for request in s3.requests()) < 20_000


def test_leftovers_of_killed_writers_are_removed_after_an_hour(s3, monkeypatch):
    """An unreferenced file is removed after an hour; until then its writer may be running."""
    url, options = s3.url("killed"), s3.storage_options
    with DeltaStore(url, options=options) as store:
        store.save(tiny_state(1), blocking=True)
    fs, folder = fsspec.core.url_to_fs(url, **options)
    leftover = f"{folder}/000002-0123456789abcdef.pcd"
    fs.pipe_file(leftover, b"partial")
    for number, seconds in ((2, 3600.0), (3, -100.0)):
        monkeypatch.setattr("pcrshard.checkpoint.folder.LEFTOVER_SECONDS", seconds)
        with DeltaStore(url, options=options) as store:
            assert store.save(tiny_state(number), blocking=True) == number
            assert store.verify() == []
        fs.invalidate_cache()
        assert fs.exists(leftover) == (number == 2)
