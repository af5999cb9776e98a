"""WebDataset and tar without pcrshard: promise 3 of the format."""

import json
import os
import subprocess
import sys
import tarfile

import pytest

import pcrshard

READ = """
import io, json, sys, warnings
warnings.simplefilter("ignore")
import webdataset as wds
from PIL import Image
assert not hasattr(wds.WebDataset, "pcr_scan")
samples = list(wds.WebDataset(sys.argv[1:], shardshuffle=False))

def describe(sample):
    fields = {name: len(value) for name, value in sample.items() if name[0] != "_"}
    size = None
    if "jpg" in sample:
        size = Image.open(io.BytesIO(sample["jpg"])).convert("RGB").size
    return {"key": sample["__key__"], "fields": fields, "size": size}

print(json.dumps([describe(sample) for sample in samples]))
"""


def read_by_stock(*paths):
    result = subprocess.run(
        [sys.executable, "-c", READ, *map(str, paths)], capture_output=True, check=True
    )
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def preview(synthetic_folder, tmp_path_factory):
    """The synthetic folder in the preview layout, one shard."""
    folder = tmp_path_factory.mktemp("preview")
    fmt = pcrshard.ShardFormat(layout="preview", base=2, preview_fields=("cls",))
    pcrshard.encode(
        str(synthetic_folder), str(folder), pcrshard.EncodeOptions(num_shards=1, fmt=fmt), workers=1
    )
    return folder / "data-000000.tar"


def test_a_compact_shard_is_one_record(shard_urls):
    """Stock WebDataset reads a shard as one sample whose fields are index, scan groups and tail."""
    (record,) = read_by_stock(shard_urls[0])
    assert list(record["fields"]) == ["pcr", *(f"scan{k:02d}" for k in range(1, 11)), "tail"]


@pytest.mark.parametrize("scan", [1, 5, 10])
def test_a_compact_prefix_is_a_shorter_record(scan, shard_urls, tmp_path):
    """A prefix cut at a member boundary reads as the same record with fewer fields."""
    stop = pcrshard.Shard(shard_urls[0]).prefix_stop(scan)
    path = tmp_path / os.path.basename(shard_urls[0])
    with open(shard_urls[0], "rb") as file:
        path.write_bytes(file.read(stop))
    (record,) = read_by_stock(path)
    assert list(record["fields"]) == ["pcr", *(f"scan{k:02d}" for k in range(1, scan + 1))]


@pytest.mark.parametrize("scan", [2, 5, "full"])
def test_a_preview_shard_shows_images(scan, preview, tmp_path):
    """Stock WebDataset sees every sample as a real image with its label, also in any prefix."""
    path = tmp_path / preview.name
    shard = pcrshard.Shard(str(preview))
    path.write_bytes(preview.read_bytes()[: shard.prefix_stop(scan)])
    records = read_by_stock(path)
    assert [record["key"] for record in records] == list(shard.index.keys)
    assert all(list(record["fields"]) == ["cls", "jpg"] for record in records)
    assert [record["size"] for record in records] == [[w, h] for h, w in shard.index.dims.tolist()]


def test_preview_images_are_the_base_scans(preview):
    """The image that others see is the one that pcrshard gives at the base scan."""
    ours = {sample["__key__"]: sample["jpg"] for sample in pcrshard.Shard(str(preview)).samples(2)}
    with tarfile.open(preview) as tar:
        theirs = {
            i.name.removesuffix(".jpg"): tar.extractfile(i).read()
            for i in tar
            if i.name.endswith(".jpg")
        }
    assert theirs == ours


def test_tar_lists_and_unpacks(shard_urls, preview, tmp_path):
    """The tar command lists and unpacks both layouts without a warning."""
    for path in (shard_urls[0], str(preview)):
        listed = subprocess.run(["tar", "tf", path], capture_output=True, check=True)
        assert listed.stderr == b""
        unpacked = subprocess.run(
            ["tar", "xf", path, "-C", tmp_path], capture_output=True, check=True
        )
        assert unpacked.stderr == b""
        assert all((tmp_path / name).exists() for name in listed.stdout.decode().splitlines())
