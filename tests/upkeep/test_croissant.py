"""``croissant.json``, read by MLCommons' own library; ``tests/cli/test_card.py`` writes it."""

import hashlib
import io
import json
import os
import subprocess
import sys

import pytest
from PIL import Image
from support import run_encode

import pcrshard
from pcrshard.cli.main import main

CHECK = """
import io, json, sys
import mlcroissant
dataset = mlcroissant.Dataset(jsonld=sys.argv[1])
issues = dataset.metadata.issues
sets = [each.name for each in dataset.metadata.record_sets]
records = {name: list(dataset.records(record_set=name)) for name in sets}
for record in records.get("images", []):
    image = record.pop("images/content").convert("RGB")
    record["pixels"] = [image.mode, list(image.size), image.tobytes().hex()]
print(json.dumps([sorted(issues.errors), records], default=bytes.decode))
"""


@pytest.fixture
def load(tmp_path_factory):
    """What mlcroissant makes of a file, in a process of its own: it warns on import."""
    # It knows unpacked tars by their relative name alone.
    cache = str(tmp_path_factory.mktemp("croissant"))
    pytest.importorskip("mlcroissant", reason="MLCROISSANT IS NOT INSTALLED: pcrshard[croissant]")

    def run(folder):
        command = [sys.executable, "-W", "ignore", "-c", CHECK, str(folder / "croissant.json")]
        environment = os.environ | {"CROISSANT_CACHE": cache}
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    return run


def test_croissant_readers_load_a_preview(load, synthetic_folder, tmp_path):
    """Shards and small images are records; an image is what a job reads at the base scan."""
    fmt = pcrshard.ShardFormat(layout="preview", base=2)
    run_encode(synthetic_folder, tmp_path, num_shards=2, fmt=fmt)
    assert main(["card", str(tmp_path), "--license", "cc0-1.0"]) == 0
    errors, records = load(tmp_path)
    assert errors == []
    index, urls = pcrshard.open_dataset(tmp_path)
    assert [(row["shards/name"], row["shards/num_samples"]) for row in records["shards"]] == [
        (entry.name, entry.num_samples) for entry in index.shards
    ]
    expected = []
    for url in urls:
        for sample in pcrshard.Shard(url).samples(2):
            image = Image.open(io.BytesIO(sample["jpg"])).convert("RGB")
            expected.append([image.mode, list(image.size), image.tobytes().hex()])
    assert sorted(row["pixels"] for row in records["images"]) == sorted(expected)


def test_a_damaged_shard_is_noticed(synthetic_folder, tmp_path):
    """The checksums are those of the files."""
    run_encode(synthetic_folder, tmp_path, num_shards=1)
    assert main(["card", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "croissant.json").read_text())
    for node in written["distribution"]:
        data = (tmp_path / node["contentUrl"]).read_bytes()
        assert node["sha256"] == hashlib.sha256(data).hexdigest()
    assert [node["@id"] for node in written["recordSet"]] == ["shards"]  # no preview, no images
