"""WebDataset and tar without pcrshard: promise 3 of the format."""

import json
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


def cut_at(url, folder, scan):
    """A copy of the prefix of a shard."""
    path = folder / f"{scan}.tar"
    with open(url, "rb") as file:
        path.write_bytes(file.read(pcrshard.Shard(str(url)).prefix_stop(scan)))
    return path


def test_a_compact_shard_is_one_record(shard_urls, tmp_path):
    """Stock WebDataset reads a shard as one sample whose fields are index, scan groups and tail,
    and a prefix cut at a member boundary as the same sample with fewer fields.
    """
    url = shard_urls[0]
    prefixes = [cut_at(url, tmp_path, scan) for scan in (1, 5, 10)]
    records = read_by_stock(url, *prefixes)
    groups = [f"scan{k:02d}" for k in range(1, 11)]
    assert list(records[0]["fields"]) == ["pcr", *groups, "tail"]
    for scan, record in zip((1, 5, 10), records[1:], strict=True):
        assert list(record["fields"]) == ["pcr", *groups[:scan]]


def test_a_preview_shard_shows_images(preview, tmp_path):
    """Stock WebDataset sees every sample as a real image with its label, also in any prefix."""
    index = pcrshard.Shard(str(preview)).index
    records = read_by_stock(*(cut_at(preview, tmp_path, scan) for scan in (2, 5, "full")))
    assert [record["key"] for record in records] == 3 * list(index.keys)
    assert all(list(record["fields"]) == ["cls", "jpg"] for record in records)
    sizes = [[width, height] for height, width in index.dims.tolist()]
    assert [record["size"] for record in records] == 3 * sizes


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
