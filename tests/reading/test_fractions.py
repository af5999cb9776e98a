"""A fraction of the full bytes is the same scan through every integration and command."""

import json

import pytest
import webdataset as wds
from imported_later import Later

from pcrshard import PCRDataset, PCRLoader, open_dataset
from pcrshard.cli.main import main
from pcrshard.errors import ScanUnavailable

datasets, hf = Later("datasets"), Later("pcrshard.hf")


@pytest.fixture
def half(dataset):
    """The highest scan of at most half of the bytes, by the dataset index."""
    index, _ = open_dataset(dataset)
    full = index.prefix_bytes("full")
    return max(scan for scan in range(1, 11) if index.prefix_bytes(scan) <= full / 2)


def test_integrations(dataset, half):
    """WebDataset, `datasets` and PCRDataset read the same bytes at ``scan=0.5``."""
    index, urls = open_dataset(dataset)
    expected = [s["jpg"] for s in wds.WebDataset(urls, shardshuffle=False).pcr_scan(half)]
    samples = wds.WebDataset(urls, shardshuffle=False).pcr_scan(0.5, index=index)
    assert [sample["jpg"] for sample in samples] == expected
    loader = PCRLoader(PCRDataset(dataset, scan=0.5), 1, shuffle=False)
    assert [batch["jpg"][0] for batch in loader] == expected
    found = hf.load_dataset(dataset, scan=0.5, streaming=True, split="train")
    assert [
        row["jpg"]["bytes"] for row in found.cast_column("jpg", datasets.Image(decode=False))
    ] == expected
    with pytest.raises(ValueError, match="index="):
        wds.WebDataset(urls, shardshuffle=False).pcr_scan(0.5)
    with pytest.raises(ScanUnavailable, match="scan 1 takes"):
        PCRDataset(dataset, scan=0.001)


def test_commands(dataset, half, tmp_path, capsys):
    """``stage`` and ``export`` take it, too, and say which scan it is."""
    assert main(["stage", str(dataset), str(tmp_path / "b"), "--scan", "0.5", "--json"]) == 0
    moved = json.loads(capsys.readouterr().out)["copied_bytes"]
    assert moved == open_dataset(dataset)[0].prefix_bytes(half)
    assert main(["export", str(dataset), str(tmp_path / "c"), "--scan", "0.5"]) == 0
    assert f"scan: {half}\n" in capsys.readouterr().out
