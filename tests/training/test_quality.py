"""A quality in place of a scan: datasets that are encoded differently at one fidelity."""

import numpy as np
import pytest
import torch
import webdataset as wds
from support import read_samples, run_encode, write_files

import pcrshard
from pcrshard import PCRDataset, PCRLoader, ScanLevel, ShardFormat, open_dataset
from pcrshard.cli.main import main
from pcrshard.errors import ScanUnavailable
from pcrshard.testing import make_jpeg


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same pictures by two scripts and by levels."""
    root = tmp_path_factory.mktemp("quality")
    pictures = {f"a/{n:02}.jpg": make_jpeg(n, 64, 64, quality=92) for n in range(20)}
    write_files(root / "src", pictures)
    for script in ("standard", "q95", "levels"):
        run_encode(root / "src", root / script, name=script, fmt=ShardFormat(script))
    return {script: str(root / script) for script in ("standard", "q95", "levels")}


def bytes_at(folder, scan):
    """The JPEGs of a dataset at a scan, by key."""
    return {key: sample["jpg"] for key, sample in read_samples(folder, scan).items()}


@pytest.mark.parametrize("quality", [0.8, 0.95, 1.0])
def test_a_quality_is_the_lowest_scan_that_has_it(folders, quality):
    """pcr.json says which scan, and the dataset reads that one."""
    for folder in folders.values():
        index, _ = open_dataset(folder)
        means = [mean for mean, _ in index.similarity]
        scan = next(scan for scan, mean in enumerate(means, 1) if mean >= quality)
        assert index.scan_of_quality(quality) == scan
        dataset = PCRDataset(folder, quality=quality)
        assert dataset.scan == PCRDataset(folder).at(quality=quality).scan == scan
        expected = bytes_at(folder, scan)
        assert all(dataset[n]["jpg"] == expected[dataset.keys[n]] for n in range(4))


def test_datasets_of_other_scripts_are_mixed_at_a_quality(folders):
    """Each shard is read at its own dataset's scan: by number, by a loader, as a WebDataset."""
    quality = 0.93
    expected = {}
    for folder in folders.values():
        index, _ = open_dataset(folder)
        for key, jpeg in bytes_at(folder, index.scan_of_quality(quality)).items():
            expected.setdefault(key, set()).add(jpeg)
    dataset = PCRDataset([*folders.values()], quality=quality)
    assert len({*dataset.scan.scans}) > 1
    found = {}
    for batch in PCRLoader(dataset, 6, drop_last=False):
        for key, jpeg in zip(batch["__key__"], batch["jpg"], strict=True):
            found.setdefault(key, set()).add(jpeg)
    assert found == expected
    assert {dataset[n]["jpg"] for n in range(len(dataset))} == set().union(*expected.values())
    urls = [url for folder in folders.values() for url in open_dataset(folder)[1]]
    stream = wds.WebDataset(urls, shardshuffle=False).pcr_scan(quality=quality)
    assert {sample["jpg"] for sample in stream} == set().union(*expected.values())


def test_workers_read_the_same(folders):
    """Processes get the scans of the datasets."""
    dataset = PCRDataset([folders["q95"], folders["standard"]], quality=0.9, decoder=32)
    alone = [batch["jpg"] for batch in PCRLoader(dataset, 8)]
    apart = [batch["jpg"] for batch in PCRLoader(dataset, 8, num_workers=1)]
    assert all(map(torch.equal, alone, apart))


@pytest.mark.parametrize("scan", [3, 0.5, ScanLevel(3)])
def test_a_number_for_different_datasets_is_refused(folders, scan):
    """Scan 3 of one script is not scan 3 of another: a network would learn which is which."""
    with pytest.raises(ScanUnavailable, match=r"quality=.*encoded differently"):
        PCRDataset([folders["q95"], folders["standard"]], scan=scan)
    assert len(PCRDataset([folders["q95"], folders["standard"]], scan="full")) == 40


def test_what_a_quality_cannot_be(folders, tmp_path):
    """Not beside a scan, not above 1, and not above what a staged copy holds."""
    with pytest.raises(ValueError, match="a scan or a quality"):
        PCRDataset(folders["q95"], scan=3, quality=0.9)
    with pytest.raises(ValueError, match="up to 1"):
        PCRDataset(folders["q95"], quality=95)
    assert main(["stage", folders["q95"], str(tmp_path / "copy"), "--quality", "0.8"]) == 0
    assert np.isfinite(len(PCRDataset(str(tmp_path / "copy"), quality=0.8)[0]["jpg"]))
    with pytest.raises(ScanUnavailable, match="staged copy holds"):
        PCRDataset(str(tmp_path / "copy"), quality=1.0)


def test_hugging_face_takes_a_quality(folders):
    """``load_dataset(quality=)`` gives the pictures of that scan."""
    index, _ = open_dataset(folders["levels"])
    rows = pcrshard.hf.load_dataset(folders["levels"], quality=0.9, streaming=True)
    expected = bytes_at(folders["levels"], index.scan_of_quality(0.9))
    assert next(iter(rows))["__key__"] in expected


def test_commands_take_a_quality(folders, tmp_path, capsys):
    """export and plan name the scan that it is."""
    index, _ = open_dataset(folders["levels"])
    scan = index.scan_of_quality(0.9)
    out = str(tmp_path / "out")
    assert main(["export", folders["levels"], out, "--quality", "0.9"]) == 0
    assert f"scan: {scan}" in capsys.readouterr().out
    assert main(["plan", folders["levels"], "--quality", "0.9"]) == 0
    with pytest.raises(SystemExit):
        main(["export", folders["levels"], out, "--quality", "0.9", "--scan", "3"])
    assert "not allowed with --scan" in capsys.readouterr().err
