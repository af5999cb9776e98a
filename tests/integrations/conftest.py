"""What the tests of the integrations share."""

import glob
import os
import tarfile

import pytest
from support import run_encode

import pcrshard


@pytest.fixture(scope="session")
def plain_tars(dataset, tmp_path_factory):
    """The same samples at scan 5 as stock WebDataset tars, made by the standard library."""
    folder = tmp_path_factory.mktemp("plain")
    for url in sorted(glob.glob(f"{dataset}/*.tar")):
        with tarfile.open(folder / os.path.basename(url), "w") as tar:
            for sample in pcrshard.Shard(url).samples(5):
                for field in ("jpg", "cls"):
                    path = folder / "member"
                    path.write_bytes(sample[field])
                    tar.add(path, f"{sample['__key__']}.{field}")
    return sorted(str(path) for path in folder.glob("*.tar"))


@pytest.fixture(scope="session")
def preview_folder(synthetic_folder, tmp_path_factory):
    """The synthetic folder in the preview layout, base scans 1 and 2, labels as members."""
    folder = tmp_path_factory.mktemp("preview")
    fmt = pcrshard.ShardFormat("standard", layout="preview", base=2, preview_fields=("cls",))
    run_encode(synthetic_folder, folder, num_shards=2, fmt=fmt)
    return folder
