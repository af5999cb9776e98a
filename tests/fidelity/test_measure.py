"""What each scan is worth: figures of synthetic and real images, of copies, and of a network."""

import itertools
import math

import pytest
import torch

import pcrshard
from pcrshard.errors import PCRError, ScanUnavailable
from pcrshard.fidelity.advice import recommend
from pcrshard.fidelity.measure import measure
from pcrshard.fidelity.user_network import Network
from pcrshard.testing import make_jpeg

pytest.importorskip("cv2", reason="OPENCV IS NOT INSTALLED: pip install '.[fidelity]'")


def test_measure_gives_a_row_for_each_scan(large_dataset):
    """Bytes are those of the index; fidelity rises to that of the full image."""
    progress = []
    scans = (1, 2, 5, 10)
    rows = measure(
        large_dataset,
        scans,
        num_images=99,
        rounds=1,
        on_image=lambda *counts: progress.append(counts),
    )
    index, _ = pcrshard.open_dataset(large_dataset)
    assert [row.scan for row in rows] == list(scans)
    assert {row.num_images for row in rows} == {8}
    assert progress == [(i, 9) for i in range(1, 10)]
    for row in rows:
        assert row.bytes_per_image == index.prefix_bytes(row.scan) / 9
        assert row.saving == index.prefix_bytes("full") / index.prefix_bytes(row.scan)
        assert row.decode_seconds > 0
    for lower, higher in itertools.pairwise(rows):
        assert lower.msssim_quartile <= higher.msssim_quartile + 0.005
        assert lower.msssim <= higher.msssim + 0.005
        assert lower.psnr <= higher.psnr + 0.5
    assert rows[-1].msssim == 1
    assert rows[-1].psnr == math.inf


def test_rows_and_images_are_those_asked_for(large_dataset):
    """Full has the pixels of the last scan; another seed draws other images."""
    full, low = measure(large_dataset, ["full", 2], num_images=3, rounds=1)
    assert (full.scan, full.msssim, full.saving) == ("full", 1, 1)
    assert low.scan == 2
    assert low.msssim < 1
    found = [
        measure(large_dataset, [1], num_images=2, seed=seed, rounds=1)[0].msssim
        for seed in (0, 0, 1, 2)
    ]
    assert found[0] == found[1]
    assert len(set(found)) > 1


def test_a_staged_copy_is_measured_against_its_highest_scan(large_dataset, tmp_path):
    """Its scans are compared with the best that is there, and the rows say so."""
    copy = str(tmp_path / "staged")
    pcrshard.stage(large_dataset, copy, 5)
    rows = measure(copy, rounds=1)
    whole = measure(large_dataset, [1, 5], rounds=1)
    assert [row.scan for row in rows] == [1, 2, 3, 4, 5]
    assert {row.reference for row in rows} == {5}
    assert {row.reference for row in whole} == {"full"}
    assert (rows[-1].msssim, rows[-1].psnr) == (1, math.inf)
    assert rows[0].bytes_per_image == whole[0].bytes_per_image
    with pytest.raises(ScanUnavailable, match="holds scans 1 to 5 of 10"):
        measure(copy, [2, 7])


class AtFullOnly(Network):
    """A network that is right about the last pictures of each batch: scan 10 and the reference."""

    def classify(self, jpegs):
        label = self.function.pop(0)
        return [-1] * (len(jpegs) - 2) + [label, label]


def test_the_network_decides_what_is_recommended(dataset):
    """A scan at which it is wrong is not enough, however alike the pictures are."""
    _, urls = pcrshard.open_dataset(dataset)
    labels = [int(sample["cls"]) for url in urls for sample in pcrshard.Shard(url)]
    rows = measure(str(dataset), [1, 5, 10], rounds=1, model=AtFullOnly(labels))
    assert [row.top1 for row in rows] == [0, 0, 1]
    assert {row.reference_top1 for row in rows} == {1}
    advice = recommend(rows, min_msssim=0)
    assert advice.scan == 10
    assert "100.0% of your network" in advice.reason


def test_a_dataset_without_labels_says_so(large_dataset):
    """There is nothing to compare the network's answers with."""
    with pytest.raises(PCRError, match=r"number of a class in field 'cls' .* got None"):
        model = Network(lambda batch: torch.zeros(len(batch), 3), 32)
        measure(large_dataset, [1], rounds=1, model=model)


def test_a_dataset_of_tiny_images_cannot_be_measured(tmp_path):
    """It says why."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "tiny.jpg").write_bytes(make_jpeg(1, 8, 8))
    pcrshard.encode(str(tmp_path / "photos"), str(tmp_path / "shards"), workers=1)
    with pytest.raises(PCRError, match="11 pixels"):
        measure(str(tmp_path / "shards"))


def test_kept_files_are_left_out_and_lists_count_each_image(tmp_path):
    """A dataset with a PNG that was kept, or with lists of images, is measured all the same."""
    kept, lists = tmp_path / "kept", tmp_path / "lists"
    (tmp_path / "src").mkdir()
    for i in range(3):
        (tmp_path / "src" / f"{i}.jpg").write_bytes(make_jpeg(i, 60, 60))
    (tmp_path / "src" / "bad.jpg").write_bytes(b"\x89PNG no JPEG")
    options = pcrshard.EncodeOptions(on_error="keep")
    pcrshard.encode(str(tmp_path / "src"), str(kept), options, workers=1)
    with pcrshard.ShardWriter(str(lists)) as writer:
        for i in range(2):
            images = [make_jpeg(j, 60, 60) for j in range(3)]
            writer.write({"__key__": str(i), "images.jpg": images})
    for folder, count in ((kept, 3), (lists, 6)):
        assert measure(str(folder), [1], rounds=1)[0].num_images == count
