"""What each scan is worth: figures of synthetic and real images, of copies, and of a network."""

import itertools
import math

import pytest
import torch
from support import write_files

import pcrshard
from pcrshard.errors import PCRError
from pcrshard.fidelity.advice import recommend
from pcrshard.fidelity.measure import measure
from pcrshard.fidelity.user_network import Network
from pcrshard.testing import make_jpeg

pytest.importorskip("cv2", reason="OPENCV IS NOT INSTALLED: pip install '.[fidelity]'")


def test_measure_gives_a_row_for_each_scan(large_dataset):
    """Bytes are those of the index; fidelity rises to that of the full image."""
    progress = []
    rows = measure(
        large_dataset,
        num_images=99,
        rounds=1,
        on_image=lambda *counts: progress.append(counts),
    )
    index, _ = pcrshard.open_dataset(large_dataset)
    assert [row.scan for row in rows] == list(range(1, 11))
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


def test_a_seed_draws_the_images(large_dataset):
    """The same seed measures the same images, another seed other ones."""
    found = [
        measure(large_dataset, num_images=2, seed=seed, rounds=1)[0].msssim for seed in (0, 0, 1, 2)
    ]
    assert found[0] == found[1]
    assert len(set(found)) > 1


def test_a_staged_copy_is_measured_against_its_highest_scan(large_dataset, tmp_path):
    """The last row is the best that is there; bytes are those of the whole dataset."""
    copy = str(tmp_path / "staged")
    pcrshard.stage(large_dataset, copy, 5)
    rows = measure(copy, rounds=1)
    whole = measure(large_dataset, rounds=1)
    assert [row.scan for row in rows] == [1, 2, 3, 4, 5]
    assert (rows[-1].msssim, rows[-1].psnr) == (1, math.inf)
    assert rows[0].bytes_per_image == whole[0].bytes_per_image


class RightAtTheTop(Network):
    """A network that is right about scans 9 and 10 only."""

    def classify(self, jpegs):
        label = self.function.pop(0)
        return [-1] * (len(jpegs) - 2) + [label, label]


def test_the_network_decides_what_is_recommended(dataset):
    """A scan at which it is wrong is not enough, however alike the pictures are."""
    _, urls = pcrshard.open_dataset(dataset)
    labels = [int(sample["cls"]) for url in urls for sample in pcrshard.Shard(url)]
    rows = measure(str(dataset), rounds=1, model=RightAtTheTop(labels))
    assert [row.top1 for row in rows] == [0] * 8 + [1, 1]
    advice = recommend(rows, min_msssim=0)
    # 24 equal answers do not say that of 100 none would differ.
    assert (advice.lowest, advice.scan, advice.images) == (9, 10, 1400)
    assert "cannot tell from 24 images: between scans 9 and 10" in advice.reason
    assert "100.0% of your network" in advice.reason
    low, high = rows[8].top1_change
    assert low == -high < -0.05
    assert rows[0].top1_change[1] < -0.75


def test_a_dataset_without_labels_says_so(large_dataset):
    """There is nothing to compare the network's answers with."""
    with pytest.raises(PCRError, match=r"number of a class in field 'cls' .* got None"):
        model = Network(lambda batch: torch.zeros(len(batch), 3), 32)
        measure(large_dataset, rounds=1, model=model)


def test_a_dataset_of_tiny_images_cannot_be_measured(tmp_path):
    """It says why."""
    write_files(tmp_path / "photos", {"tiny.jpg": make_jpeg(1, 8, 8)})
    pcrshard.encode(tmp_path / "photos", tmp_path / "shards", workers=1)
    with pytest.raises(PCRError, match="11 pixels"):
        measure(str(tmp_path / "shards"))


def test_kept_files_are_left_out_and_lists_count_each_image(tmp_path):
    """A dataset with a PNG that was kept, or with lists of images, is measured all the same."""
    kept, lists = tmp_path / "kept", tmp_path / "lists"
    files = {f"{i}.jpg": make_jpeg(i, 60, 60) for i in range(3)}
    write_files(tmp_path / "src", files | {"bad.jpg": b"\x89PNG no JPEG"})
    options = pcrshard.EncodeOptions(on_error="keep")
    pcrshard.encode(tmp_path / "src", kept, options, workers=1)
    with pcrshard.ShardWriter(lists) as writer:
        for i in range(2):
            images = [make_jpeg(j, 60, 60) for j in range(3)]
            writer.write({"__key__": str(i), "images.jpg": images})
    for folder, count in ((kept, 3), (lists, 6)):
        assert measure(str(folder), rounds=1)[0].num_images == count
