"""Crops and flips: the usual recipes, and the same for the same key, on every machine."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pcrshard.native.pool import Draw, draw_boxes, draw_key, draw_keys

RANDOM = Draw("random", (0.08, 1.0), (3 / 4, 4 / 3), 0.5)
CENTER = RANDOM._replace(crop="center")
NARROW = Draw("random", (0.25, 0.5), (0.5, 2.0), 0.0)
WHOLE = RANDOM._replace(crop=None)

# Of key (7, 2, 100 + place), what images of these sizes draw: RANDOM, CENTER, NARROW, WHOLE.
GOLDEN = {
    (375, 500): [[26, 185, 210, 243, 0], [23, 86, 328, 328, 0], [19, 155, 239, 253, 0], 1],
    (500, 333): [[196, 42, 260, 226, 0], [104, 21, 291, 291, 1], [87, 89, 205, 223, 0], 0],
    (64, 64): [[33, 36, 23, 20, 0], [4, 4, 56, 56, 1], [14, 6, 33, 43, 0], 1],
    (10, 1000): [[0, 493, 10, 13, 0], [0, 495, 9, 9, 0], [0, 490, 10, 20, 0], 1],
    (4000, 3000): [
        [1175, 597, 2746, 2076, 1],
        [687, 187, 2625, 2625, 1],
        [229, 424, 1834, 1826, 0],
        0,
    ],
    (1, 1): [[0, 0, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 1, 1, 0], 1],
}


def test_crops_are_those_of_earlier_versions():
    """A job that resumes with a newer version, or on another machine, draws the same crops."""
    assert draw_key(0, 1, 2) == 17650578182555822980
    assert draw_key(2**70 + 5, 3, 11) == 14204240577734904211
    assert draw_key(np.int64(0), 1, np.int64(2)) == 17650578182555822980
    keys = draw_keys((7, 2), range(100, 106))
    assert keys == [draw_key(7, 2, number) for number in range(100, 106)]
    for key, (size, expected) in zip(keys, GOLDEN.items(), strict=True):
        *cropped, whole = draw_boxes(key, size, [RANDOM, CENTER, NARROW, WHOLE]).tolist()
        assert [*cropped, whole[4]] == expected
        assert whole[:4] == [0, 0, 0, 0]
    # Of an image of shorter side 256, the middle crop is the 224 of CenterCrop.
    assert draw_boxes(0, (256, 320), [CENTER])[0, :4].tolist() == [16, 48, 224, 224]


@given(st.integers(0, 1 << 70), st.integers(1, 3000), st.integers(1, 3000))
def test_crops_stay_inside(seed, height, width):
    """Every crop is a part of its image; the middle one is a square."""
    boxes = draw_boxes(draw_key(seed), (height, width), [RANDOM, NARROW, CENTER])[:, :4]
    for y, x, h, w in boxes.tolist():
        assert 0 <= y < y + h <= height
        assert 0 <= x < x + w <= width
    assert boxes[2, 2] == boxes[2, 3]


def test_random_crops_have_the_asked_distribution():
    """Areas and shapes spread over their ranges, as in torchvision; the largest areas fit less
    often.
    """
    drawn = [draw_boxes(key, (1000, 1000), [RANDOM])[0] for key in draw_keys((1,), range(4000))]
    boxes = np.array(drawn, float)
    areas, shapes = boxes[:, 2] * boxes[:, 3] / 1e6, np.log(boxes[:, 3] / boxes[:, 2])
    assert 0.45 < areas.mean() < 0.53
    assert abs(shapes.mean()) < 0.02
    assert shapes.min() > np.log(0.74)
    assert shapes.max() < np.log(1.35)
    assert 0.46 < boxes[:, 4].mean() < 0.54
