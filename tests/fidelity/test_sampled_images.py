"""Images drawn at random: which ones, and from where."""

import random

import pcrshard
from pcrshard.fidelity.sampled_images import draw_images, pick


def test_pick_takes_each_image_once_from_few_shards():
    """For any sizes."""
    rng = random.Random(3)
    for _ in range(100):
        sizes = [rng.randint(1, 9) for _ in range(rng.randint(1, 9))]
        count, shards = rng.randint(1, 30), rng.randint(1, 9)
        picked = pick(rng, sizes, count, shards)
        assert len(picked) <= shards
        assert all(
            rows == sorted(set(rows)) and rows and rows[-1] < sizes[shard]
            for shard, rows in picked.items()
        )
        assert sum(map(len, picked.values())) <= count


def test_each_image_drawn_is_seen_once(large_dataset):
    """With the fields that were asked for, and one piece for each scan."""
    sample = draw_images(large_dataset, 99, 0, 8)
    seen = [(pieces, found["__key__"]) for pieces, found in sample.look(len)]
    assert len({key for _, key in seen}) == len(seen) == sample.num_images == 9
    assert {pieces for pieces, _ in seen} == {10}


def test_the_top_of_a_staged_copy(large_dataset, tmp_path):
    """It ends where the copy does, unless its origin is named."""
    copy = str(tmp_path / "copy")
    pcrshard.stage(large_dataset, copy, 2)
    assert draw_images(large_dataset, 1, 0, 8).top == "full"
    assert draw_images(copy, 1, 0, 8).top == 2
    assert draw_images(copy, 1, 0, 8, reference=large_dataset).top == "full"
