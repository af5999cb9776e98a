"""WebDataset and tar without pcrshard: promise 3 of the format."""

import json
import subprocess

import pytest
from support import run_python

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


@pytest.fixture(scope="module")
def preview(preview_folder):
    """A shard in the preview layout."""
    return preview_folder / "data-000000.tar"


def cut_at(url, folder, scan):
    """A copy of the prefix of a shard."""
    path = folder / f"{scan}.tar"
    with open(url, "rb") as file:
        path.write_bytes(file.read(pcrshard.Shard(url).prefix_stop(scan)))
    return path


def test_stock_webdataset_reads_both_layouts(shard_urls, preview, tmp_path):
    """A compact shard is one sample whose fields are index, scan groups and tail, a prefix the same
    with fewer fields; of a preview, every sample is a real image with its label, in any prefix.
    """
    scans = (1, 5, 10)
    (tmp_path / "compact").mkdir()
    compact = [cut_at(shard_urls[0], tmp_path / "compact", scan) for scan in scans]
    shown = [cut_at(preview, tmp_path, scan) for scan in (2, 5, "full")]
    records = json.loads(run_python("-c", READ, shard_urls[0], *compact, *shown))
    groups = [f"scan{k:02d}" for k in range(1, 11)]
    assert list(records[0]["fields"]) == ["pcr", *groups, "tail"]
    for scan, record in zip(scans, records[1:4], strict=True):
        assert list(record["fields"]) == ["pcr", *groups[:scan]]
    index = pcrshard.Shard(preview).index
    assert [record["key"] for record in records[4:]] == 3 * list(index.keys)
    assert all(list(record["fields"]) == ["cls", "jpg"] for record in records[4:])
    sizes = [[width, height] for height, width in index.dims.tolist()]
    assert [record["size"] for record in records[4:]] == 3 * sizes


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
